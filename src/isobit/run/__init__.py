"""A training from start to end: its parts, its plan, its course, and the two kinds of it, with the
evaluation and the generation that stand alone.
"""
