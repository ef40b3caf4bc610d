"""A training: its plan, what a run owns, the two loops, their logs, and the processes that only
sample.
"""
