"""Reward models: how their scores in FP8 and BF16 agree with those in FP32, and what they cost."""
