"""The GEMMs on a Hopper GPU, for matrices of any size: rows free of the batch, parts multiplied as
if each stood alone, all back ends equal where scaling is exact, the specification's values.
"""

from typing import Literal

import pytest
import torch

from isobit.kernels.hopper.gemm import BackEnd
from isobit.kernels.spec import quantise as specification
from isobit.kernels.spec.linear import fp8_gemm_nt as gemm_specification
from isobit.precision.quant_tensor import QuantTensor, ScaleKind
from tests.gpu.kernels import (
    BACK_ENDS,
    DEEP_GEMM_AND_TRITON,
    bf16_gemm_nt,
    fp8_gemm_nt,
    publish_blocks,
    quantise_rows,
)
from tests.gpu.operands import BF16_ROUNDING, KINDS, MATRICES, bf16, published
from tests.kernels.comparison import relative_error

INVARIANT = [(b, k) for b in BACK_ENDS for k in KINDS if (b, k) != ("scaled_mm", "fp32")]
ALL = [*MATRICES, ((256,), 896), ((4096,), 12288)]
ROWS = (1, 2, 3, 4, 7, 16, 33, 64, 100, 129, 257, 500, 512)
needs_deep_gemm = pytest.mark.skipif(
    len(DEEP_GEMM_AND_TRITON) == 1, reason="DeepGEMM or nvcc is not installed"
)


@pytest.mark.parametrize(("back_end", "kind"), INVARIANT)
@pytest.mark.parametrize(("parts", "k"), ALL)
def test_fp8_rows_do_not_depend_on_the_batch(
    back_end: BackEnd, kind: ScaleKind, parts: tuple[int, ...], k: int
) -> None:
    x, (weight, _) = bf16(1024, k), published(parts, k, kind)
    whole = fp8_gemm_nt(quantise_rows(x, kind), weight, kind, back_end)
    for m in ROWS:
        made = fp8_gemm_nt(quantise_rows(x[:m], kind), weight, kind, back_end)
        assert torch.equal(made, whole[:m]), m


@pytest.mark.parametrize("back_end", DEEP_GEMM_AND_TRITON)
@pytest.mark.parametrize(
    ("n", "k", "dtype"),
    [
        (151936, 4096, torch.float32),
        (4096, 12288, torch.bfloat16),
        (24576, 4096, torch.bfloat16),
        (6144, 4096, torch.bfloat16),
        (1536, 896, torch.bfloat16),
        (40, 72, torch.float32),  # DeepGEMM is left out: its tiles are larger
        *(
            (n, k, dtype)
            for n, k in ((1000, 576), (49152, 576), (320, 960), (192, 576))
            for dtype in (torch.float32, torch.bfloat16)
        ),
    ],
)
def test_bf16_rows_do_not_depend_on_the_batch(
    back_end: Literal["deep_gemm", "triton"], n: int, k: int, dtype: torch.dtype
) -> None:
    rows = 4096 if n < 100_000 else 2048
    x, w = bf16(rows, k), bf16(n, k)
    whole = bf16_gemm_nt(x, w, dtype, back_end)
    for m in (1, 3, 7, 16, 64, 100, 129, 257, 500, rows // 2):
        assert torch.equal(bf16_gemm_nt(x[:m], w, dtype, back_end), whole[:m]), m
    bound = 1e-5 if dtype == torch.float32 else 2.5e-3
    assert relative_error(whole[:64], x[:64].double() @ w.double().t()) < bound


@pytest.mark.parametrize(("parts", "k"), ALL)
def test_every_back_end_gives_a_part_the_bits_that_it_has_alone(
    parts: tuple[int, ...], k: int
) -> None:
    weight, master = published(parts, k)
    alone = [QuantTensor.empty_blocks(n, k, master.device) for n in parts]
    for part, of_part in zip(alone, master.split(parts), strict=True):
        publish_blocks(of_part.contiguous(), part)
    for m in (1, 16, 100, 300, 1024):
        x = quantise_rows(bf16(m, k))
        expected = fp8_gemm_nt(x, weight, "power_of_two", "triton")
        for back_end in BACK_ENDS:
            whole = fp8_gemm_nt(x, weight, "power_of_two", back_end)
            assert torch.equal(whole, expected), (back_end, m)
            made = [fp8_gemm_nt(x, part, "power_of_two", back_end) for part in alone]
            assert torch.equal(whole, torch.cat(made, 1)), (back_end, m)


@needs_deep_gemm
@pytest.mark.parametrize("m", [16, 300])
def test_triton_and_deep_gemm_agree_with_fp32_scales_and_in_bf16(m: int) -> None:
    a, (w, _) = quantise_rows(bf16(m, 4096), "fp32"), published((1536,), 4096, "fp32")
    assert torch.equal(fp8_gemm_nt(a, w, "fp32", "deep_gemm"), fp8_gemm_nt(a, w, "fp32", "triton"))
    x, y = bf16(m, 4096), bf16(1536, 4096)
    assert torch.equal(
        bf16_gemm_nt(x, y, torch.float32, "deep_gemm"), bf16_gemm_nt(x, y, torch.float32, "triton")
    )


@pytest.mark.parametrize("back_end", BACK_ENDS)
@pytest.mark.parametrize(("parts", "k"), MATRICES)
def test_values_against_the_specification(
    back_end: BackEnd, parts: tuple[int, ...], k: int
) -> None:
    x, (weight, master) = bf16(129, k), published(parts, k)
    exact = gemm_specification(
        specification.quantise_rows(x.cpu()),
        specification.quantise_blocks(master.bfloat16().cpu(), parts=parts),
    )
    ours = fp8_gemm_nt(quantise_rows(x), weight, "power_of_two", back_end)
    assert relative_error(ours, exact) < BF16_ROUNDING
