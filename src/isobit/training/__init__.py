"""From graded completions to new weights: packing into micro-batches, forward and backward, the
optimiser, publishing.
"""
