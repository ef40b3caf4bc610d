"""The linear layer on Hopper: its three products, of operands of ``isobit.kernels.triton.linear``,
and adapters.

    FProp   Y   = X W^T       ``isobit.kernels.hopper.gemm`` and ``int8``
    DGrad   dX  = dY W
    WGrad   dW += dY^T X
            dW[n, k] += sum over token groups t of
                            (sum_j dY^T[n, tj] X^T[k, tj]) * scale_y[n, t] * scale_x[k, t]

LoRA's products are narrow: x A^T has a few dozen columns, and a library's tile of a decode step
would go through all of K on four multiprocessors.  K is cut into parts here, at fixed places, whose
FP32 sums are added in ascending order, and what is added to y is made where it is added.  Its two
or three kernels take 2 to 5 us each in a decode step on an H200, so each begins while the one
before still runs (programmatic dependent launch):

    x A^T       begins when all before has ended, the linear's own product among it, and lets the
                next kernel begin at once
    sum         waits until x A^T has ended, before it reads its parts or writes
    t B^T       loads its tiles of y and B, which were complete before x A^T began; then waits until
                the kernel before it has ended, hence both, before it reads t or writes y

What follows is launched in order, and begins when the last of them has ended.  All programs of the
latter two wait, so each kernel ends after those before it, and memory that is free again then has
no reader left.

FP8 tensor cores read both operands along the contraction, so W is transposed here, a layer at a
time, rather than stored twice.  Each WGrad adds one finished sum to every element of the master's
FP32 gradient.  No bit of the backward has to agree with a rollout, so cuBLAS may choose its
algorithm; every result repeats at fixed shapes.

The Triton WGrad in E4M3 stands in for DeepGEMM's where that is missing, with the same bits where
scales are powers of two.  Tensor cores hold a token group's product in 14 bits, so each is scaled
and added in FP32, in the order of the groups.  The two operations an element that this takes, not
the tensor cores, limit the kernel.  A program holds 256 x 128 sums in two warpgroups of 128 rows,
all that the registers have space for, and each computes the product of 64 rows at a time.  One more
warp copies the tiles of token groups into a ring of buffers: `full` signals that they have arrived,
`empty` that both warpgroups have read them.
"""

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.language.nvidia.hopper.tma import (
    async_copy_global_to_shared as copy_tile,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from isobit.kernels.hopper import int8_backward
from isobit.kernels.hopper.gemm import (
    BackEnd,
    bf16_gemm_nt,
    call_deep_gemm,
    deep_gemm_or_triton,
    fp8_gemm_nt,
)
from isobit.kernels.hopper.int8 import int8_gemm_nt
from isobit.kernels.operands import (
    ADAPTER_PARTS,
    AdapterGradients,
    AdapterWeight,
    LinearWeight,
    Operand,
)
from isobit.kernels.triton.int8_backward import Unbalanced, balanced_rows, transposed_parts
from isobit.kernels.triton.quantise import QuantRows
from isobit.kernels.triton.transpose import transpose_blocks, transposed_weight
from isobit.precision.flow import Site
from isobit.precision.quant_tensor import BLOCK as WHOLE_BLOCK
from isobit.precision.quant_tensor import Int8Parts, Int8Rows, QuantTensor, ScaleKind

# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportIndexIssue=false
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportOperatorIssue=false
# pyright: reportAssignmentType=false
# (Triton's types know neither launch options nor what a kernel computes with)


def fp8_gemm_nn(dy: QuantRows, weight: QuantTensor, scales: ScaleKind) -> torch.Tensor:
    """dY in 1x128 groups, padded as W's parts, W [N, K] in 128x128 blocks -> dX = dY W, BF16."""
    return fp8_gemm_nt(dy, transpose_blocks(weight), scales)


def bf16_gemm_nn(dy: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """dY [M, N], W [N, K], both BF16 -> dX = dY W, BF16 [M, K]."""
    return torch.mm(dy, weight)


ROWS = gl.constexpr(256)  # of A, of a program
PART = gl.constexpr(64)  # of them, of a product: two of each warpgroup
BLOCK = gl.constexpr(128)  # rows of B, and tokens of a group
STAGES = 4  # buffers
NEIGHBOURS = gl.constexpr(8)  # consecutive programs that share B
SWIZZLED = gl.NVMMASharedLayout(128, 8, rank=2)  # E4M3 tiles, as the tensor cores read them
FLAT = gl.NVMMASharedLayout(0, 32, rank=1)  # FP32 vectors
SUMS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 32]))


