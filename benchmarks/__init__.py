"""What the figures of README and docs were measured with; each module runs from the repository's
root: ``python -m benchmarks.rollout --help``.

Rows that were kept are under ``results/``, raw curves compressed (``common.read_rows`` reads both).
"""
