"""The operations of families with a gated delta rule (``HybridOperations``): those of the rule
itself, and the sum of a mixture with its shared expert.

    y = routed + sigmoid(g) shared        in FP32, rounded once; g is FP32, one number a token
"""

import torch

from isobit.kernels.observing import rounded
from isobit.kernels.spec.delta_rule import (
    gated_norm,
    gated_norm_backward,
    sigmoid_gate,
    sigmoid_gate_backward,
)
from isobit.kernels.spec.pointwise import row_sum

__all__ = [
    "add_shared",
    "add_shared_backward",
    "gated_norm",
    "gated_norm_backward",
    "sigmoid_gate",
    "sigmoid_gate_backward",
]


def add_shared(routed: torch.Tensor, shared: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """What the routed experts and the shared one make [T, C], and its gate FP32 [T] -> [T, C]."""
    return rounded(routed.float() + _share(gate) * shared.float(), routed.dtype)


def add_shared_backward(
    dy: torch.Tensor, shared: torch.Tensor, gate: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients of the shared expert's output, in its dtype, and of its gate, FP32 [T]; that of
    the routed experts is dy.
    """
    share, wide = _share(gate), dy.float()
    d_share = row_sum(wide * shared.float())
    return (wide * share).to(shared.dtype), (d_share * share * (1 - share))[:, 0]


def _share(gate: torch.Tensor) -> torch.Tensor:
    """FP32 [T] -> its sigmoid [T, 1]."""
    return sigmoid_gate(torch.ones_like(gate), gate)[:, None]
