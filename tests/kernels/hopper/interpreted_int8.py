"""Run in Triton's interpreter by test_interpreted.py: INT8 values, scales and products are the
specification's.
"""

import torch
from triton.runtime import interpreter

from isobit.kernels.hopper.quantise import quantise_int8, rms_norm_int8
from isobit.kernels.spec import quantise as specification
from isobit.precision.quant_tensor import Int8Rows
from tests.kernels.hopper.interpreted_qkv import convert

COLUMNS = (1, 7, 16, 80, 128, 576, 768)


def wild(rows: int, columns: int) -> torch.Tensor:
    """BF16 of all sizes; a row of zeros, some that are tiny, and some that are not finite."""
    x = (torch.randn(rows, columns) * torch.exp(4 * torch.randn(rows, columns))).bfloat16()
    x[0], x[1] = 0.0, torch.randn(columns) * 1e-30
    x[2, 0], x[3, -1] = torch.nan, torch.inf
    x[4] = 3e38  # its sums are infinite, except of one number
    return x


def assert_same(ours: Int8Rows, exact: Int8Rows) -> None:
    assert torch.equal(ours.values, exact.values)
    assert torch.equal(ours.scales.view(torch.int32), exact.scales.view(torch.int32))


def check_quantisers(columns: int) -> None:
    x = wild(7, columns)
    assert_same(quantise_int8(x), specification.quantise_int8(x))
    h, weight = wild(7, columns), torch.randn(columns).bfloat16()
    _, norm, made = rms_norm_int8(h, x, weight, 1e-6, keep=True)
    assert norm is not None
    assert_same(made, specification.quantise_int8(norm))


def main() -> None:
    interpreter._convert_float = convert
    torch.manual_seed(0)
    for columns in COLUMNS:
        check_quantisers(columns)