@gluon.jit
def _add_product(sums, a, b, a_scale, b_scale):
    """sums += A B^T of one token group and PART rows, times the scales."""
    product = gl.zeros([PART, BLOCK], gl.float32, SUMS)
    product = warpgroup_mma(a, b.permute((1, 0)), product, use_acc=False, is_async=True)
    row = a_scale.load(gl.SliceLayout(1, SUMS))  # while the product is made
    product = warpgroup_mma_wait(0, deps=[product])
    column = b_scale.load(gl.SliceLayout(0, SUMS))  # not before: 32 registers
    return sums + product * row[:, None] * column[None, :]


@gluon.jit
def _consumer(
    a_smem, b_smem, a_scales, b_scales, full, empty, GRAD, first_row, first_column, groups,
    N: gl.constexpr, K: gl.constexpr, WHICH: gl.constexpr,
):  # fmt: skip
    """One warpgroup: rows 2 WHICH PART to 2 PART more of the program's, and all of its columns.

    Registers hold the FP32 sums, one matrix for each PART of rows, and one PART's product.
    """
    STAGES: gl.constexpr = b_smem.shape[0]
    upper = gl.zeros([PART, BLOCK], gl.float32, SUMS)
    lower = gl.zeros([PART, BLOCK], gl.float32, SUMS)
    for group in range(groups):
        # The phase of a buffer is the parity of how often it was filled before.
        stage = group % STAGES
        mbarrier.wait(full.index(stage), group // STAGES & 1)
        b = b_smem.index(stage)
        a_scale = a_scales.index(stage)
        b_scale = b_scales.index(stage)
        upper = _add_product(
            upper, a_smem.index(stage * 4 + 2 * WHICH), b, a_scale.slice(2 * WHICH * PART, PART),
            b_scale,
        )  # fmt: skip
        lower = _add_product(
            lower, a_smem.index(stage * 4 + 2 * WHICH + 1), b,
            a_scale.slice((2 * WHICH + 1) * PART, PART), b_scale,
        )  # fmt: skip

        mbarrier.arrive(empty.index(stage))

    column = first_column + gl.arange(0, BLOCK, gl.SliceLayout(0, SUMS))
    row = first_row + 2 * WHICH * PART + gl.arange(0, PART, gl.SliceLayout(1, SUMS))
    at = row.to(gl.int64)[:, None] * K + column[None, :]
    inside = (row < N)[:, None]
    below = inside
    if N % BLOCK:  # else both parts of a warpgroup are there or neither
        below = (row + PART < N)[:, None]
    if K % BLOCK:
        inside = inside & (column < K)[None, :]
        below = below & (column < K)[None, :]
    gl.store(GRAD + at, gl.load(GRAD + at, mask=inside) + upper, mask=inside)
    at += PART * K
    gl.store(GRAD + at, gl.load(GRAD + at, mask=below) + lower, mask=below)


@gluon.jit
def _producer(
    a_desc, b_desc, a_scale_desc, b_scale_desc, a_smem, b_smem, a_scales, b_scales, full, empty,
    first_row, first_column, rows, K, first_group, groups,
):  # fmt: skip
    """The warp that copies both operands and their scales, a token group at a time.

    Scales are read as vectors [groups * rows].  In a tile that exceeds the matrix, rows beyond it
    are zeros and their scales arbitrary: they are computed and not stored.
    """
    STAGES: gl.constexpr = b_smem.shape[0]
    for group in range(groups):
        stage = group % STAGES
        mbarrier.wait(empty.index(stage), (group // STAGES & 1) ^ 1)  # at once in the first round
        bar = full.index(stage)
        mbarrier.expect(bar, (ROWS + BLOCK) * (BLOCK + 4))  # bytes: rows of E4M3 and an FP32 scale
        for part in gl.static_range(4):
            copy_tile(
                a_desc,
                [first_row + part * PART, (first_group + group) * BLOCK],
                bar,
                a_smem.index(stage * 4 + part),
            )
        copy_tile(b_desc, [first_column, (first_group + group) * BLOCK], bar, b_smem.index(stage))
        copy_tile(
            a_scale_desc, [(first_group + group) * rows + first_row], bar, a_scales.index(stage)
        )
        copy_tile(
            b_scale_desc, [(first_group + group) * K + first_column], bar, b_scales.index(stage)
        )


@gluon.jit(do_not_specialize=["groups"])
def _wgrad_kernel(
    a_desc, b_desc, a_scale_desc, b_scale_desc, GRAD, STARTS, groups,
    N: gl.constexpr, K: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """One program ROWS x BLOCK numbers of grad, or with STARTS of one expert's, from the groups
    [STARTS[e], STARTS[e + 1]).

    Shared memory: the ring, of A in parts of PART rows (part p of buffer s is s * 4 + p), of B, and
    of both scales.
    """
    # Bands of NEIGHBOURS tile rows are walked column by column: consecutive programs share B's
    # columns in the L2 cache.  The last band may be lower.
    tiles: gl.constexpr = (N + ROWS - 1) // ROWS
    across: gl.constexpr = (K + BLOCK - 1) // BLOCK
    pid = gl.program_id(0)
    first_group = 0
    if STARTS is not None:
        expert = pid // (tiles * across)
        pid = pid % (tiles * across)
        first_group = gl.load(STARTS + expert)
        groups = gl.load(STARTS + expert + 1) - first_group
        GRAD += expert.to(gl.int64) * N * K
    first_tile = pid // (NEIGHBOURS * across) * NEIGHBOURS
    height = min(tiles - first_tile, NEIGHBOURS)
    within = pid % (NEIGHBOURS * across)
    first_row = (first_tile + within % height) * ROWS
    first_column = within // height * BLOCK
    a_smem = gl.allocate_shared_memory(gl.float8e4nv, [STAGES * 4, PART, BLOCK], a_desc.layout)
    b_smem = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, BLOCK, BLOCK], b_desc.layout)
    a_scales = gl.allocate_shared_memory(gl.float32, [STAGES, ROWS], a_scale_desc.layout)
    b_scales = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK], b_scale_desc.layout)
    # `full` takes the producer's arrival and its bytes, `empty` one arrival from each warpgroup.
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)

    # Three roles: the program's own 4 warps, 4 more, and one that only issues copies.
    gl.warp_specialize(
        [
            (_consumer, (a_smem, b_smem, a_scales, b_scales, full, empty, GRAD, first_row,
            first_column, groups, N, K, 0)),
            (_consumer, (a_smem, b_smem, a_scales, b_scales, full, empty, GRAD, first_row,
            first_column, groups, N, K, 1)),
            (
                _producer,
                (
                    a_desc, b_desc, a_scale_desc, b_scale_desc, a_smem, b_smem, a_scales, b_scales,
                    full, empty,
                    first_row, first_column, N, K, first_group, groups,
                ),
            ),
        ],
        [4, 1],
        [232, 40],  # registers of a thread; the first group's are what is left, 232
    )  # fmt: skip


