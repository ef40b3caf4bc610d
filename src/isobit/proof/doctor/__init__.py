"""``isobit doctor``: whether this machine computes what it must, found out by computing it, and
what it is missing otherwise.
"""
