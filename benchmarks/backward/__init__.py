"""The parts of ``benchmarks.gradients``: how near the FP8 backward is to the exact one, and what
it costs that it repeats its bits.
"""
