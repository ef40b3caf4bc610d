"""RMSNorm and the residual stream: h = h + x, y = h / sqrt(mean(h^2) + eps) * w over the last
dimension, in FP32 from input to the one rounding of y.

Rows of up to 4096 are summed in one piece, wider ones in pieces of 4096 added in ascending order:
torch splits the sum of a very wide row over threads, which would change its bits.  The gradient
repeats at a fixed number of threads:

    n  = h / rms      s  = dy w      dh = d_residual + (s - n mean(s n)) / rms      dw += sum dy n
"""

import torch

from isobit.kernels.operands import Normed
from isobit.kernels.spec.linear import linear_input
from isobit.kernels.trace import rounded
from isobit.precision.flow import Site

_WIDEST_SUM = 4096


def row_sum(x: torch.Tensor) -> torch.Tensor:
    """FP32 or FP64 [..., C] contiguous -> [..., 1], in an order that depends on C alone."""
    pieces = [piece.sum(-1, keepdim=True) for piece in x.split(_WIDEST_SUM, -1)]
    total = pieces[0]
    for piece in pieces[1:]:
        total = total + piece
    return total


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """x [..., C], weight [C] -> y like x."""
    wide = x.float()
    return rounded(wide * _inverse_rms(wide, epsilon) * weight.float(), x.dtype)


def add_rms_norm(
    h: torch.Tensor,
    x: torch.Tensor | None,
    weight: torch.Tensor,
    epsilon: float,
    site: Site | None,
    save: bool = False,
    keep: bool = False,
) -> Normed:
    """The residual stream [T, C] after the addition, its norm (always kept: it is there), and that
    as ``site`` reads it.
    """
    h = h if x is None else h + x
    norm = rms_norm(h, weight, epsilon)
    return Normed(h, norm, None if site is None else linear_input(norm, site, save))


def rms_norm_backward(
    dy: torch.Tensor,
    h: torch.Tensor,
    weight: torch.Tensor,
    epsilon: float,
    d_residual: torch.Tensor | None,
    grad: torch.Tensor,
) -> torch.Tensor:
    """dy and h [..., C] -> dh in the dtype of h; grad, FP32 [C], += dw."""
    wide, dy = h.float(), dy.float()
    inverse = _inverse_rms(wide, epsilon)
    normalised = wide * inverse
    grad.add_((dy * normalised).reshape(-1, h.shape[-1]).sum(0))
    scaled = dy * weight.float()
    dh = (scaled - normalised * (scaled * normalised).mean(-1, keepdim=True)) * inverse
    dh = dh.to(h.dtype)
    return dh if d_residual is None else d_residual + dh


def _inverse_rms(wide: torch.Tensor, epsilon: float) -> torch.Tensor:
    """FP32 [..., C] -> [..., 1]."""
    return (row_sum(wide * wide) / wide.shape[-1] + epsilon).rsqrt()
