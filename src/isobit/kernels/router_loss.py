"""The router's own losses and their gradient by its logits, in FP32: the same torch operations on
every device, each of which has one order.

With p the softmax of a token's logits, f_e the share of a sequence's choices that fell on expert e
times E, P_e the mean of p_e over its tokens, z the log-sum-exp of a token's logits:

    balance   sum_e f_e P_e           1 where all experts are chosen equally often; at most E
    z         mean of z^2

f is a constant.  A sequence's means are one product with ``RouterLoss.means``.
"""

from collections.abc import Sequence

import torch

from isobit.kernels.operands import RouterLoss, Routing


def sequence_means(lengths: Sequence[int]) -> torch.Tensor:
    """FP32 [S, T] of sequences end to end: a row has 1 / T_s at the tokens of its sequence."""
    sizes = torch.tensor(lengths)
    owner = torch.arange(len(lengths)).repeat_interleave(sizes)
    means = torch.zeros(len(lengths), int(sizes.sum()))
    means[owner, torch.arange(owner.numel())] = 1.0 / sizes[owner]
    return means


def router_losses(routing: Routing, means: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The balance and the z-loss of each sequence, before their coefficients: FP32 [S] each."""
    probabilities = torch.softmax(routing.logits, -1)
    balance = (_shares(routing, means) * (means @ probabilities)).sum(-1)
    return balance, means @ torch.logsumexp(routing.logits, -1).square()


def logit_gradient(routing: Routing, loss: RouterLoss) -> torch.Tensor:
    """The gradient of all sequences' losses by the logits, FP32 [T, E]; what has the coefficient 0
    is not computed.
    """
    p = torch.softmax(routing.logits, -1)
    slope = torch.zeros_like(p[:, :1])
    if loss.balance:
        d_p = loss.means.t() @ (_shares(routing, loss.means) * loss.balance)
        slope = d_p - (p * d_p).sum(-1, keepdim=True)
    if loss.z:
        z = torch.logsumexp(routing.logits, -1) * (loss.means.sum(0) * (2.0 * loss.z))
        slope = slope + z[:, None]
    return p * slope


def expert_load(routing: Routing) -> torch.Tensor:
    """Choices that fell on each expert: whole numbers in FP32 [E], of fewer than 2^24 tokens."""
    return _chosen(routing).sum(0)


def _shares(routing: Routing, means: torch.Tensor) -> torch.Tensor:
    """f, FP32 [S, E]."""
    count, top_k = routing.logits.shape[1], routing.experts.shape[1]
    return means @ _chosen(routing) * (count / top_k)


def _chosen(routing: Routing) -> torch.Tensor:
    """FP32 [T, E]: 1 at a token's experts."""
    return torch.zeros_like(routing.logits).scatter_(1, routing.experts.long(), 1.0)
