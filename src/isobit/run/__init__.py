"""A run from start to end: the two loops, what a run owns, its plan, its log, and how its processes
are launched.
"""
