"""The scripts behind the figures of the README and of docs/.  Each runs from the repository's root,
``python -m benchmarks.rollout --help``; the rows that they left are in ``results/``.
"""
