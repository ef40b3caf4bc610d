"""A run's directory: journals, checkpoints, the record of its rewards, and the way back into all of
them.
"""
