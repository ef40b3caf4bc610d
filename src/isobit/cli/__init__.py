"""The command line, one file a command: each reads its arguments, calls ``isobit.run`` and prints.
No file imports torch at the top.
"""
