"""DGrad and WGrad in INT8: integer sums of rows, with every scale outside of them.

**DGrad**, dX = dY W, contracts over the output features.  dY and W^T are multiplied by a Hadamard
matrix along them and have one scale a row, separately for each matrix that is fused: dY of Q and of
V may differ in size a hundredfold.  H H = n, so the scales of W^T are divided by n.  With D = dY H
and V = W^T H of part p,

    dX[t, k] = BF16(sum over parts p, ascending, from zero, of
                        (float(sum_j D[t, pj] V[k, pj]) * scale_d[p, t]) * scale_v[p, k])

W is the matrix that the forward's INT8 stands for, so it is quantised once more.

**WGrad**, dW = dY^T X, contracts over the tokens, behind no Hadamard matrix.  Their sizes differ a
thousandfold: a token on which attention rests has a large X and next to no dY.  So tokens are
*balanced* first.  dY_t / s_t and X_t s_t have the same product, and are equally large with

    s_t = 2^round(log2(amax dY_t / amax X_t) / 2)          at least 2^-126, at most 2^126

Powers of two lose no bit.  s_t is 1 where a side is not finite.  Where a side is zero and the other
is finite, the token adds nothing, and both sides are zero: it would only set scales.  Each row of
dY^T and of X^T then has one scale over all tokens:

    dW[n, k] += (float(sum_t D[n, t] X[k, t]) * scale_d[n]) * scale_x[k]

Scales are those of the forward (``isobit.precision.quant_tensor``), with the same smallest amax.  A
row with a NaN or an infinity has the scale NaN, and so has all that it is multiplied with.  An
INT32 holds the sum of ``INT8_SUMMANDS`` products: a micro-batch of more tokens has WGrad in BF16.
"""

import torch

from isobit.kernels.spec.quantise import (
    dequantise_int8,
    quantise_int8,
    round_to_int8,
)
from isobit.precision.quant_tensor import Int8Parts, Int8Rows, rotation_size

_LARGEST_SHIFT = 126  # both 2^126 and 2^-126 are normal in FP32
_MANTISSA = 23


def quantise_parts(x: torch.Tensor, parts: tuple[int, ...]) -> Int8Parts:
    """[M, N], the columns being those of so many parts -> INT8 behind a Hadamard matrix, and a
    scale for each row and part.
    """
    rows = [quantise_int8(columns) for columns in x.split(parts, 1)]
    values = torch.cat([part.values for part in rows], 1)
    return Int8Parts(values, torch.stack([part.scales for part in rows]), parts)


def transposed_parts(weight: Int8Rows, parts: tuple[int, ...]) -> Int8Parts:
    """A published matrix [N, K] fused of so many rows -> W^T [K, N] as DGrad reads it."""
    wide = dequantise_int8(weight)
    made = quantise_parts(wide.t(), parts)
    sizes = torch.tensor([rotation_size(part) for part in parts], dtype=torch.float32)
    return Int8Parts(made.values, made.scales / sizes[:, None], parts)


def balance(dy: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """dY [T, N] and X [T, K] -> FP32 factors [T] of each, 1 / s and s; both 0 for a token that adds
    nothing.
    """
    left, right = (side.float().abs().amax(1) for side in (dy, x))
    # Of positive FP32 numbers, the difference of the bits, rounded down to whole exponents, is the
    # exponent of their ratio.
    exponent = left.view(torch.int32) - right.view(torch.int32) >> _MANTISSA
    shift = (exponent + 1 >> 1).clamp_(-_LARGEST_SHIFT, _LARGEST_SHIFT)
    finite = left.isfinite() & right.isfinite()
    shift.masked_fill_(~finite, 0)
    adds_nothing = finite & ((left == 0) | (right == 0))
    left, right = _power_of_two(-shift), _power_of_two(shift)
    return left.masked_fill_(adds_nothing, 0.0), right.masked_fill_(adds_nothing, 0.0)


def _power_of_two(exponent: torch.Tensor) -> torch.Tensor:
    """int32 in -126 .. 126 -> FP32 2^exponent."""
    return (exponent + 127 << _MANTISSA).view(torch.float32)


def balanced_rows(dy: torch.Tensor, x: torch.Tensor) -> tuple[Int8Rows, Int8Rows]:
    """dY [T, N] and X [T, K] -> dY^T [N, T] and X^T [K, T] with one scale a row."""
    left, right = balance(dy, x)
    return _columns(dy, left), _columns(x, right)


def _columns(side: torch.Tensor, factors: torch.Tensor) -> Int8Rows:
    return Int8Rows(*round_to_int8((side.float() * factors[:, None]).t().contiguous()))
