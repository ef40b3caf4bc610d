"""The learning experiments, with their rows: how FP8 learns beside BF16, what a train-inference
mismatch costs, how 8-bit moments and FP8 gradients compare, and how a cluster would scale.

``python -m experiments.NAME --help`` says what each measures; docs/proof.md reads the rows.
"""
