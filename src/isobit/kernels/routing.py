"""The experts that a router chooses for each token, and the router's own losses.

Shapes: T tokens, E experts of which k are chosen, S sequences.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Routing:
    """The experts of each token, by rank, and what the backward reads."""

    experts: torch.Tensor
    """int32 [T, k]: by falling logit; of equal logits the lower expert comes first."""
    weights: torch.Tensor  # FP32 [T, k]: the factor of each expert's output
    logits: torch.Tensor  # FP32 [T, E]


@dataclass(frozen=True, slots=True)
class RouterLoss:
    """The router's own losses, which add to its gradient.

    For each sequence, with f_e the share of its T_s k choices that fell on expert e times E, P_e
    the mean over its tokens of the softmax, and z_t = log sum_e exp(logit_te):

        balance * sum_e f_e P_e  +  z * mean over its tokens of z_t^2

    (Fedus et al., arXiv 2101.03961, section 2.2; Zoph et al., arXiv 2202.08906, section 2.2), f_e
    taken as a constant.  The first sum is 1 where all experts are chosen equally often, at most E.
    """

    means: torch.Tensor
    """FP32 [S, T]: a row has 1 / T_s at its sequence's tokens; a product with it is a mean."""
    balance: float
    """Coefficient of a sequence's load-balancing loss, divided by the update's sequences."""
    z: float  # coefficient of a sequence's z-loss, likewise


def sequence_means(lengths: Sequence[int], row_of: torch.Tensor | None = None) -> torch.Tensor:
    """``RouterLoss.means`` of sequences laid end to end; ``row_of``, int64 [T], gives the row of
    each token where sequences share some.
    """
    sizes = torch.tensor(lengths)
    owner = torch.arange(len(lengths)).repeat_interleave(sizes)
    rows = torch.arange(owner.numel()) if row_of is None else row_of
    means = torch.zeros(len(lengths), int(rows.max()) + 1, dtype=torch.float32)
    means[owner, rows] = 1.0 / sizes[owner].float()
    return means


def router_losses(routing: Routing, means: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The balance and the z-loss of each sequence, before their coefficients: FP32 [S] each."""
    probabilities = torch.softmax(routing.logits, -1)
    balance = (_shares(routing, means) * (means @ probabilities)).sum(-1)
    return balance, means @ torch.logsumexp(routing.logits, -1).square()


def logit_gradient(routing: Routing, loss: RouterLoss) -> torch.Tensor:
    """The gradient of all losses by the logits, FP32 [T, E]; skips terms of coefficient 0."""
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
    """Choices of each expert: whole numbers in FP32 [E], exact below 2^24 tokens."""
    return _chosen(routing).sum(0)


def _shares(routing: Routing, means: torch.Tensor) -> torch.Tensor:
    """f, FP32 [S, E]."""
    count, top_k = routing.logits.shape[1], routing.experts.shape[1]
    return means @ _chosen(routing) * (count / top_k)


def _chosen(routing: Routing) -> torch.Tensor:
    """FP32 [T, E]: 1 at a token's experts."""
    return torch.zeros_like(routing.logits).scatter_(1, routing.experts.long(), 1.0)
