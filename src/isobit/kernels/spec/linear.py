"""The linear layer: FProp, DGrad and WGrad in the formats of its site.

    FProp  Y  = X W^T    forward format; a row must have the same bits in every batch: exact GEMM
    DGrad  dX = dY W     E4M3: dY in 1x128 groups along N; W's 128x128 blocks are those of the
                         forward, read transposed
    WGrad  dW += dY^T X  E4M3: both operands in groups of 128 tokens, quantised directly from BF16

A linear in INT8 has DGrad in E4M3, of the numbers that its INT8 stands for, and WGrad in BF16, or
where ``precision.dgrad`` and ``precision.wgrad`` say so in INT8
(``isobit.kernels.spec.int8_backward``).

Y and dX are rounded to the format between operators.  dW is FP32 and is added to the gradient of
the FP32 master as one finished sum.  No bit of the backward has to agree with a rollout, so its
GEMMs are plain FP32 over dequantised operands, which repeat at a fixed number of threads.

**The exact GEMM** is batch invariant because every 128-long block product has one right answer.
Products of two E4M3 numbers, and sums of 128 of them, are exact in FP64; so are those of numbers on
the grid of ``isobit.kernels.spec.quantise``.  A block product is therefore the same in any order,
batch, tile, library or thread count.  It is rounded once to FP32 and scaled, and blocks are added
in FP32 in ascending order of K:

    Y[m, n] = sum over blocks k of  FP32(sum_j A[m, kj] B[n, kj]) * scale_a[m, k]
                                                                  * scale_b[block of n, k]

In INT8 the sum over all of K is an integer, rounded to FP32 once and multiplied by scale_a[m], then
by scale_b[n].  ``torch._int_mm`` computes it on a CPU that has instructions for it (VNNI, AMX) and
passes a check at the first use.  Elsewhere FP32 does, 1,024 columns at a time, whose sums it holds
exactly; the results are added in FP64.

Shapes: A [M, K], B [N, K] (K-major, as FP8 tensor cores need it), Y [M, N] FP32.
"""

from dataclasses import replace
from functools import cache

import torch

from isobit.kernels.observing import rounded
from isobit.kernels.operands import (
    AdapterGradients,
    AdapterWeight,
    LinearInput,
    LinearWeight,
    Operand,
    OutputGradient,
)
from isobit.kernels.spec.int8_backward import (
    balanced_rows,
    quantise_parts,
    transposed_parts,
)
from isobit.kernels.spec.quantise import (
    SHIFT,
    decode_e4m3,
    dequantise_int8,
    quantise_blocks,
    quantise_int8,
    quantise_rows,
    quantise_tokens,
    shifted_e4m3,
    snap_rows,
)
from isobit.precision.flow import Site
from isobit.precision.quant_tensor import (
    BLOCK,
    INT8_SUMMANDS,
    Int8Parts,
    Int8Rows,
    QuantTensor,
    block_sizes,
)

_int_mm = torch._int_mm  # pyright: ignore[reportPrivateImportUsage] (documented by name alone)


def fp8_gemm_nt(a: QuantTensor, b: QuantTensor) -> torch.Tensor:
    """A in 1x128 groups, B in 128x128 blocks -> A B^T in FP32."""
    assert (a.granularity, b.granularity) == ("1x128", "128x128"), (a.granularity, b.granularity)
    left, right = shifted_e4m3(a.values).double(), shifted_e4m3(b.values).double()
    b_scales = b.row_scales().mul_(SHIFT * SHIFT).t().contiguous()
    total: torch.Tensor | None = None
    for k in range(a.scales.shape[1]):
        block = _block_product(left, right, k)
        block.mul_(a.scales[:, k, None])
        block.mul_(b_scales[k])
        total = block if total is None else total.add_(block)
    assert total is not None
    return total


