"""The GEMMs on Hopper: FP8 blocks for the linears, BF16 for lm_head and for layers in BF16.

    E4M3   Y[m, n] = sum over blocks k of
                         (sum_j A[m, kj] B[n, kj]) * scale_a[m, k] * scale_b[n/128, k]
    BF16   Y[m, n] = sum_j A[m, j] B[n, j]

summed in FP32.  A row's bits may not depend on M.  These libraries keep that, in order of
preference (tests/gpu/test_gemm.py):

    deep_gemm    promotes each 128-long block to FP32 in ascending order of K and never splits K;
                 the fastest at every decode size.  Compiles each kernel at its first use with nvcc
                 (DG_JIT_CACHE_DIR keeps them).
    scaled_mm    cuBLASLt, FP8 with power-of-two scales only, where scaling is exact: the bits of
                 DeepGEMM for every shape and M tried.  With FP32 scales its rows change with M
                 (seen: 4096 x 12288, M = 3 against 1024), as do cuBLAS's BF16 rows.
    triton       the kernel below: needs no library, takes every size, slower, and has the bits of
                 DeepGEMM in FP8 and BF16.

A choice may depend on what is installed and on N and K, never on M.

In the Triton kernel one program computes a whole element, by one fma a block in FP8, and in BF16 in
the tensor cores' FP32 accumulator in steps of 16, both ascending.  K is never split, and both
tiles, 64x128 and 128x128, issue wgmma of 64 rows, so an element's operations are the same in
either.  A tile of fewer rows would be lowered to another instruction with other bits.
"""

import importlib.util
import os
import shutil
import threading
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
import triton

from isobit.kernels.triton.device_functions import runs
from isobit.kernels.triton.gemm import Cut, launch
from isobit.kernels.triton.quantise import QuantRows
from isobit.precision.quant_tensor import QuantTensor, ScaleKind

# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportIndexIssue=false
# pyright: reportArgumentType=false
# (Triton's types know neither launch options nor what a kernel computes with)


_BLOCK = 128
_PROGRAMS = 132  # multiprocessors of a Hopper card: with as many large tiles, these are faster


def triton_fp8_gemm_nt(a: QuantRows, b: QuantTensor, out: torch.Tensor) -> None:
    """A [M, K] in 1x128 groups, B [N, K] in 128x128 blocks of one part -> A B^T to out, BF16 [M,
    N], perhaps columns of a larger matrix.
    """
    _launch(a.values, b.values, out, a.scales, b.scales)


def triton_bf16_gemm_nt(
    a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype, out: torch.Tensor | None = None
) -> torch.Tensor:
    """A BF16 [M, K], B BF16 [N, K] -> A B^T, BF16 or FP32 [M, N]; any sizes."""
    if out is None:
        out = torch.empty((a.shape[0], b.shape[0]), dtype=dtype, device=a.device)
    _launch(a, b, out)
    return out


def _launch(
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor,
    a_scales: torch.Tensor | None = None,
    b_scales: torch.Tensor | None = None,
) -> None:
    block_m, warps = tile(len(a), len(b))
    cut = Cut(block_m, warps, stages(block_m, a.element_size()))
    launch(a, b, out, cut, a_scales, b_scales)


def tile(m: int, n: int) -> tuple[int, int]:
    """Rows of a tile and its warps: small tiles where large ones leave multiprocessors idle."""
    large = triton.cdiv(m, 128) * triton.cdiv(n, _BLOCK) >= _PROGRAMS and m > 64
    return (128, 8) if large else (64, 4)


