"""Rewards: functions and models that grade completions, and the processes that run them."""
