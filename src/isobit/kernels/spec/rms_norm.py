"""RMSNorm: y = x / sqrt(mean(x^2) + eps) * w over the last dimension, in FP32 from input to the one
rounding of y.

Rows of up to 4096 are summed in one piece, wider ones in pieces of 4096 added in ascending order:
torch splits the sum of a very wide row over threads, which would change its bits.  The gradient (dy
in, dx and dw out) repeats at a fixed number of threads.
"""

from typing import Any

import torch

_WIDEST_SUM = 4096


def row_sum(x: torch.Tensor) -> torch.Tensor:
    """FP32 [..., C] contiguous -> [..., 1], in an order that depends on C alone."""
    pieces = [piece.sum(-1, keepdim=True) for piece in x.split(_WIDEST_SUM, -1)]
    total = pieces[0]
    for piece in pieces[1:]:
        total = total + piece
    return total


def rms_norm_forward(
    x: torch.Tensor, weight: torch.Tensor, epsilon: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """x [..., C], weight [C] -> y like x, and 1 / rms [..., 1] in FP32."""
    wide = x.float()
    inverse = (row_sum(wide * wide) / x.shape[-1] + epsilon).rsqrt()
    return (wide * inverse * weight.float()).to(x.dtype), inverse


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, master: torch.Tensor | None, epsilon: float
) -> torch.Tensor:
    """``rms_norm_forward`` with the published weight; gradients reach x and the FP32 master [C]."""
    if not torch.is_grad_enabled():
        return rms_norm_forward(x, weight, epsilon)[0]
    return _RmsNorm.apply(x, master, weight, epsilon)  # pyright: ignore[reportReturnType]


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, master: torch.Tensor, weight: torch.Tensor, epsilon: float
    ) -> torch.Tensor:
        y, inverse = rms_norm_forward(x, weight, epsilon)
        ctx.save_for_backward(x, inverse, weight)
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, inverse, weight = ctx.saved_tensors
        dy = gradients[0].float()
        normalised = x.float() * inverse
        dw = (dy * normalised).reshape(-1, x.shape[-1]).sum(0)
        scaled = dy * weight.float()
        dx = (scaled - normalised * (scaled * normalised).mean(-1, keepdim=True)) * inverse
        return dx.to(x.dtype), dw, None, None