def stages(block_m: int, element_size: int) -> int:
    """Pipeline stages of tiles of A and B that fit the shared memory."""
    return min(6, 196 * 1024 // ((block_m + _BLOCK) * _BLOCK * element_size))


BackEnd = Literal["deep_gemm", "scaled_mm", "triton"]

_WHOLE = 64  # DeepGEMM's BF16 tiles: other sizes go to Triton
_CUBLAS = 16  # of N, that cuBLASLt's FP8 takes: others go to Triton
_DEEP_GEMM = threading.Lock()


@cache
def why_not_deep_gemm() -> str | None:
    """None if DeepGEMM can be used, else what is missing."""
    if importlib.util.find_spec("deep_gemm") is None:
        return "DeepGEMM is not installed (pip install 'isobit[hopper]')"
    if find_nvcc() is None:
        return (
            "DeepGEMM needs CUDA's compiler: there is no nvcc under CUDA_HOME, on the PATH or in "
            "/usr/local/cuda"
        )
    try:
        import deep_gemm  # pyright: ignore[reportMissingImports]
    except Exception as error:
        return f"DeepGEMM does not load: {type(error).__name__}: {error}"
    return (
        None
        if hasattr(deep_gemm, "bf16_gemm_nt")
        else "this DeepGEMM is another release (isobit[hopper] names the one that works)"
    )


def call_deep_gemm(name: str, *operands: Any, **options: Any) -> None:
    """Call a function of DeepGEMM, one thread at a time: its table of compiled kernels has no lock,
    and its binding (tvm-ffi) releases Python's.
    """
    import deep_gemm  # pyright: ignore[reportMissingImports]

    with _DEEP_GEMM:
        getattr(deep_gemm, name)(*operands, **options)


def find_nvcc() -> str | None:
    """The compiler that DeepGEMM would find."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if home is not None:
        return shutil.which("nvcc", path=str(Path(home) / "bin"))
    return shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")


def gemm_back_end(scales: ScaleKind) -> BackEnd:
    """The library for FP8 blocks with scales of this kind."""
    if why_not_deep_gemm() is None:
        return "deep_gemm"
    return "scaled_mm" if scales == "power_of_two" else "triton"


def deep_gemm_or_triton() -> Literal["deep_gemm", "triton"]:
    """The library for all other products but BF16's backward, which is torch's."""
    return "deep_gemm" if why_not_deep_gemm() is None else "triton"


def describe_back_ends() -> dict[str, str]:
    """Operation -> the library that runs it and, where that is a fallback, why."""
    missing = why_not_deep_gemm()
    if missing is None:
        operations = (
            "FP8 GEMM, power-of-two scales",
            "FP8 GEMM, FP32 scales",
            "FP8 WGrad",
            "BF16 GEMM and lm_head",
        )
        return dict.fromkeys(operations, "DeepGEMM") | _OWN
    return {
        "FP8 GEMM, power-of-two scales": f"cuBLASLt, same bits, slower at small batches: {missing}",
        "FP8 GEMM, FP32 scales": f"Triton, slower: {missing}",
        "FP8 WGrad": f"Triton: {missing}",
        "BF16 GEMM and lm_head": f"Triton, slower: {missing}",
        **_OWN,
    }


_OWN = {"INT8 GEMM": "Triton"}
"""What no library offers, and is no fallback."""


def describe_fallbacks() -> list[str]:
    """A line for each operation that a slower library runs, and why."""
    missing = why_not_deep_gemm()
    described = describe_back_ends().items()
    return [f"{name}: {library}" for name, library in described if missing and missing in library]


def fp8_gemm_nt(
    a: QuantRows, b: QuantTensor, scales: ScaleKind, back_end: BackEnd | None = None
) -> torch.Tensor:
    """A [M, K] in 1x128 groups, B [N, K] in 128x128 blocks, scales of one kind -> A B^T, BF16 [M,
    N].  Each run of B's parts is multiplied into its own columns, since the libraries have one grid
    of blocks.
    """
    assert b.granularity == "128x128"
    back_end = back_end or gemm_back_end(scales)
    assert back_end != "scaled_mm" or scales == "power_of_two", "its rows would depend on the batch"
    n = b.values.shape[0]
    several = runs(b.parts or (n,))
    if len(several) == 1 and back_end == "scaled_mm" and not n % _CUBLAS:
        return _scaled_mm(a, b)
    out = torch.empty((a.values.shape[0], n), dtype=torch.bfloat16, device=a.values.device)
    for run in several:
        rows = slice(run.first, run.first + run.size)
        blocks = slice(run.first_block, run.first_block + run.blocks)
        part = QuantTensor(b.values[rows], b.scales[blocks], "128x128") if len(several) > 1 else b
        _multiply(a, part, out[:, rows], back_end)
    return out


def bf16_gemm_nt(
    a: torch.Tensor,
    b: torch.Tensor,
    dtype: torch.dtype = torch.bfloat16,
    back_end: BackEnd | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """A BF16 [M, K], B BF16 [N, K], both contiguous -> A B^T in ``dtype``, BF16 or FP32 [M, N], or
    to ``out``, perhaps columns of a larger matrix.
    """
    assert a.dtype == b.dtype == torch.bfloat16
    assert all(x.is_contiguous() for x in (a, b))
    n, k = b.shape
    if (back_end or deep_gemm_or_triton()) == "triton" or n % _WHOLE or k % _WHOLE:
        return triton_bf16_gemm_nt(a, b, dtype, out)
    if out is None:
        out = torch.empty((a.shape[0], n), dtype=dtype, device=a.device)
    call_deep_gemm("bf16_gemm_nt", a, b, out)
    return out


def bf16_gemm_nn(
    a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype = torch.bfloat16
) -> torch.Tensor:
    """A [M, K], B [K, N], both BF16 -> A B in ``dtype``, BF16 or FP32 [M, N].  cuBLAS may cut a
    long sum in pieces, and adds those of a BF16 product in BF16.
    """
    if dtype == torch.bfloat16:
        return torch.mm(a, b)
    return torch.mm(a, b, out_dtype=dtype)


def _multiply(a: QuantRows, b: QuantTensor, out: torch.Tensor, back_end: BackEnd) -> None:
    """A B^T to out; B has one grid of blocks."""
    if back_end == "deep_gemm":
        call_deep_gemm("fp8_gemm_nt", (a.values, a.scales), (b.values, b.scales), out)
    elif back_end == "triton" or b.values.shape[0] % _CUBLAS:
        triton_fp8_gemm_nt(a, b, out)
    else:
        out.copy_(_scaled_mm(a, b))


def _scaled_mm(a: QuantRows, b: QuantTensor) -> torch.Tensor:
    """cuBLASLt pads rows of A to multiples of 4, and B's scales to multiples of 4 blocks of K."""
    rows, blocks = a.scales.shape
    padded = a.scales.stride(1)
    values = F.pad(a.values.view(torch.uint8), (0, 0, 0, padded - rows)).view(a.values.dtype)
    b_scales = F.pad(b.scales, (0, -blocks % 4))
    product = F.scaled_mm(
        values, b.values.t(), scale_a=a.scales.as_strided((padded, blocks), (1, padded)),
        scale_recipe_a=F.ScalingType.BlockWise1x128, scale_b=b_scales.t(),
        scale_recipe_b=F.ScalingType.BlockWise128x128, swizzle_a=F.SwizzleType.NO_SWIZZLE,
        swizzle_b=F.SwizzleType.NO_SWIZZLE, output_dtype=torch.bfloat16,
    )  # fmt: skip
    return product[:rows]
