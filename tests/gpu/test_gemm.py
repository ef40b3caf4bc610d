"""The FP8 GEMM on a Hopper GPU: rows free of the batch, both libraries equal, and the values of the specification."""

import pytest
import torch

from isobit.errors import ConfigError
from isobit.kernels.gemm import gemm_e4m3 as specification
from isobit.kernels.quantise import quantise_blocks
from isobit.kernels.quantise import quantise_rows as quantise_rows_on_cpu
from isobit.precision.formats import ScaleKind
from isobit.precision.quant_tensor import QuantTensor

if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
    pytest.skip("needs a Hopper GPU", allow_module_level=True)

from isobit.kernels.hopper.gemm import BackEnd, gemm_back_end, gemm_e4m3
from isobit.kernels.hopper.quantise import quantise_rows

BACK_ENDS: list[BackEnd] = ["deep_gemm", "scaled_mm"] if gemm_back_end("power_of_two") == "deep_gemm" else ["scaled_mm"]
INVARIANT: list[tuple[BackEnd, ScaleKind]] = [(back_end, "power_of_two") for back_end in BACK_ENDS]
if len(BACK_ENDS) == 2:
    INVARIANT.append(("deep_gemm", "fp32"))


def on_gpu(x: QuantTensor) -> QuantTensor:
    return QuantTensor(x.values.cuda(), x.scales.cuda(), x.granularity)


@pytest.mark.parametrize(("back_end", "kind"), INVARIANT)
@pytest.mark.parametrize(("n", "k"), [(1536, 1024), (256, 896), (4096, 12288)])
def test_rows_do_not_depend_on_the_batch(back_end: BackEnd, kind: ScaleKind, n: int, k: int) -> None:
    x, w = torch.randn(1024, k).bfloat16().cuda(), on_gpu(quantise_blocks(torch.randn(n, k).bfloat16(), kind))
    whole = gemm_e4m3(quantise_rows(x, kind), w, back_end)
    for m in (1, 2, 3, 4, 7, 16, 33, 64, 100, 129, 257, 512):
        assert torch.equal(gemm_e4m3(quantise_rows(x[:m], kind), w, back_end), whole[:m]), m


def test_fp32_scales_without_deep_gemm_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    gemm_back_end.cache_clear()
    monkeypatch.setattr("shutil.which", lambda _: None)
    assert gemm_back_end("power_of_two") == "scaled_mm"
    with pytest.raises(ConfigError, match="needs DeepGEMM"):
        gemm_back_end("fp32")
    gemm_back_end.cache_clear()


@pytest.mark.skipif(len(BACK_ENDS) == 1, reason="DeepGEMM or nvcc is not installed")
@pytest.mark.parametrize("m", [1, 16, 100, 1024])
def test_both_libraries_give_the_same_bits(m: int) -> None:
    for n, k in ((1536, 1024), (256, 896), (4096, 12288)):
        x, w = torch.randn(m, k).bfloat16().cuda(), on_gpu(quantise_blocks(torch.randn(n, k).bfloat16()))
        a = quantise_rows(x)
        assert torch.equal(gemm_e4m3(a, w, "deep_gemm"), gemm_e4m3(a, w, "scaled_mm"))


@pytest.mark.parametrize("back_end", BACK_ENDS)
def test_values_against_the_specification(back_end: BackEnd) -> None:
    x, w = torch.randn(200, 896).bfloat16(), quantise_blocks(torch.randn(384, 896).bfloat16())
    exact = specification(quantise_rows_on_cpu(x), w)
    ours = gemm_e4m3(quantise_rows(x.cuda()), on_gpu(w), back_end).cpu()
    assert (ours.float() - exact).norm() / exact.norm() < 2.5e-3  # a BF16 rounding is 1.7e-3
