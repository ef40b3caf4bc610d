"""Several processes, one function: who owns which rows, what travels between them, and in which
order it is added.  Collectives move bytes and never add.
"""
