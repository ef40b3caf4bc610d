"""Queries, keys and values in the flow's format: a value times one power-of-two scale a token and
head.

    x[t, h, :] = values[t, h, :] * 2^(byte[t, h] - 127)

    e4m3    values are E4M3, the scale is max(amax, 2^-60) / 448 rounded up to a power of two
    bf16    values are BF16 (fp32: FP32) of magnitude below 2 on a grid of 2^-22, the scale is
            2^floor(log2 amax), at least 2^-60;  heads larger than 128: a grid of 2^-21

The scale depends on that token's vector alone: nothing to calibrate, and a token's entry never
changes when others come.  In the second form a value loses what lies more than 22 bits below the
vector's largest number; it is what makes the products of the attention exact
(``isobit.kernels.spec.grid``): a sum of 256 products of integers up to 2^22 is at most 2^52, where
2^23 would give 2^54.  A vector that is not finite has the byte 255.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from isobit.kernels.spec.e4m3 import SHIFT, decode_e4m3, shifted_e4m3
from isobit.kernels.spec.grid import GRID_BITS, largest_exponent
from isobit.kernels.spec.quantise import quantise_heads, reciprocal_of_byte, scale_of_byte
from isobit.precision.formats import BLOCK, DTYPES, E4M3, E8M0_BIAS, Format

_SMALLEST_EXPONENT = -60


@dataclass(frozen=True, slots=True)
class Heads:
    """values [..., D] in the format's dtype and uint8 scale bytes [...]."""

    values: torch.Tensor
    bytes: torch.Tensor

    @classmethod
    def encode(cls, x: torch.Tensor, format: Format) -> "Heads":
        """[..., D], BF16 or FP32."""
        if format == "e4m3":
            return cls(*quantise_heads(x))
        byte = largest_exponent(x).clamp_(min=_SMALLEST_EXPONENT).add_(E8M0_BIAS)
        scaled = (x.float() * reciprocal_of_byte(byte)[..., None]).double()
        to_grid = 1.5 * 2.0 ** (52 - grid_bits(x.shape[-1]))
        return cls(scaled.add_(to_grid).sub_(to_grid).to(DTYPES[format]), byte.to(torch.uint8))

    def map(self, rearrange: Callable[[torch.Tensor], torch.Tensor]) -> "Heads":
        """The same rearrangement of tokens and heads, applied to values and scale bytes; E4M3
        travels as bytes.
        """
        raw = self.values.view(torch.uint8) if self.values.dtype == E4M3 else self.values
        return Heads(rearrange(raw).view(self.values.dtype), rearrange(self.bytes))

    def units(self) -> torch.Tensor:
        """FP32 [..., D]: the values without their scales."""
        return decode_e4m3(self.values) if self.values.dtype == E4M3 else self.values.float()

    def shifted_units(self) -> tuple[torch.Tensor, float]:
        """``units`` but for a power of two, which is returned too: cheaper where a scale is
        multiplied in later.
        """
        return (
            (shifted_e4m3(self.values), SHIFT)
            if self.values.dtype == E4M3
            else (self.values.float(), 1.0)
        )

    def dequantised(self) -> torch.Tensor:
        """FP32 [..., D]."""
        return self.units() * scale_of_byte(self.bytes)[..., None]


def grid_bits(head_dim: int) -> int:
    """Of values in the second form: how far below the largest number they reach."""
    return GRID_BITS if head_dim <= BLOCK else GRID_BITS - 1


def stack_heads(first: Heads, second: Heads) -> Heads:
    """Two of one shape and format -> one with a leading dimension of 2."""
    raw = torch.uint8 if first.values.dtype == E4M3 else first.values.dtype
    values = torch.stack([first.values.view(raw), second.values.view(raw)])
    return Heads(values.view(first.values.dtype), torch.stack([first.bytes, second.bytes]))
