"""From hidden states to logits (rollout) and to the log-probabilities of given tokens (training, reference, verification)."""

import torch

from isobit.kernels import token_log_probs as kernel
from isobit.models.policy import Policy
from isobit.precision.formats import Side


def head_logits(policy: Policy, side: Side, hidden: torch.Tensor) -> torch.Tensor:
    """hidden [N, C] -> FP32 logits [N, V]."""
    return kernel.head_logits(hidden, policy.weights(side).plain["head"])


def token_log_probs(
    policy: Policy, side: Side, hidden: torch.Tensor, targets: torch.Tensor, temperatures: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """hidden [N, C], targets int64 [N], temperatures FP32 [N] -> FP32 log-probabilities [N] (differentiable) and entropies [N].

    Raises NonFiniteError where logits are not finite.
    """
    return kernel.token_log_probs(hidden, policy.masters[policy.head_name], policy.weights(side).plain["head"], targets, temperatures)
