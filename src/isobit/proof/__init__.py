"""Proof that rollout and training are one function: verify, bisect, doctor."""
