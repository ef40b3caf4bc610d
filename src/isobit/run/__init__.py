"""A run from start to end: the loop, evaluation, the exactness check, and what is printed and
written.
"""
