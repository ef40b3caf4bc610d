"""The parts of ``benchmarks.rollout``: the same work given to two engines, the floor under both,
and the table.
"""
