"""The GEMMs on a Hopper GPU: rows free of the batch, all back ends equal where scaling is exact,
and the values of the specification.
"""

from typing import Literal

import pytest
import torch

from isobit.kernels.hopper.gemm import BackEnd, bf16_gemm_nt, fp8_gemm_nt, why_not_deep_gemm
from isobit.kernels.hopper.quantise import publish_blocks, quantise_rows
from isobit.kernels.spec.linear import fp8_gemm_nt as specification
from isobit.kernels.spec.quantise import quantise_blocks
from isobit.kernels.spec.quantise import quantise_rows as quantise_rows_on_cpu
from isobit.precision.quant_tensor import QuantTensor, ScaleKind

BF16_BACK_ENDS: list[Literal["deep_gemm", "triton"]] = (
    ["triton"] if why_not_deep_gemm() else ["deep_gemm", "triton"]
)
BACK_ENDS: list[BackEnd] = [*BF16_BACK_ENDS, "scaled_mm"]
KINDS: list[ScaleKind] = ["power_of_two", "fp32"]
INVARIANT = [
    (back_end, kind)
    for back_end in BACK_ENDS
    for kind in KINDS
    if (back_end, kind) != ("scaled_mm", "fp32")
]
ROWS = (1, 2, 3, 4, 7, 16, 33, 64, 100, 129, 257, 512)
needs_deep_gemm = pytest.mark.skipif(
    len(BF16_BACK_ENDS) == 1, reason="DeepGEMM or nvcc is not installed"
)


def on_gpu(x: QuantTensor) -> QuantTensor:
    return QuantTensor(x.values.cuda(), x.scales.cuda(), x.granularity)


def random_weight(n: int, k: int, kind: ScaleKind = "power_of_two") -> QuantTensor:
    weight = QuantTensor.empty_blocks(n, k, torch.device("cuda"))
    publish_blocks(torch.randn(n, k, device="cuda"), weight, kind)
    return weight


def bf16(rows: int, columns: int) -> torch.Tensor:
    return torch.randn(rows, columns, device="cuda").bfloat16()


@pytest.mark.parametrize(("back_end", "kind"), INVARIANT)
@pytest.mark.parametrize(("n", "k"), [(1536, 1024), (256, 896), (4096, 12288)])
def test_fp8_rows_do_not_depend_on_the_batch(
    back_end: BackEnd, kind: ScaleKind, n: int, k: int
) -> None:
    x, w = bf16(1024, k), random_weight(n, k, kind)
    whole = fp8_gemm_nt(quantise_rows(x, kind), w, kind, back_end)
    for m in ROWS:
        assert torch.equal(fp8_gemm_nt(quantise_rows(x[:m], kind), w, kind, back_end), whole[:m]), m


@pytest.mark.parametrize("back_end", BF16_BACK_ENDS)
@pytest.mark.parametrize(
    ("n", "k", "dtype"),
    [
        (151936, 4096, torch.float32),
        (4096, 12288, torch.bfloat16),
        (24576, 4096, torch.bfloat16),
        (6144, 4096, torch.bfloat16),
        (1536, 896, torch.bfloat16),
        (40, 72, torch.float32),  # DeepGEMM is left out: its tiles are larger
    ],
)
def test_bf16_rows_do_not_depend_on_the_batch(
    back_end: Literal["deep_gemm", "triton"], n: int, k: int, dtype: torch.dtype
) -> None:
    rows = 4096 if n < 100_000 else 2048
    x, w = bf16(rows, k), bf16(n, k)
    whole = bf16_gemm_nt(x, w, dtype, back_end)
    for m in (1, 3, 16, 64, 100, 257, rows // 2):
        assert torch.equal(bf16_gemm_nt(x[:m], w, dtype, back_end), whole[:m]), m
    exact = x[:64].double() @ w.double().t()
    assert (whole[:64] - exact).norm() / exact.norm() < (1e-5 if dtype == torch.float32 else 2.5e-3)


@pytest.mark.parametrize("m", [1, 16, 100, 1024])
def test_every_back_end_gives_the_same_bits(m: int) -> None:
    for n, k in ((1536, 1024), (256, 896), (4096, 12288)):
        a, w = quantise_rows(bf16(m, k)), random_weight(n, k)
        expected = fp8_gemm_nt(a, w, "power_of_two", "triton")
        for back_end in BACK_ENDS:
            assert torch.equal(fp8_gemm_nt(a, w, "power_of_two", back_end), expected), (
                back_end,
                n,
                k,
            )


@needs_deep_gemm
@pytest.mark.parametrize("m", [16, 300])
def test_triton_and_deep_gemm_agree_with_fp32_scales_and_in_bf16(m: int) -> None:
    a, w = quantise_rows(bf16(m, 4096), "fp32"), random_weight(1536, 4096, "fp32")
    assert torch.equal(fp8_gemm_nt(a, w, "fp32", "deep_gemm"), fp8_gemm_nt(a, w, "fp32", "triton"))
    x, y = bf16(m, 4096), bf16(1536, 4096)
    assert torch.equal(
        bf16_gemm_nt(x, y, torch.float32, "deep_gemm"), bf16_gemm_nt(x, y, torch.float32, "triton")
    )


@pytest.mark.parametrize("back_end", BACK_ENDS)
def test_values_against_the_specification(back_end: BackEnd) -> None:
    x, w = torch.randn(200, 896).bfloat16(), quantise_blocks(torch.randn(384, 896).bfloat16())
    exact = specification(quantise_rows_on_cpu(x), w)
    ours = fp8_gemm_nt(quantise_rows(x.cuda()), on_gpu(w), "power_of_two", back_end).cpu()
    assert (ours.float() - exact).norm() / exact.norm() < 2.5e-3  # a BF16 rounding is 1.7e-3
