"""The CPU specification: every operation in torch, exact where exactness is promised; what the
other back ends are tested against.
"""
