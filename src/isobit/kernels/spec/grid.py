"""BF16 and FP32 operands on a fixed-point grid, so that their products too have one right answer.

A block of 128 numbers of a row is rounded to multiples of 2^(k - 22), where 2^k <= amax < 2^(k+1):
integers below 2^23 times one power of two.  A product of two such blocks is then a sum of 128
integers below 2^46, at most 2^53, which FP64 holds exactly, in any order, tile or library.  The
cost is an error of at most 2^-23 of the block's largest number, nothing for a BF16 number less than
2^15 below it.  Rounding is to nearest even, by adding and taking away 1.5 2^52 grid steps in FP64.
NaN and infinity stay.
"""

import torch

from isobit.precision.formats import BLOCK

GRID_BITS = 22


def snap_rows(x: torch.Tensor) -> torch.Tensor:
    """[..., K] -> the same numbers on the grid of each row's block of 128 (the last may be short),
    in the dtype of x.

    A rounded BF16 is a BF16: coarser rounding never needs more mantissa bits.
    """
    columns = x.shape[-1]
    if columns <= BLOCK:
        return _snap(x)
    whole = columns // BLOCK * BLOCK
    parts = [
        _snap(x[..., :whole].reshape(*x.shape[:-1], whole // BLOCK, BLOCK)).reshape(
            *x.shape[:-1], whole
        )
    ]
    if whole < columns:
        parts.append(_snap(x[..., whole:]))
    return torch.cat(parts, -1) if len(parts) > 1 else parts[0]


def largest_exponent(x: torch.Tensor) -> torch.Tensor:
    """[..., K] -> int32 [...]: k with 2^k <= amax < 2^(k+1); 128 where the row is not finite, -127
    where it is zero or subnormal.
    """
    return (x.float().abs().amax(-1).view(torch.int32) >> 23) - 127


def _snap(x: torch.Tensor) -> torch.Tensor:
    exponent = largest_exponent(x).to(torch.int64)
    # 1.5 * 2^(52 + exponent - 22), written as its FP64 bits.
    shift = ((exponent + (52 - GRID_BITS + 1023) << 52) | (1 << 51)).view(torch.float64)[..., None]
    return x.double().add_(shift).sub_(shift).to(x.dtype)
