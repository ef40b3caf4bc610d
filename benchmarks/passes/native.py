"""Isobit's training forward and backward, gradients into FP32 masters."""

import torch

from isobit.config.schema import PrecisionConfig
from isobit.models import hopper_training
from isobit.models.policy import random_policy
from passes.cases import Case
from passes.timing import Pass


def make_pass(mode: str, case: Case) -> Pass:
    """Random weights on the card, and the pass over them."""
    policy = random_policy(case.config, PrecisionConfig.model_validate(mode), seed=0, device="cuda")
    ids = case.token_ids("cuda")
    positions = torch.arange(case.length, device="cuda").repeat(case.sequences)
    rows = torch.arange(case.tokens, device="cuda").view(case.sequences, -1)[:, :-1].reshape(-1)
    targets, weights = ids[:, 1:].reshape(-1), case.weights("cuda").view(-1)
    temperatures = torch.ones_like(weights)
    lengths = (case.length,) * case.sequences

    def one() -> None:
        hidden = hopper_training.packed_hidden_states(policy, ids.view(-1), positions, lengths, case.recompute)
        log_probs, _ = hopper_training.token_log_probs(policy, hidden.index_select(0, rows), targets, temperatures)
        (log_probs * weights).sum().backward()

    return one
