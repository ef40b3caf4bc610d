"""The linear layer: its operands in the formats of a site, its three products, and adapters.

    FProp   Y   = X W^T       a row's bits do not depend on the number of rows
    DGrad   dX  = dY W        in E4M3, W's 128x128 blocks are the forward's, transposed
    WGrad   dW += dY^T X      FP32 sums of tokens in one order, added once

Operands, and products in INT8, have the bits of ``isobit.kernels.spec.linear``.  In E4M3, DGrad's
dY is in 1x128 groups along N, and WGrad's operands are in groups of 128 tokens (``token_groups``),
or in BF16.  Where both copies of an operand are needed, one kernel reads it once.  A linear in INT8
has DGrad in E4M3 and WGrad in BF16, or where the flow asks for it in INT8 (``int8_backward``).
Matrix units read E4M3 along the contraction, so W is transposed here, a layer at a time, rather
than stored twice.

The products are those of a back end (``products``).  E4M3 is written ``as_bytes``, by integers
alone, for cards before sm_89, whose products read it so (``e4m3``).

LoRA's products are narrow: x A^T has a few dozen columns, and a library's tile of a decode step
would go through all of K on four multiprocessors.  K is cut into parts here, at fixed places, whose
FP32 sums are added in ascending order, and what is added to y is made where it is added.  Its two
or three kernels take 2 to 5 us each in a decode step on an H200, so on Hopper each begins while the
one before still runs (programmatic dependent launch, OVERLAPS):

    x A^T       begins when all before has ended, the linear's own product among it, and lets the
                next kernel begin at once
    sum         waits until x A^T has ended, before it reads its parts or writes
    t B^T       loads its tiles of y and B, which were complete before x A^T began; then waits until
                the kernel before it has ended, hence both, before it reads t or writes y

What follows is launched in order, and begins when the last of them has ended.  All programs of the
latter two wait, so each kernel ends after those before it, and memory that is free again then has
no reader left.
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from isobit.kernels.operands import (
    ADAPTER_PARTS,
    AdapterGradients,
    AdapterWeight,
    LinearInput,
    LinearWeight,
    Operand,
    OutputGradient,
)
from isobit.kernels.triton import int8_backward
from isobit.kernels.triton.dispatch import Dispatch
from isobit.kernels.triton.int8_backward import Unbalanced
from isobit.kernels.triton.products import Products
from isobit.kernels.triton.quantise import (
    QuantRows,
    quantise_gradient,
    quantise_int8,
    quantise_rows,
)
from isobit.kernels.triton.token_groups import gradient_both, quantise_both, quantise_tokens
from isobit.kernels.triton.transpose import transpose_blocks, transposed_weight
from isobit.precision.flow import Site
from isobit.precision.quant_tensor import Int8Parts, Int8Rows, QuantTensor

# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportIndexIssue=false
# pyright: reportArgumentType=false, reportOperatorIssue=false
# (Triton's types know neither launch options nor what a kernel computes with)


def linear_input(
    x: torch.Tensor, site: Site, save: bool = False, as_bytes: bool = False
) -> LinearInput:
    """x BF16 [T, K]: in 1x128 groups, in INT8 or as it is; saved in groups of 128 tokens or as it
    is.
    """
    if site.forward == "int8":
        return LinearInput(quantise_int8(x), input_saved(x, site, as_bytes) if save else None)
    if save and site.wgrad == "e4m3":
        return LinearInput(*quantise_both(x, site.scales, as_bytes))
    read = quantise_rows(x, site.scales, as_bytes) if site.forward == "e4m3" else x
    return LinearInput(read, x if save else None)


def joined_rows(values: torch.Tensor, scales: torch.Tensor) -> QuantRows:
    """E4M3 values [T, K] and FP32 scales, a row a group, [ceil(K / 128), T]."""
    tokens = len(values)
    padding = -tokens % 4
    rows = F.pad(scales, (0, padding)) if padding else scales
    return QuantRows(values, rows.t()[:tokens])


def input_saved(x: torch.Tensor, site: Site, as_bytes: bool = False) -> Operand:
    """x BF16 [T, K] as WGrad reads it."""
    return quantise_tokens(x, site.scales, as_bytes) if site.wgrad == "e4m3" else x


def output_gradient(dy: torch.Tensor, site: Site, as_bytes: bool = False) -> OutputGradient:
    """dY BF16 [T, N] as DGrad and WGrad read it."""
    parts = site.parts or (dy.shape[1],)
    if site.dgrad == "int8":
        return of_int8_rows(dy, *int8_backward.quantise_parts(dy, parts), site, as_bytes)
    if site.dgrad != "e4m3":
        return OutputGradient(dy, dy)
    if site.wgrad != "e4m3":
        return OutputGradient(quantise_gradient(dy, parts, site.scales, as_bytes), dy)
    return OutputGradient(*gradient_both(dy, parts, site.scales, as_bytes))


def of_int8_rows(
    dy: torch.Tensor, rows: Int8Parts, amax: torch.Tensor, site: Site, as_bytes: bool = False
) -> OutputGradient:
    """dY in BF16, as DGrad reads it, and the bits of the largest numbers, int32 [parts, T]."""
    if site.wgrad == "int8":
        return OutputGradient(rows, Unbalanced(dy, amax))
    return OutputGradient(rows, input_saved(dy, site, as_bytes))


def linear(products: type[Products], x: Operand, weight: LinearWeight) -> torch.Tensor:
    """[T, K] -> BF16 [T, N]."""
    if isinstance(x, Int8Rows):
        assert isinstance(weight.matrix, Int8Rows)
        return products.int8_gemm_nt(x, weight.matrix)
    if isinstance(x, QuantRows):
        assert isinstance(weight.matrix, QuantTensor)
        return products.fp8_gemm_nt(x, weight.matrix, weight.site.scales)
    assert isinstance(x, torch.Tensor)
    assert isinstance(weight.matrix, torch.Tensor)
    return products.bf16_gemm_nt(x, weight.matrix)


def dgrad(products: type[Products], dy: Operand, weight: LinearWeight) -> torch.Tensor:
    """dX = dY W, BF16 [T, K]."""
    matrix, scales = weight.matrix, weight.site.scales
    if isinstance(dy, Int8Parts):
        assert isinstance(matrix, Int8Rows)
        return products.int8_dgrad(dy, int8_backward.transposed_parts(matrix, dy.parts))
    if isinstance(dy, QuantRows):
        if isinstance(matrix, Int8Rows):
            parts = weight.site.parts or (len(matrix.values),)
            turned = transposed_weight(matrix, parts, scales, products.as_bytes)
        else:
            assert isinstance(matrix, QuantTensor)
            turned = transpose_blocks(matrix)
        return products.fp8_gemm_nt(dy, turned, scales)
    assert isinstance(dy, torch.Tensor)
    assert isinstance(matrix, torch.Tensor)
    return products.bf16_gemm_nn(dy, matrix)


def wgrad(
    products: type[Products],
    dy: Operand,
    x: Operand,
    grad: torch.Tensor,
    site: Site,
    dispatch: Dispatch | None = None,
) -> None:
    """grad, FP32 [N, K], += dY^T X; or [E N, K], of each expert's rows, which ``dispatch`` has
    padded with zeros to whole groups of 128.
    """
    starts = None if dispatch is None else dispatch.starts
    if isinstance(x, QuantRows):
        assert isinstance(dy, QuantRows)
        products.fp8_gemm_tn(dy, x, grad, starts=starts)
        return
    assert isinstance(x, torch.Tensor)
    if not len(x):
        return
    tokens = len(x) if dispatch is None else len(dispatch.places)
    if site.wgrad_of(tokens) == "int8":
        sides = int8_backward.balanced_rows(Unbalanced.of(dy), x, dispatch)
        products.int8_wgrad(*sides, grad, dispatch)
        return
    wide = dy.values if isinstance(dy, Unbalanced) else dy
    assert isinstance(wide, torch.Tensor)
    products.bf16_gemm_tn(wide, x, grad, starts=starts)


_ROWS = tl.constexpr(64)  # of x and y, of a program: those of one instruction
_DEPTH = tl.constexpr(128)  # of x, of a step
_COLUMNS = tl.constexpr(64)  # of y, of a program: 128, and several tiles in turn, are slower (H200)
_AT_ONCE = tl.constexpr(512)  # numbers of t that one program sums: 16 bytes a thread and part
_READ = 12 << 20  # bytes that come from the L2 cache while one more kernel starts: 2 to 3 us (H200)


@triton.jit
def _next_begins(OVERLAPS: tl.constexpr):
    if OVERLAPS:  # never in Triton's interpreter, which lacks both instructions
        gdc_launch_dependents()


@triton.jit
def _wait_for_last(OVERLAPS: tl.constexpr):
    """Wait until the kernel before has ended and what it wrote can be read."""
    if OVERLAPS:
        gdc_wait()


@triton.jit(do_not_specialize=["m"])
def _low_kernel(
    X, A, OUT, m,
    K: tl.constexpr, R: tl.constexpr, WIDTH: tl.constexpr, PART: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    """One program 64 rows, WIDTH of the R columns, and PART of K: OUT is FP32 [parts, m, R]."""
    _next_begins(OVERLAPS)
    row = tl.program_id(0) * _ROWS + tl.arange(0, _ROWS)
    part = tl.program_id(1)
    column = tl.program_id(2) * WIDTH + tl.arange(0, WIDTH)
    depth = part * PART + tl.arange(0, _DEPTH)
    x_row = (row % m).to(tl.int64)  # rows and columns beyond the matrices are not stored
    acc = tl.zeros([_ROWS, WIDTH], tl.float32)
    for first in range(0, PART, _DEPTH):
        k = first + depth
        x = tl.load(X + x_row[:, None] * K + k[None, :], mask=(k < K)[None, :], other=0.0)
        a = tl.load(A + (column % R)[None, :] * K + k[:, None], mask=(k < K)[:, None], other=0.0)
        acc = tl.dot(x, a, acc)
    place = OUT + (part.to(tl.int64) * m + row[:, None]) * R + column[None, :]
    tl.store(place, acc, mask=(row < m)[:, None] & (column < R)[None, :])


@triton.jit
def _summed(LOW, place, inside, step, scale, PARTS: tl.constexpr):
    """t: the sum of the parts, which are ``step`` numbers apart, in ascending order; rounded, times
    the scale, rounded.
    """
    total = tl.load(LOW + place, mask=inside, other=0.0)
    for part in tl.static_range(1, PARTS):
        total += tl.load(LOW + part * step + place, mask=inside, other=0.0)
    return (total.to(tl.bfloat16).to(tl.float32) * scale).to(tl.bfloat16)


@triton.jit(do_not_specialize=["m", "scale"])
def _sum_kernel(
    LOW, OUT, m, scale,
    R: tl.constexpr, PARTS: tl.constexpr, OVERLAPS: tl.constexpr, FOLLOWED: tl.constexpr,
):  # fmt: skip
    """t [m, R] of the parts; FOLLOWED by the kernel that adds to y, which may begin early."""
    _next_begins(OVERLAPS and FOLLOWED)
    _wait_for_last(OVERLAPS)
    place = tl.program_id(0).to(tl.int64) * _AT_ONCE + tl.arange(0, _AT_ONCE)
    size = m.to(tl.int64) * R
    inside = place < size
    tl.store(OUT + place, _summed(LOW, place, inside, size, scale, PARTS), mask=inside)


@triton.jit(do_not_specialize=["m", "y_stride", "scale"])
def _up_kernel(
    LOW, B, Y, m, y_stride, scale,
    RANK: tl.constexpr, DEPTH: tl.constexpr, TARGETS: tl.constexpr, PARTS: tl.constexpr,
    BEGIN_0: tl.constexpr, SIZE_0: tl.constexpr, BEGIN_1: tl.constexpr, SIZE_1: tl.constexpr,
    BEGIN_2: tl.constexpr, SIZE_2: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """One program 64 rows and 64 columns of one of up to three targets, whose columns of Y begin at
    BEGIN_i; t is summed here of PARTS, or is there, with 0.
    """
    row = tl.program_id(1) * _ROWS + tl.arange(0, _ROWS)
    tile = tl.program_id(0)
    tiles_0: tl.constexpr = (SIZE_0 + _COLUMNS - 1) // _COLUMNS
    tiles_1: tl.constexpr = (SIZE_1 + _COLUMNS - 1) // _COLUMNS
    target, begin, size, b_row = 0, BEGIN_0, SIZE_0, 0
    if tile >= tiles_0 + tiles_1:
        target, begin, size, b_row = 2, BEGIN_2, SIZE_2, SIZE_0 + SIZE_1
        tile -= tiles_0 + tiles_1
    elif tile >= tiles_0:
        target, begin, size, b_row = 1, BEGIN_1, SIZE_1, SIZE_0
        tile -= tiles_0
    column = tile * _COLUMNS + tl.arange(0, _COLUMNS)
    low = tl.arange(0, DEPTH)
    written = (row < m)[:, None]
    kept = written & (column < size)[None, :]
    ranked = low < RANK
    # What is read of y and B is on its way while x A^T and t are made.
    y_place = Y + row.to(tl.int64)[:, None] * y_stride + (begin + column)[None, :]
    y = tl.load(y_place, mask=kept, other=0.0)
    b_place = (b_row + column)[None, :] * RANK + low[:, None]
    b = tl.load(B + b_place, mask=(column < size)[None, :] & ranked[:, None], other=0.0)
    stride: tl.constexpr = TARGETS * RANK
    place = row.to(tl.int64)[:, None] * stride + target * RANK + low[None, :]
    inside = written & ranked[None, :]
    _wait_for_last(OVERLAPS)
    if PARTS:
        t = _summed(LOW, place, inside, m.to(tl.int64) * stride, scale, PARTS)
    else:
        t = tl.load(LOW + place, mask=inside, other=0.0)
    added = tl.dot(t, b).to(tl.bfloat16).to(tl.float32)
    tl.store(y_place, (y.to(tl.float32) + added).to(tl.bfloat16), mask=kept)


def _low_parts(x: torch.Tensor, adapter: AdapterWeight, overlaps: bool) -> torch.Tensor:
    """x BF16 [T, K], contiguous -> x A^T in parts of K, FP32 [parts, T, R]. K is cut by its size
    alone, so a row has the same bits in every batch, and a few tokens keep the whole card busy.
    """
    a = adapter.down.matrix
    assert isinstance(a, torch.Tensor)
    assert x.dtype == a.dtype == torch.bfloat16
    assert x.is_contiguous()
    assert a.is_contiguous()
    (m, k), r = x.shape, a.shape[0]
    part = 4 * _DEPTH.value
    while part * ADAPTER_PARTS < k:
        part *= 2
    width = min(128, max(16, triton.next_power_of_2(r)))
    parts = triton.cdiv(k, part)
    out = torch.empty((parts, m, r), dtype=torch.float32, device=x.device)
    grid = (triton.cdiv(m, _ROWS.value), parts, triton.cdiv(r, width))
    _low_kernel[grid](
        x, a, out, m, k, r, width, part, overlaps,
        num_warps=4, num_stages=3, enable_fp_fusion=False,
    )  # fmt: skip
    return out


def _low(parts: torch.Tensor, scale: float, followed: bool, overlaps: bool) -> torch.Tensor:
    count, m, r = parts.shape
    out = torch.empty((m, r), dtype=torch.bfloat16, device=parts.device)
    grid = (triton.cdiv(m * r, _AT_ONCE.value),)
    _sum_kernel[grid](
        parts, out, m, scale, r, count, overlaps, followed,
        num_warps=4, enable_fp_fusion=False, launch_pdl=overlaps,
    )  # fmt: skip
    return out


def adapter_low(products: type[Products], x: torch.Tensor, adapter: AdapterWeight) -> torch.Tensor:
    """x BF16 [T, K] -> t of all targets, side by side, BF16 [T, R]."""
    overlaps = products.overlaps
    return _low(_low_parts(x, adapter, overlaps), adapter.scale, False, overlaps)


def add_adapter(
    products: type[Products],
    y: torch.Tensor,
    x: torch.Tensor,
    adapter: AdapterWeight,
    save: bool = False,
) -> torch.Tensor | None:
    """x BF16 [T, K], y BF16 [T, N]: two kernels where t is summed by the programs that add to y,
    else three.  t has the same bits either way.
    """
    overlaps, b, m = products.overlaps, adapter.up.matrix, len(x)
    low = _low_parts(x, adapter, overlaps)
    assert isinstance(b, torch.Tensor)
    assert b.is_contiguous()
    assert y.stride(1) == 1
    assert 0 < len(adapter.columns) <= 3, "a linear fuses at most three matrices"
    places = [(one.start, one.stop - one.start) for one in adapter.columns]
    tiles = sum(triton.cdiv(size, _COLUMNS.value) for _, size in places)
    places += [(0, 0)] * (3 - len(places))
    parts = len(low)
    if save or _sums_first(m, tiles, parts, adapter.rank):
        low, parts = _low(low, adapter.scale, True, overlaps), 0
    depth = max(16, triton.next_power_of_2(adapter.rank))
    # Neighbours share rows of y, whose pages of memory they read and write together.
    _up_kernel[tiles, triton.cdiv(m, _ROWS.value)](
        low, b, y, m, y.stride(0), adapter.scale,
        adapter.rank, depth, len(adapter.columns), parts, *(one for pair in places for one in pair),
        overlaps, num_warps=4, enable_fp_fusion=False, launch_pdl=overlaps,
    )  # fmt: skip
    return None if parts else low


def _sums_first(m: int, tiles: int, parts: int, rank: int) -> bool:
    """Whether a kernel of its own sums the parts of m rows: without it, the program of each tile
    of y reads all parts of its rows and target, which many tiles make more than a launch costs.
    """
    return 4 * m * tiles * parts * rank > _READ


def adapter_backward(
    products: type[Products],
    dy: torch.Tensor,
    x: torch.Tensor,
    low: torch.Tensor,
    dx: torch.Tensor,
    adapter: AdapterWeight,
    grads: AdapterGradients,
) -> None:
    """All BF16 but the gradients; dX is read and written once.  A pass over the layers is limited
    by what the host launches, so nothing but products is launched here.
    """
    a, b, scale = adapter.down.matrix, adapter.up.matrix, adapter.scale
    assert isinstance(a, torch.Tensor)
    assert isinstance(b, torch.Tensor)
    d_low = torch.empty_like(low)
    for place, columns, rows in adapter.targets():
        d = dy[:, columns]
        products.bf16_gemm_tn(d, low[:, place], grads.up[rows])
        torch.mm(d, b[rows], out=d_low[:, place])
    products.bf16_gemm_tn(d_low, x, grads.down, scale)
    dx.addmm_(d_low, a, alpha=scale)