def triton_fp8_gemm_tn(
    dy_t: QuantRows, x_t: QuantRows, grad: torch.Tensor, starts: torch.Tensor | None = None
) -> None:
    """grad, FP32 [N, K], contiguous, += dY^T X, from dY^T [N, Tp] and X^T [K, Tp] in groups of 128
    tokens; N and K are multiples of 8, for the copy engine.

    With ``starts``, int32 [E + 1], grad is [E N, K], and expert e has the groups [starts[e],
    starts[e + 1]).
    """
    (n, tokens), k = dy_t.values.shape, x_t.values.shape[0]
    assert grad.dtype == torch.float32
    assert grad.is_contiguous()
    experts = 1 if starts is None else starts.shape[0] - 1
    assert grad.shape == (experts * n, k)
    a, b = (
        TensorDescriptor.from_tensor(x.values, [rows, BLOCK.value], SWIZZLED)
        for x, rows in ((dy_t, PART.value), (x_t, BLOCK.value))
    )
    a_scales, b_scales = (
        TensorDescriptor.from_tensor(x.scales.t().view(-1), [rows], FLAT)
        for x, rows in ((dy_t, ROWS.value), (x_t, BLOCK.value))
    )
    grid = (experts * triton.cdiv(n, ROWS.value) * triton.cdiv(k, BLOCK.value),)
    _wgrad_kernel[grid](
        a, b, a_scales, b_scales, grad, starts, tokens // BLOCK.value, n, k, STAGES, num_warps=4
    )


