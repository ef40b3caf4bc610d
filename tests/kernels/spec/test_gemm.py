"""The exact GEMM: one right answer for every batch and tile, and as close to FP64 as torch's own
FP32 GEMM.
"""

import pytest
import torch

from isobit.kernels.operands import LinearWeight
from isobit.kernels.spec.gemm import fp8_gemm_nt, grid_gemm_nt
from isobit.kernels.spec.grid import snap_rows
from isobit.kernels.spec.linear import dequantise_rows, dequantised
from isobit.kernels.spec.quantise import quantise_blocks, quantise_rows
from isobit.precision.flow import Site
from isobit.precision.formats import ScaleKind
from isobit.precision.quant_tensor import QuantTensor


def outliers(rows: int, columns: int) -> torch.Tensor:
    return torch.randn(rows, columns) * torch.exp(4 * torch.randn(rows, columns))


@pytest.mark.parametrize("kind", ["power_of_two", "fp32"])
def test_e4m3_rows_do_not_depend_on_the_batch(kind: ScaleKind) -> None:
    x, w = outliers(130, 384).bfloat16(), quantise_blocks(outliers(256, 384).bfloat16(), kind)
    whole = fp8_gemm_nt(quantise_rows(x, kind), w)
    for m in range(1, 131):
        assert torch.equal(fp8_gemm_nt(quantise_rows(x[:m], kind), w), whole[:m]), m
    assert torch.equal(fp8_gemm_nt(quantise_rows(x[77:], kind), w), whole[77:])


@pytest.mark.parametrize("columns", [128, 896, 200])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_snapped_rows_do_not_depend_on_the_batch(columns: int, dtype: torch.dtype) -> None:
    x, w = outliers(130, columns).to(dtype), snap_rows(outliers(100, columns).to(dtype))
    whole = grid_gemm_nt(snap_rows(x), w)
    for m in [*range(1, 20), 31, 33, 64, 65, 129]:
        assert torch.equal(grid_gemm_nt(snap_rows(x[:m]), w), whole[:m]), m


def test_block_products_are_exact() -> None:
    """Any order of the 128 terms gives the same bits: the columns of both operands permuted inside
    each block.
    """
    order = torch.cat([torch.randperm(128), 128 + torch.randperm(128)])
    x, w = quantise_rows(outliers(40, 256)), quantise_blocks(outliers(128, 256))
    shuffled_x, shuffled_w = (
        quantise_rows(dequantise_rows(x)[:, order]),
        quantise_blocks(_dequantise(w)[:, order]),
    )
    assert torch.equal(fp8_gemm_nt(x, w), fp8_gemm_nt(shuffled_x, shuffled_w))
    a, b = snap_rows(torch.randn(40, 256)), snap_rows(torch.randn(60, 256))
    assert torch.equal(
        grid_gemm_nt(a, b), grid_gemm_nt(a[:, order].contiguous(), b[:, order].contiguous())
    )


def _dequantise(w: QuantTensor) -> torch.Tensor:
    return dequantised(LinearWeight(Site("w", "linear", "e4m3"), w))


def test_accuracy_against_fp64_with_torch_as_the_yardstick() -> None:
    x, w = torch.randn(64, 1024), torch.randn(96, 1024)
    exact = x.double() @ w.double().t()
    ours = (grid_gemm_nt(snap_rows(x), snap_rows(w)) - exact).norm()
    yardstick = (x @ w.t() - exact).norm()
    assert ours <= 2 * yardstick
    q, qw = quantise_rows(x), quantise_blocks(torch.randn(128, 1024))
    exact = dequantise_rows(q).double() @ _dequantise(qw).double().t()
    assert (fp8_gemm_nt(q, qw) - exact).norm() <= 2 * (
        dequantise_rows(q) @ _dequantise(qw).t() - exact
    ).norm()


def test_snapping_keeps_bf16_that_lies_within_15_bits_of_the_largest() -> None:
    x = torch.randn(50, 128).bfloat16()
    near = x.abs() >= x.abs().amax(-1, keepdim=True) * 2.0**-14
    assert torch.equal(snap_rows(x)[near], x[near])
    assert snap_rows(x).dtype == torch.bfloat16
    tiny = torch.zeros(1, 128)
    tiny[0, 0], tiny[0, 1] = 1.0, 2.0**-24
    assert snap_rows(tiny)[0, :2].tolist() == [1.0, 0.0]


def test_nan_and_infinity_reach_the_output() -> None:
    x, w = torch.randn(3, 128), torch.randn(128, 128)
    x[1, 5] = torch.inf
    x[2, 5] = torch.nan
    for y in (
        fp8_gemm_nt(quantise_rows(x), quantise_blocks(w)),
        grid_gemm_nt(snap_rows(x), snap_rows(w)),
    ):
        assert y[0].isfinite().all()
        assert not y[1].isfinite().any() and y[2].isnan().all()
