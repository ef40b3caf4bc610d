"""The operations between the projection of Q, K and V and attention, and their backward.

    x = x + bias                  FP32 addition; Q, K and V, in models that have a bias
    x = RMSNorm(x)                Q and K, per head, in models that have these norms
    x = rotate(x)                 Q and K
    x = hadamard(x)               Q and K, where attention reads E4M3 or INT8; Q is also divided
                                  by the size of H

Each result is rounded to the format between operators, except that the last one is rounded directly
to E4M3 or INT8.  In the backward, the gradient behind the rotation is rounded.

**Rotation** (rotary position embedding): (x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin) for the two
halves of each head, in FP32.  The gradient is the rotation by the negative angle.

**Hadamard.**  Q and K are multiplied by a Hadamard matrix before they are rounded to 8 bits, so
that no channel stands out:

    q~ = H q / n      k~ = H k      q~ . k~ = q . k             H H = n, H symmetric

H has the entries +1 and -1 (Sylvester's construction).  Its size n is the largest power of two that
divides the head size, and H is applied to blocks of that size.  E4M3's error is proportional to
each number, so the error of q . k has the variance of sum_i (q_i k_i)^2.  In a pretrained model Q
and K are large in the same few channels, whose products contribute nearly all of it.  After H every
number is a mixture of all, and |q|^2 |k|^2 / n remains (FlashAttention-3, arXiv 2407.08608, section
3.3).  Dividing by n on one side, instead of by sqrt(n) on both, is exact.  The sums are FP32 in the
order of the fast transform: pairs of numbers 1, 2, 4, ..., n / 2 apart, each time (a, b) -> (a + b,
a - b).  So every back end has the same bits.

**Encoding.**  Queries, keys and values are stored as values times one scale per token and head, a
power of two except in INT8:

    x[t, h, :] = values[t, h, :] * 2^(byte[t, h] - 127)        or * scales[t, h], FP32

    e4m3    values are E4M3, the scale is max(amax, 2^-60) / 448 rounded up to a power of two;
            or it is given, and what lies beyond 448 scales saturates
            (``isobit.precision.kv_scales``)
    int8    values are INT8, the scale is max(amax, 2^-60) / 127 in FP32
    bf16    values are BF16 (fp32: FP32) of magnitude below 2 on a grid of 2^-22, the scale is
            2^floor(log2 amax), at least 2^-60;  heads larger than 128: a grid of 2^-21

A scale that is not given depends on one token's vector alone: nothing has to be calibrated, and a
token's entry never changes when others are added.  The last form drops what lies more than 22 bits
below the vector's largest number, which makes the products of attention exact
(``isobit.kernels.spec.quantise``): a sum of 256 products of integers up to 2^22 is at most 2^52,
where 2^23 would give 2^54.  A vector that is not finite has the byte 255 or the scale NaN.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from isobit.kernels.observing import observe, rounded
from isobit.kernels.operands import QkvGradients, QkvTransform, RopeTable
from isobit.kernels.spec.pointwise import rms_norm, rms_norm_backward
from isobit.kernels.spec.quantise import (
    GRID_BITS,
    SHIFT,
    decode_e4m3,
    hadamard,
    largest_exponent,
    quantise_heads,
    reciprocal_of_byte,
    round_to_int8,
    scale_of_byte,
    shifted_e4m3,
)
from isobit.precision.quant_tensor import BLOCK, DTYPES, E4M3, E8M0_BIAS, Format


def hadamard_size(head_dim: int) -> int:
    return head_dim & -head_dim


_SMALLEST_EXPONENT = -60


@dataclass(frozen=True, slots=True)
class Heads:
    """Encoded heads: values [..., D] in the format's dtype and their scales [...], uint8 bytes or
    FP32.
    """

    values: torch.Tensor
    scales: torch.Tensor

    @classmethod
    def encode(cls, x: torch.Tensor, format: Format, fixed: torch.Tensor | None = None) -> "Heads":
        """[..., D], BF16 or FP32; ``fixed`` as ``quantise_heads`` takes it, for E4M3."""
        if format == "e4m3":
            return cls(*quantise_heads(x, fixed))
        if format == "int8":
            return cls(*round_to_int8(x.float()))
        byte = largest_exponent(x).clamp_(min=_SMALLEST_EXPONENT).add_(E8M0_BIAS)
        scaled = (x.float() * reciprocal_of_byte(byte)[..., None]).double()
        to_grid = 1.5 * 2.0 ** (52 - grid_bits(x.shape[-1]))
        return cls(scaled.add_(to_grid).sub_(to_grid).to(DTYPES[format]), byte.to(torch.uint8))

    def map(self, rearrange: Callable[[torch.Tensor], torch.Tensor]) -> "Heads":
        """Apply one rearrangement of tokens and heads to values and scales; E4M3 is passed as
        bytes.
        """
        raw = self.values.view(torch.uint8) if self.values.dtype == E4M3 else self.values
        return Heads(rearrange(raw).view(self.values.dtype), rearrange(self.scales))

    def units(self) -> torch.Tensor:
        """FP32 [..., D]: the values without their scales."""
        return decode_e4m3(self.values) if self.values.dtype == E4M3 else self.values.float()

    def shifted_units(self) -> tuple[torch.Tensor, float]:
        """``units`` up to a power of two, which is returned as well: cheaper where the caller
        multiplies by a scale later.
        """
        return (
            (shifted_e4m3(self.values), SHIFT)
            if self.values.dtype == E4M3
            else (self.values.float(), 1.0)
        )

    def dequantised(self) -> torch.Tensor:
        """FP32 [..., D]."""
        return self.units() * factors(self.scales)[..., None]


def factors(scales: torch.Tensor) -> torch.Tensor:
    """Scale bytes or FP32 scales -> FP32."""
    return scales if scales.dtype == torch.float32 else scale_of_byte(scales)


def grid_bits(head_dim: int) -> int:
    """The number of bits that values of the last form reach below the largest number."""
    return GRID_BITS if head_dim <= BLOCK else GRID_BITS - 1


def stack_heads(first: Heads, second: Heads) -> Heads:
    """Two of one shape and format -> one with a leading dimension of 2."""
    raw = torch.uint8 if first.values.dtype == E4M3 else first.values.dtype
    values = torch.stack([first.values.view(raw), second.values.view(raw)])
    return Heads(values.view(first.values.dtype), torch.stack([first.scales, second.scales]))


def rotate(x: torch.Tensor, table: RopeTable) -> torch.Tensor:
    """x [T, heads, D] -> FP32 of the same shape; ``table`` holds the rows of the T positions."""
    x1, x2 = x.float().chunk(2, -1)
    return torch.cat([x1 * table.cos - x2 * table.sin, x2 * table.cos + x1 * table.sin], -1)


class RopeRows:
    """The rows of a forward's positions, int64 [T], in the one or two rotary tables of its layers,
    each looked up once.
    """

    def __init__(self, positions: torch.Tensor) -> None:
        self._positions = positions
        self._rows: list[tuple[torch.Tensor, RopeTable]] = []

    def of(self, transform: QkvTransform) -> RopeTable:
        for cos, rows in self._rows:
            if cos is transform.cos:
                return rows
        rows = RopeTable(transform.cos, transform.sin).rows(self._positions)
        self._rows.append((transform.cos, rows))
        return rows


def transform_qkv(
    layer: int, qkv: torch.Tensor, transform: QkvTransform, table: RopeTable
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """[T, (H + 2 G) D] -> q [T, H, D], k and v [T, G, D]; ``table`` holds the rows of the T
    positions. After a Hadamard matrix Q and K are FP32.
    """
    q, k, v = _heads(with_bias(qkv, transform), transform)
    if transform.q_norm is not None and transform.k_norm is not None:
        q = observe(rms_norm(q, transform.q_norm, transform.epsilon), "layers", layer, "q_norm")
        k = observe(rms_norm(k, transform.k_norm, transform.epsilon), "layers", layer, "k_norm")
    wide = rotate(torch.cat([q, k], 1), table)
    q, k = (rounded(part, qkv.dtype) for part in wide.split([q.shape[1], k.shape[1]], 1))
    q, k = observe(q, "layers", layer, "rope.q"), observe(k, "layers", layer, "rope.k")
    if transform.hadamard:
        q, k = _through_hadamard(q, k)
        observe(q, "layers", layer, "hadamard.q")
        observe(k, "layers", layer, "hadamard.k")
    if transform.maxima is not None:
        raise_maxima(
            transform.maxima, *((q, k) if transform.hadamard else _through_hadamard(q, k)), v
        )
    return q, k, v


def raise_maxima(maxima: torch.Tensor, *heads: torch.Tensor) -> None:
    """Raise FP32 [3] to the largest magnitudes of Q, K and V [T, heads, D], in place; vectors that
    are not finite are left out.
    """
    for place, x in enumerate(heads):
        amax = x.abs().amax(-1).float()
        if amax.numel():
            largest = amax.where(amax.isfinite(), 0.0).amax()
            maxima[place] = torch.maximum(maxima[place], largest)


def fixed_bytes(transform: QkvTransform) -> tuple[torch.Tensor | None, ...]:
    """The given scales of Q, K and V, uint8 of no dimension each, or three times None."""
    given = transform.scale_bytes
    return (None, None, None) if given is None else given.unbind()


def qkv_backward(
    dq: torch.Tensor,
    dk: torch.Tensor,
    dv: torch.Tensor,
    qkv: torch.Tensor,
    transform: QkvTransform,
    positions: torch.Tensor,
    grads: QkvGradients,
) -> torch.Tensor:
    """dq [T, H, D], dk and dv [T, G, D] -> the gradient of ``qkv``, [T, (H + 2 G) D]."""
    table = RopeTable(transform.cos, transform.sin).rows(positions).backward()
    wide = torch.cat(_through_hadamard(dq, dk) if transform.hadamard else (dq, dk), 1)
    dq, dk = rotate(wide, table).to(qkv.dtype).split([dq.shape[1], dk.shape[1]], 1)
    q_norm, k_norm, epsilon = transform.q_norm, transform.k_norm, transform.epsilon
    if q_norm is not None and k_norm is not None:
        q, k, _ = _heads(with_bias(qkv, transform), transform)
        dq = rms_norm_backward(dq, q, q_norm, epsilon, None, grads.q_norm)
        dk = rms_norm_backward(dk, k, k_norm, epsilon, None, grads.k_norm)
    d_qkv = torch.cat([dq, dk, dv], 1).view(qkv.shape)
    if grads.bias is not None:
        grads.bias.add_(d_qkv.float().sum(0))
    return d_qkv


def with_bias(qkv: torch.Tensor, transform: QkvTransform) -> torch.Tensor:
    """The addition is in FP32 and rounded once."""
    if transform.bias is None:
        return qkv
    return (qkv.float() + transform.bias.float()).to(qkv.dtype)


def _through_hadamard(q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Q [T, H, D] and K [T, G, D], or their gradients -> H q / n and H k, in FP32.  H and 1 / n are
    their own transposes, so forward and backward are the same.
    """
    size = hadamard_size(q.shape[-1])
    wide = hadamard(torch.cat([q, k], 1).float(), size)
    q, k = wide.split([q.shape[1], k.shape[1]], 1)
    return q / size, k


def _heads(qkv: torch.Tensor, transform: QkvTransform) -> tuple[torch.Tensor, ...]:
    heads = qkv.view(qkv.shape[0], -1, transform.head_dim)
    keys = transform.num_kv_heads
    return heads.split([transform.num_heads, keys, keys], 1)
