"""RMSNorm at the start of a unit: h = h + x, y = RMSNorm(h), as the linear behind it reads y."""

from dataclasses import dataclass

import torch

from isobit.kernels.operands import LinearInput
from isobit.kernels.trace import observe
from isobit.models.layers.unit import Gradient, Master, norm_master
from isobit.models.weights import Weights


@dataclass(frozen=True, slots=True)
class Norm:
    """The norm ``path`` of the residual stream."""

    path: str
    width: int
    checkpoint_name: str
    epsilon: float
    residual: str
    """What an observer knows the sum h + x by."""
    linear: str | None = None
    """The linear that reads it; None for the last norm, which lm_head reads."""

    def masters(self) -> dict[str, Master]:
        """The weight."""
        return {f"{self.path}.weight": norm_master(self.width, self.checkpoint_name)}

    def forward(
        self, weights: Weights, h: torch.Tensor, x: torch.Tensor | None, save: bool
    ) -> tuple[torch.Tensor, LinearInput]:
        """h and x [T, C] -> the residual stream, and its norm as the linear reads it."""
        assert self.linear is not None
        h, _, made = self._forward(weights, h, x, save)
        assert made is not None
        return h, made

    def keeping(
        self, weights: Weights, h: torch.Tensor, x: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, LinearInput]:
        """h and x [T, C] -> the residual stream, its norm [T, C], and that as the linear reads
        it.
        """
        h, norm, made = self._forward(weights, h, x, save=False, keep=True)
        assert norm is not None
        assert made is not None
        return h, norm, made

    def final(
        self, weights: Weights, h: torch.Tensor, x: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """h and x [T, C] -> the residual stream, and its norm [T, C]."""
        h, norm, _ = self._forward(weights, h, x, save=False)
        assert norm is not None
        return h, norm

    def _forward(
        self,
        weights: Weights,
        h: torch.Tensor,
        x: torch.Tensor | None,
        save: bool,
        keep: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None, LinearInput | None]:
        site = None if self.linear is None else weights.linears[self.linear].site
        weight = weights.plain[f"{self.path}.weight"]
        made = weights.backend.add_rms_norm(h, x, weight, self.epsilon, site, save, keep)
        if x is not None:
            observe(made.h, self.residual)
        if made.norm is not None:
            observe(made.norm, self.path)
        return made.h, made.norm, made.input

    def backward(
        self,
        weights: Weights,
        gradient: Gradient,
        dy: torch.Tensor,
        h: torch.Tensor,
        d_residual: torch.Tensor | None,
    ) -> torch.Tensor:
        """d_residual + the gradient through the norm, [T, C]."""
        name = f"{self.path}.weight"
        return weights.backend.rms_norm_backward(
            dy, h, weights.plain[name], self.epsilon, d_residual, gradient(name)
        )