def grid_gemm_nt(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """A [M, K] and B [N, K], BF16 or FP32 and snapped to the grid by rows (``snap_rows``) -> A B^T
    in FP32.
    """
    left, right = a.double(), b.double()
    total = _block_product(left, right, 0)
    for k in range(1, -(-a.shape[1] // BLOCK)):
        total.add_(_block_product(left, right, k))
    return total


def _block_product(left: torch.Tensor, right: torch.Tensor, k: int) -> torch.Tensor:
    block = slice(k * BLOCK, (k + 1) * BLOCK)
    return torch.mm(left[:, block], right[:, block].t()).float()


def int8_gemm_nt(a: Int8Rows, b: Int8Rows) -> torch.Tensor:
    """An activation A and a weight B -> A B^T in FP32."""
    return integer_product(a.values, b.values).mul_(a.scales[:, None]).mul_(b.scales)


_EXACT_COLUMNS = 1024
"""Sums of so many products of INT8 are integers below 2^24: FP32 holds every one of them."""


def integer_product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """A [M, K] and B [N, K], INT8 in -127 .. 127 with K at most ``INT8_SUMMANDS`` -> A B^T, an
    integer that is rounded to FP32 once.
    """
    assert a.shape[1] <= INT8_SUMMANDS, a.shape
    if has_int8_products() and a.shape[1] > 1 and int_mm_is_exact():
        return _int_mm(a, b.t()).float()
    columns = a.shape[1]
    if columns <= _EXACT_COLUMNS:
        return torch.mm(a.float(), b.float().t())
    total = torch.zeros(len(a), len(b), dtype=torch.float64)
    for left, right in zip(a.split(_EXACT_COLUMNS, 1), b.split(_EXACT_COLUMNS, 1), strict=True):
        total.add_(torch.mm(left.float(), right.float().t()))
    return total.float()


@cache
def has_int8_products() -> bool:
    """Whether this processor multiplies INT8 (VNNI, AMX).  Without, ``torch._int_mm`` is a loop of
    single products, tens of times slower than FP32.
    """
    if not hasattr(torch.cpu, "get_capabilities"):  # an older torch
        return torch.cpu._is_vnni_supported()  # pyright: ignore[reportPrivateUsage]
    found = torch.cpu.get_capabilities()
    return any(found.get(name, False) for name in ("avx512_vnni", "avx_vnni", "amx_int8"))


@cache
def int_mm_is_exact() -> bool:
    """Whether torch's product of INT8 matrices is exact on this machine, at the largest numbers and
    at odd sizes.
    """
    for rows, columns, k in ((1, 1, 100), (3, 5, 7), (64, 48, 256), (65, 33, 129)):
        number = torch.arange(rows * k).view(rows, k)
        varied = number * 37 % 255 - 127
        for a in (varied, torch.full_like(varied, 127), torch.full_like(varied, -127)):
            left, right = a.to(torch.int8), a[torch.arange(columns) % rows].to(torch.int8)
            exact = torch.mm(left.double(), right.double().t()).int()
            if not torch.equal(_int_mm(left, right.t()), exact):
                return False
    return True


def linear_input(x: torch.Tensor, site: Site, save: bool = False) -> LinearInput:
    """x [T, K]: in INT8, in 1x128 groups, or on the grid; saved in groups of 128 tokens, or as it
    is.
    """
    read: Operand
    if site.forward == "int8":
        read = quantise_int8(x)
    elif site.forward == "e4m3":
        read = quantise_rows(x, site.scales)
    else:
        read = snap_rows(x)
    return LinearInput(read, input_saved(x, site) if save else None)


def joined_rows(values: torch.Tensor, scales: torch.Tensor) -> QuantTensor:
    """E4M3 values [T, K] and FP32 scales, a row a group, [ceil(K / 128), T]."""
    return QuantTensor(values, scales.t().contiguous(), "1x128")


def input_saved(x: torch.Tensor, site: Site) -> Operand:
    """x [T, K] as WGrad reads it."""
    return quantise_tokens(x, site.scales) if site.wgrad == "e4m3" else x


def linear(x: Operand, weight: LinearWeight) -> torch.Tensor:
    """[T, K] -> [T, N]; the bits of a row depend on that row alone."""
    if isinstance(weight.matrix, Int8Rows):
        assert isinstance(x, Int8Rows)
        return rounded(int8_gemm_nt(x, weight.matrix), torch.bfloat16)
    if isinstance(weight.matrix, QuantTensor):
        assert isinstance(x, QuantTensor)
        return rounded(fp8_gemm_nt(x, weight.matrix), torch.bfloat16)
    assert isinstance(x, torch.Tensor)
    assert isinstance(weight.matrix, torch.Tensor)
    return rounded(grid_gemm_nt(x, weight.matrix), x.dtype)


def adapter_low(x: torch.Tensor, adapter: AdapterWeight) -> torch.Tensor:
    """t of all targets, side by side.  A product of a BF16 tensor and a number is made in FP32 and
    rounded once.
    """
    down = adapter.down
    return linear(linear_input(x, down.site).read, down) * adapter.scale


def add_adapter(
    y: torch.Tensor, x: torch.Tensor, adapter: AdapterWeight, save: bool = False
) -> torch.Tensor:
    low = adapter_low(x, adapter)
    for place, columns, rows in adapter.targets():
        up = adapter.up.rows(rows.start, rows.stop)
        y[:, columns] += linear(linear_input(low[:, place].contiguous(), up.site).read, up)
    return low


def adapter_backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    low: torch.Tensor,
    dx: torch.Tensor,
    adapter: AdapterWeight,
    grads: AdapterGradients,
) -> None:
    """The gradients of an adapter, with dT = dY B, rounded, for each target:

    dB += dY^T t        dA += scale dT^T x        dX += scale dT A
    """
    d_low = torch.empty_like(low)
    for place, columns, rows in adapter.targets():
        up = adapter.up.rows(rows.start, rows.stop)
        wgrad(dy[:, columns], low[:, place], grads.up[rows], up.site)
        d_low[:, place] = dgrad(dy[:, columns], up)
    d_low *= adapter.scale
    wgrad(d_low, x, grads.down, adapter.down.site)
    dx += dgrad(d_low, adapter.down)


def output_gradient(dy: torch.Tensor, site: Site) -> OutputGradient:
    """dY [T, N] as DGrad reads it, in INT8 or in 1x128 groups, and as WGrad reads it, in groups of
    128 tokens; else dY itself, of which WGrad in INT8 makes its operand together with that of X.
    """
    rows: Operand = dy
    if site.dgrad == "int8":
        rows = quantise_parts(dy, site.parts or (dy.shape[1],))
    elif site.dgrad == "e4m3":
        rows = quantise_rows(dy, site.scales, site.parts)
    tokens = quantise_tokens(dy, site.scales) if site.wgrad == "e4m3" else dy
    return OutputGradient(rows, tokens)


def dgrad(dy: Operand, weight: LinearWeight) -> torch.Tensor:
    """dX [T, K] of dY [T, N], in the format between operators."""
    if isinstance(dy, Int8Parts):
        assert isinstance(weight.matrix, Int8Rows)
        return int8_gemm_of_parts(dy, transposed_parts(weight.matrix, dy.parts)).bfloat16()
    if isinstance(dy, QuantTensor):
        return (dequantise_rows(dy) @ dequantised(in_e4m3(weight))).bfloat16()
    assert isinstance(dy, torch.Tensor)
    return (dy.float() @ dequantised(weight)).to(dy.dtype)


def int8_gemm_of_parts(a: Int8Parts, b: Int8Parts) -> torch.Tensor:
    """A [M, C] and B [N, C] of the same parts -> A B^T, FP32 [M, N]."""
    total = torch.zeros(len(a.values), len(b.values), dtype=torch.float32)
    parts = a.values.split(a.parts, 1), b.values.split(b.parts, 1)
    for left, right, row, column in zip(*parts, a.scales, b.scales, strict=True):
        total += integer_product(left, right).mul_(row[:, None]).mul_(column)
    return total


def wgrad(dy: Operand, x: Operand, grad: torch.Tensor, site: Site) -> None:
    """grad, FP32 [N, K], += dY^T X."""
    if site.wgrad == "int8":
        assert isinstance(dy, torch.Tensor)
        assert isinstance(x, torch.Tensor)
        if not len(dy):
            return
        if site.wgrad_of(len(dy)) == "int8":
            grad.add_(int8_gemm_nt(*balanced_rows(dy, x)))
            return
    grad.add_(dequantise_tokens(dy).t() @ dequantise_tokens(x))


def dequantised(weight: LinearWeight) -> torch.Tensor:
    """FP32 [N, K]: the matrix that the forward multiplies with, of INT8 before the Hadamard
    matrix.
    """
    matrix = weight.matrix
    if isinstance(matrix, torch.Tensor):
        return matrix.float()
    if isinstance(matrix, Int8Rows):
        return dequantise_int8(matrix)
    assert isinstance(matrix, QuantTensor)
    values = decode_e4m3(matrix.values)
    return _by_column(values, matrix.row_scales(), (values.shape[1],))


def in_e4m3(weight: LinearWeight) -> LinearWeight:
    """The weight as DGrad in E4M3 reads it: a matrix in INT8 in E4M3 blocks, others as they are."""
    if not isinstance(weight.matrix, Int8Rows):
        return weight
    wide, site = dequantise_int8(weight.matrix), weight.site
    return replace(weight, matrix=quantise_blocks(wide, site.scales, site.parts))


def dequantise_rows(x: QuantTensor) -> torch.Tensor:
    """1x128 groups -> FP32 [M, K]."""
    values = decode_e4m3(x.values)
    return _by_column(values, x.scales, x.parts or (values.shape[1],))


def _by_column(values: torch.Tensor, scales: torch.Tensor, parts: tuple[int, ...]) -> torch.Tensor:
    """Multiply ``values`` [R, C] in place by the scale [R, blocks of C] of each row and block."""
    blocks = values.split(block_sizes(parts), 1)
    for block, scale in zip(blocks, scales.unbind(1), strict=True):
        block.mul_(scale[:, None])
    return values


def dequantise_tokens(x: Operand) -> torch.Tensor:
    """An operand of WGrad -> FP32 [T, C]."""
    if isinstance(x, torch.Tensor):
        return x.float()
    values = decode_e4m3(x.values)
    for group, scale in zip(values.split(BLOCK), x.scales, strict=True):
        group.mul_(scale)
    return values
