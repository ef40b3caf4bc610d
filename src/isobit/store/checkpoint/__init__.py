"""Checkpoints: the whole state of a run on disk, written so that a kill at any moment loses
nothing, and the way back from it.
"""
