"""Several processes: which rows each owns, what they exchange, and in which order it is added.
Collectives move bytes and never add.
"""
