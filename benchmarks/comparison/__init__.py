"""The parts of ``benchmarks/rollout.py``: the same work given to two engines, the floor under both,
and the table.
"""
