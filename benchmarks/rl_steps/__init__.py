"""The parts of ``benchmarks.end_to_end``: whole steps of reinforcement learning, ours and those
of an outside baseline.
"""