def fp8_gemm_tn(
    dy_t: QuantRows, x_t: QuantRows, grad: torch.Tensor, back_end: BackEnd | None = None
) -> None:
    """grad, FP32 [N, K], contiguous, += dY^T X, of dY^T [N, Tp] and X^T [K, Tp] in token groups."""
    assert grad.dtype == torch.float32
    assert grad.is_contiguous()
    assert grad.shape == (dy_t.values.shape[0], x_t.values.shape[0])
    if (back_end or deep_gemm_or_triton()) == "triton":
        triton_fp8_gemm_tn(dy_t, x_t, grad)
        return
    left, right = (dy_t.values, dy_t.scales), (x_t.values, x_t.scales)
    call_deep_gemm("fp8_gemm_nt", left, right, grad, c=grad, recipe=(1, 1, WHOLE_BLOCK))


def bf16_gemm_tn(dy: torch.Tensor, x: torch.Tensor, grad: torch.Tensor, scale: float = 1.0) -> None:
    """grad, FP32 [N, K], += scale dY^T X, of dY [T, N] and X [T, K], BF16; never rounded to
    BF16.
    """
    torch.addmm(grad, dy.t(), x, out_dtype=torch.float32, alpha=scale, out=grad)


def linear(x: Operand, weight: LinearWeight) -> torch.Tensor:
    """[T, K] -> BF16 [T, N]."""
    if isinstance(x, Int8Rows):
        assert isinstance(weight.matrix, Int8Rows)
        return int8_gemm_nt(x, weight.matrix)
    if isinstance(x, QuantRows):
        assert isinstance(weight.matrix, QuantTensor)
        return fp8_gemm_nt(x, weight.matrix, weight.site.scales)
    assert isinstance(x, torch.Tensor)
    assert isinstance(weight.matrix, torch.Tensor)
    return bf16_gemm_nt(x, weight.matrix)


_ROWS = tl.constexpr(64)  # of x and y, of a program: those of one instruction
_DEPTH = tl.constexpr(128)  # of x, of a step
_COLUMNS = tl.constexpr(64)  # of y, of a program: 128, and several tiles in turn, are slower (H200)
_AT_ONCE = tl.constexpr(512)  # numbers of t that one program sums: 16 bytes a thread and part
_OVERLAPS = True  # whether these kernels begin early; no bit depends on it
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


def _low_parts(x: torch.Tensor, adapter: AdapterWeight) -> torch.Tensor:
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
        x, a, out, m, k, r, width, part, _overlaps(x),
        num_warps=4, num_stages=3, enable_fp_fusion=False,
    )  # fmt: skip
    return out


