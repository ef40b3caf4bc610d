"""The command line: each command reads its arguments, calls ``isobit.run`` and prints. No file
imports torch at the top.
"""
