"""WGrad on Hopper: dW += dY^T X, in E4M3 and in BF16.

    dW[n, k] += sum over token groups t of
                    (sum_j dY^T[n, tj] X^T[k, tj]) * scale_y[n, t] * scale_x[k, t]

It adds one finished sum to every element of the master's FP32 gradient.  No bit of the backward has
to agree with a rollout, so cuBLAS may choose its algorithm; every result repeats at fixed shapes.

The Triton WGrad in E4M3 stands in for DeepGEMM's where that is missing, with the same bits where
scales are powers of two, and is that of experts.  Tensor cores hold a token group's product in 14
bits, so each is scaled and added in FP32, in the order of the groups.  The two operations an
element that this takes, not the tensor cores, limit the kernel.  A program holds 256 x 128 sums in
two warpgroups of 128 rows, all that the registers have space for, and each computes the product of
64 rows at a time.  One more warp copies the tiles of token groups into a ring of buffers: `full`
signals that they have arrived, `empty` that both warpgroups have read them.
"""

import torch
import triton
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

from isobit.kernels.hopper.gemm import BackEnd, call_deep_gemm, deep_gemm_or_triton
from isobit.kernels.triton import wgrad
from isobit.kernels.triton.quantise import QuantRows
from isobit.precision.quant_tensor import BLOCK as WHOLE_BLOCK

# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportIndexIssue=false
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportOperatorIssue=false
# pyright: reportAssignmentType=false
# (Triton's types know neither launch options nor what a kernel computes with)


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
    dy: QuantRows,
    x: QuantRows,
    grad: torch.Tensor,
    back_end: BackEnd | None = None,
    starts: torch.Tensor | None = None,
) -> None:
    """grad, FP32 [N, K], contiguous, += dY^T X, of dY^T [N, Tp] and X^T [K, Tp] in token groups;
    with ``starts`` of experts, as above.
    """
    if starts is not None or (back_end or deep_gemm_or_triton()) == "triton":
        triton_fp8_gemm_tn(dy, x, grad, starts)
        return
    assert grad.dtype == torch.float32
    assert grad.is_contiguous()
    assert grad.shape == (dy.values.shape[0], x.values.shape[0])
    left, right = (dy.values, dy.scales), (x.values, x.scales)
    call_deep_gemm("fp8_gemm_nt", left, right, grad, c=grad, recipe=(1, 1, WHOLE_BLOCK))


def bf16_gemm_tn(
    dy: torch.Tensor,
    x: torch.Tensor,
    grad: torch.Tensor,
    scale: float = 1.0,
    starts: torch.Tensor | None = None,
) -> None:
    """grad, FP32 [N, K], += scale dY^T X, of dY [T, N] and X [T, K], BF16; never rounded to BF16.
    Experts have Triton's (``isobit.kernels.triton.wgrad``).
    """
    if starts is None:
        torch.addmm(grad, dy.t(), x, out_dtype=torch.float32, alpha=scale, out=grad)
    else:
        wgrad.bf16_gemm_tn(dy, x, grad, scale, starts, stages=4)
