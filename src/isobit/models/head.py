"""From hidden states to logits (rollout) and to the log-probabilities of given tokens (training,
reference, verification).
"""

import torch

from isobit.kernels.spec import token_log_probs as cpu
from isobit.kernels.trace import observe
from isobit.models.policy import Policy
from isobit.precision.formats import Side


def head_logits(policy: Policy, side: Side, hidden: torch.Tensor) -> torch.Tensor:
    """hidden [N, C] -> FP32 logits [N, V]."""
    weight = policy.weights(side).plain["head"]
    if hidden.is_cuda:
        from isobit.kernels.hopper.gemm import gemm_bf16

        return observe(gemm_bf16(hidden, weight, torch.float32), "lm_head")
    return cpu.head_logits(hidden, weight)


def token_log_probs(
    policy: Policy,
    side: Side,
    hidden: torch.Tensor,
    targets: torch.Tensor,
    temperatures: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """hidden [N, C], targets int64 [N], temperatures FP32 [N] -> FP32 log-probabilities [N] and
    entropies [N].

    The log-probabilities are differentiable.  Where logits are not finite, the CPU raises
    NonFiniteError and the GPU, which nobody waits for, gives NaN.
    """
    weight = policy.weights(side).plain["head"]
    if hidden.is_cuda:
        from isobit.kernels.hopper.token_log_probs import token_log_probs as without_gradients

        if torch.is_grad_enabled():
            from isobit.models import hopper_training

            return hopper_training.token_log_probs(policy, hidden, targets, temperatures)
        return without_gradients(hidden, weight, targets, temperatures)
    return cpu.token_log_probs(
        hidden, policy.masters.get(policy.head_name), weight, targets, temperatures
    )