def _overlaps(x: torch.Tensor) -> bool:
    return _OVERLAPS and x.is_cuda


def _low(parts: torch.Tensor, scale: float, followed: bool) -> torch.Tensor:
    count, m, r = parts.shape
    out = torch.empty((m, r), dtype=torch.bfloat16, device=parts.device)
    grid = (triton.cdiv(m * r, _AT_ONCE.value),)
    overlaps = _overlaps(parts)
    _sum_kernel[grid](
        parts, out, m, scale, r, count, overlaps, followed,
        num_warps=4, enable_fp_fusion=False, launch_pdl=overlaps,
    )  # fmt: skip
    return out


def adapter_low(x: torch.Tensor, adapter: AdapterWeight) -> torch.Tensor:
    """x BF16 [T, K] -> t of all targets, side by side, BF16 [T, R]."""
    return _low(_low_parts(x, adapter), adapter.scale, followed=False)


def add_adapter(
    y: torch.Tensor, x: torch.Tensor, adapter: AdapterWeight, save: bool = False
) -> torch.Tensor | None:
    """x BF16 [T, K], y BF16 [T, N]: two kernels where t is summed by the programs that add to y,
    else three.  t has the same bits either way.
    """
    low, b, m = _low_parts(x, adapter), adapter.up.matrix, len(x)
    assert isinstance(b, torch.Tensor)
    assert b.is_contiguous()
    assert y.stride(1) == 1
    assert 0 < len(adapter.columns) <= 3, "a linear fuses at most three matrices"
    places = [(one.start, one.stop - one.start) for one in adapter.columns]
    tiles = sum(triton.cdiv(size, _COLUMNS.value) for _, size in places)
    places += [(0, 0)] * (3 - len(places))
    parts = len(low)
    if save or _sums_first(m, tiles, parts, adapter.rank):
        low, parts = _low(low, adapter.scale, followed=True), 0
    depth, overlaps = max(16, triton.next_power_of_2(adapter.rank)), _overlaps(x)
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
        bf16_gemm_tn(d, low[:, place], grads.up[rows])
        torch.mm(d, b[rows], out=d_low[:, place])
    bf16_gemm_tn(d_low, x, grads.down, scale)
    dx.addmm_(d_low, a, alpha=scale)


def dgrad(dy: Operand, weight: LinearWeight) -> torch.Tensor:
    """dX = dY W, BF16 [T, K]."""
    if isinstance(dy, Int8Parts):
        assert isinstance(weight.matrix, Int8Rows)
        return int8_backward.dgrad(dy, transposed_parts(weight.matrix, dy.parts))
    if isinstance(weight.matrix, Int8Rows):
        assert isinstance(dy, QuantRows)
        parts, scales = weight.site.parts or (len(weight.matrix.values),), weight.site.scales
        return fp8_gemm_nt(dy, transposed_weight(weight.matrix, parts, scales), scales)
    if isinstance(weight.matrix, QuantTensor):
        assert isinstance(dy, QuantRows)
        return fp8_gemm_nn(dy, weight.matrix, weight.site.scales)
    assert isinstance(dy, torch.Tensor)
    assert isinstance(weight.matrix, torch.Tensor)
    return bf16_gemm_nn(dy, weight.matrix)


def wgrad(dy: Operand, x: Operand, grad: torch.Tensor, site: Site) -> None:
    """grad, FP32 [N, K], += dY^T X."""
    if isinstance(x, QuantRows):
        assert isinstance(dy, QuantRows)
        fp8_gemm_tn(dy, x, grad)
        return
    assert isinstance(x, torch.Tensor)
    if not len(x):
        return
    if site.wgrad_of(len(x)) == "int8":
        int8_backward.wgrad(*balanced_rows(Unbalanced.of(dy), x), grad)
        return
    wide = dy.values if isinstance(dy, Unbalanced) else dy
    assert isinstance(wide, torch.Tensor)
    bf16_gemm_tn(wide, x, grad)
