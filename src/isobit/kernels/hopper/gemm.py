"""The FP8 GEMM of the linears on Hopper, through a library: DeepGEMM where it is installed, cuBLASLt otherwise.

    Y[m, n] = sum over blocks k of  (sum_j A[m, kj] B[n, kj]) * scale_a[m, k] * scale_b[n/128, k]        BF16 out, FP32 in between

DeepGEMM promotes each 128-long block to FP32 in ascending order of K without a split of K, so a row's bits do not depend on M.  With
power-of-two scales cuBLASLt gives the same bits for every shape and M tried, where scaling is exact; with FP32 scales its rows change
with M (seen: 4096 x 12288, M = 3 against 1024), so it is refused there.  tests/gpu/test_gemm.py holds all of this.

DeepGEMM is the faster at every decode size.  It compiles each kernel at its first use with nvcc (DG_JIT_CACHE_DIR keeps them); without
nvcc or the package, `F.scaled_mm` takes over.
"""

import importlib.util
import shutil
from functools import cache
from typing import Literal

import torch
import torch.nn.functional as F

from isobit.errors import ConfigError
from isobit.kernels.hopper.quantise import QuantRows
from isobit.precision.formats import ScaleKind
from isobit.precision.quant_tensor import QuantTensor

BackEnd = Literal["deep_gemm", "scaled_mm"]


@cache
def gemm_back_end(scales: ScaleKind) -> BackEnd:
    """The library that multiplies: DeepGEMM if the package and nvcc are there.  Raises ConfigError where the other would not be exact."""
    if importlib.util.find_spec("deep_gemm") is not None and shutil.which("nvcc") is not None:
        return "deep_gemm"
    if scales == "fp32":
        raise ConfigError(
            "precision.scales = 'fp32' needs DeepGEMM and nvcc on this GPU, because cuBLASLt's rows would depend on the batch: "
            "install isobit[hopper] and CUDA's compiler, or use the default 'power_of_two'"
        )
    return "scaled_mm"


def gemm_e4m3(a: QuantRows, b: QuantTensor, back_end: BackEnd) -> torch.Tensor:
    """A [M, K] in 1x128 groups, B [N, K] in 128x128 blocks -> A B^T, BF16 [M, N]."""
    assert b.granularity == "128x128"
    if back_end == "deep_gemm":
        import deep_gemm  # pyright: ignore[reportMissingImports]

        out = torch.empty((a.values.shape[0], b.values.shape[0]), dtype=torch.bfloat16, device=a.values.device)
        deep_gemm.fp8_gemm_nt((a.values, a.scales), (b.values, b.scales), out)
        return out
    return _scaled_mm(a, b)


def _scaled_mm(a: QuantRows, b: QuantTensor) -> torch.Tensor:
    """cuBLASLt wants rows of A in multiples of 4, like their scales, and B's scales with K padded to a multiple of 4 blocks."""
    rows, blocks = a.scales.shape
    padded = a.scales.stride(1)
    values = F.pad(a.values.view(torch.uint8), (0, 0, 0, padded - rows)).view(a.values.dtype)
    b_scales = F.pad(b.scales, (0, -blocks % 4))
    product = F.scaled_mm(
        values,
        b.values.t(),
        scale_a=a.scales.as_strided((padded, blocks), (1, padded)),
        scale_recipe_a=F.ScalingType.BlockWise1x128,
        scale_b=b_scales.t(),
        scale_recipe_b=F.ScalingType.BlockWise128x128,
        swizzle_a=F.SwizzleType.NO_SWIZZLE,
        swizzle_b=F.SwizzleType.NO_SWIZZLE,
        output_dtype=torch.bfloat16,
    )
    return product[:rows]
