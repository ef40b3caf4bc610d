"""The command line: reads arguments, calls ``isobit.run`` and prints; imports no torch at
the top.
"""
