"""What a forward notes of its routing, layer by layer: a digest of each token's experts, and, where
it is learnt from, the router's own losses and the load of the experts.

The digest of a token is one int64: with c_1 .. c_n its experts of all sparse layers, in the order
of the layers and of their ranks,

    digest = sum over i of (c_i + 1) M^(n - i)   mod 2^64

Two tokens that went other ways have the same digest once in 2^64.  All of it is a few integer
operations on the device at the end of a forward, so that a captured step has it as well.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch

from isobit.kernels.operands import RouterLoss, Routing
from isobit.kernels.router_loss import expert_load, router_losses
from isobit.records.scores import RouterScores

_MULTIPLIER = 0x9E3779B97F4A7C15
_WORD = 1 << 64


@dataclass(frozen=True, slots=True)
class RouterCoefficients:
    """Of the losses of one sequence in one layer."""

    balance: float = 0.0
    z: float = 0.0


class Routes:
    """Collects the routing of one forward."""

    def __init__(self, loss: RouterLoss | None = None) -> None:
        """With a ``loss`` the router's figures are collected as well, whatever its coefficients."""
        self.loss = loss
        self._experts: list[torch.Tensor] = []
        self._losses: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._load: list[torch.Tensor] = []

    def add(self, routing: Routing) -> None:
        """The routing of the next sparse layer."""
        self._experts.append(routing.experts)
        if self.loss is not None:
            self._losses.append(router_losses(routing, self.loss.means))
            self._load.append(expert_load(routing))

    @property
    def loss_to_learn(self) -> RouterLoss | None:
        """The loss, where any coefficient is not 0."""
        return self.loss if self.loss is not None and (self.loss.balance or self.loss.z) else None

    def digests(self) -> torch.Tensor:
        """int64 [T]."""
        return digests(self._experts)

    def scores(self) -> RouterScores | None:
        """The router's figures, on the host; None where none were collected."""
        if not self._losses:
            return None
        balance, z = (torch.stack(kind).mean(0).cpu() for kind in zip(*self._losses, strict=True))
        return RouterScores(balance, z, torch.stack(self._load).long().cpu())


def digests(experts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The chosen experts int32 [T, k] of each sparse layer -> int64 [T]."""
    chosen = torch.cat(list(experts), 1)
    return ((chosen.long() + 1) * _powers(chosen.shape[1], chosen.device)).sum(1)


@cache
def _powers(count: int, device: torch.device) -> torch.Tensor:
    """M^(count - 1) .. M^0 mod 2^64, int64 [count].  Kept: a step that is captured cannot copy from
    the host.
    """
    powers = [pow(_MULTIPLIER, exponent, _WORD) for exponent in reversed(range(count))]
    signed = [power - _WORD if power >= _WORD // 2 else power for power in powers]
    return torch.tensor(signed).to(device)
