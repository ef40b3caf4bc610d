"""Reinforcement learning: what ``isobit train`` does, on the course that every training has."""
