"""The CPU specification: every operation in torch, exact where exactness is promised.  The other
back ends are tested against it.
"""
