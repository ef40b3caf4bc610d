"""Advantages, losses and divergences: pure functions of tensors that know no model, no optimiser
and no engine.
"""
