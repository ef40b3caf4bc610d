"""The parts of ``benchmarks/end_to_end.py``: whole steps of reinforcement learning, ours and those
of an outside baseline.
"""
