"""Where tokens' choices of experts stand when each expert multiplies its own: rows sorted by
expert, and within an expert by token.

A choice is a token and a rank, of T k.  Both layouts have as many rows as there may be, so that the
host reads nothing back:

    contiguous   an expert's rows begin at a multiple of 128; the groups of 128 are the tiles of
                 GEMMs and the token groups of WGrad
    masked       expert e has the rows from e * height on: fewer empty tiles where tokens are few

A token chooses an expert at most once, so a choice's row is its expert's first row plus the number
of earlier tokens that chose that expert.  Counts of blocks of tokens are added up as integers,
without atomics.  Rows behind an expert's last are padding and are not read, except where ``gather``
has zeroed them.
"""

# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportIndexIssue=false
# pyright: reportArgumentType=false, reportReturnType=false
# (Triton's types know neither launch options nor what a kernel computes with)

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from isobit.kernels.operands import Operand
from isobit.kernels.triton.quantise import QuantRows
from isobit.precision.quant_tensor import BLOCK, DTYPES, EIGHT_BITS, Format, Int8Rows, num_blocks

TOKENS = tl.constexpr(64)  # of a block
_COUNTED = tl.constexpr(32)  # blocks that are added up at once
_WIDTH = 1024  # columns of a program


@dataclass(frozen=True, slots=True)
class Dispatch:
    """The rows of T k choices of E experts."""

    places: torch.Tensor  # int32 [T, k]: the row of each choice
    rows: int  # their number, with padding
    counts: torch.Tensor  # int32 [E]: rows of each expert, without padding
    starts: torch.Tensor
    """int32 [E + 1]: groups of 128 rows before each expert, and in all; contiguous layout."""
    experts: torch.Tensor | None
    """int32 [rows], contiguous layout: the expert of each row, -1 for padding."""
    height: int  # rows that lie together: of an expert in the masked layout, else all

    @property
    def is_masked(self) -> bool:
        return self.experts is None


@dataclass(frozen=True, slots=True)
class GroupedRows:
    """An operand in dispatched rows: E4M3 or INT8 values [rows, K] with FP32 scales [rows / height,
    groups, height], in INT8 of one group, or BF16 values without.
    """

    values: torch.Tensor
    scales: torch.Tensor | None

    @classmethod
    def empty(
        cls, dispatch: Dispatch, columns: int, device: torch.device, format: Format
    ) -> "GroupedRows":
        """Uninitialised."""
        values = torch.empty((dispatch.rows, columns), dtype=DTYPES[format], device=device)
        if format not in EIGHT_BITS:
            return cls(values, None)
        groups = 1 if format == "int8" else num_blocks(columns)
        shape = (dispatch.rows // dispatch.height, groups, dispatch.height)
        return cls(values, torch.empty(shape, dtype=torch.float32, device=device))

    def zero_(self) -> "GroupedRows":
        self.values.view(torch.uint8).zero_()
        if self.scales is not None:
            self.scales.zero_()
        return self

    @classmethod
    def of(cls, x: Operand) -> "GroupedRows":
        """Rows of the contiguous layout, from a quantiser or in BF16."""
        if isinstance(x, torch.Tensor):
            return cls(x, None)
        assert isinstance(x, QuantRows)
        return cls(x.values, x.scales.t()[None])


def most_rows(tokens: int, top_k: int, num_experts: int) -> int:
    """Rows of the contiguous layout for the most unequal choice of experts."""
    choices = tokens * top_k
    return (choices + min(num_experts, choices) * (BLOCK - 1)) // BLOCK * BLOCK


@triton.jit
def _chosen(EXPERTS, block, tokens, TOP_K: tl.constexpr, E: tl.constexpr):
    """int32 [TOKENS, E]: 1 where a token of the block chose an expert."""
    token = block * TOKENS + tl.arange(0, TOKENS)
    expert = tl.arange(0, E)
    chosen = tl.zeros([TOKENS, E], tl.int32)
    for rank in range(TOP_K):
        choice = tl.load(EXPERTS + token * TOP_K + rank, mask=token < tokens, other=-1)
        chosen += (choice[:, None] == expert[None, :]).to(tl.int32)
    return chosen


@triton.jit(do_not_specialize=["tokens"])
def _count_kernel(EXPERTS, COUNTS, tokens, TOP_K: tl.constexpr, E: tl.constexpr):
    """One program a block of tokens -> its row of COUNTS [blocks, E]."""
    block = tl.program_id(0)
    counts = tl.sum(_chosen(EXPERTS, block, tokens, TOP_K, E), 0)
    tl.store(COUNTS + block * E + tl.arange(0, E), counts)


@triton.jit(do_not_specialize=["tokens", "blocks", "height"])
def _place_kernel(
    EXPERTS, COUNTS, PLACES, TOTALS, STARTS, tokens, blocks, height,
    NUM_EXPERTS: tl.constexpr, TOP_K: tl.constexpr, E: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """One program a block of tokens."""
    block = tl.program_id(0)
    expert = tl.arange(0, E)
    total = tl.zeros([E], tl.int32)
    before = tl.zeros([E], tl.int32)
    for first in range(0, blocks, _COUNTED):
        other = (first + tl.arange(0, _COUNTED))[:, None]
        counts = tl.load(COUNTS + other * E + expert[None, :], mask=other < blocks, other=0)
        total += tl.sum(counts, 0)
        before += tl.sum(tl.where(other < block, counts, 0), 0)
    groups = (total + 127) // 128
    end = tl.cumsum(groups, 0)
    start = expert * height if MASKED else (end - groups) * 128
    chosen = _chosen(EXPERTS, block, tokens, TOP_K, E)
    place = tl.cumsum(chosen, 0) - chosen + (start + before)[None, :]
    token = block * TOKENS + tl.arange(0, TOKENS)
    for rank in range(TOP_K):
        at = token * TOP_K + rank
        choice = tl.load(EXPERTS + at, mask=token < tokens, other=-1)
        mine = tl.sum(tl.where(choice[:, None] == expert[None, :], place, 0), 1)
        tl.store(PLACES + at, mine, mask=token < tokens)
    if block == 0:
        tl.store(TOTALS + expert, total, mask=expert < NUM_EXPERTS)
        tl.store(STARTS + expert, end - groups, mask=expert < NUM_EXPERTS)
        tl.store(STARTS + NUM_EXPERTS, tl.sum(groups, 0))


@triton.jit
def _label_kernel(TOTALS, STARTS, EXPERTS, NUM_EXPERTS: tl.constexpr, E: tl.constexpr):
    """One program a group of 128 rows: the expert of each, -1 for padding."""
    group = tl.program_id(0)
    each = tl.arange(0, E)
    end = tl.load(STARTS + 1 + each, mask=each < NUM_EXPERTS, other=2147483647)
    expert = tl.sum((end <= group).to(tl.int32), 0)
    is_used = expert < NUM_EXPERTS
    start = tl.load(STARTS + expert, mask=is_used, other=0)
    count = tl.load(TOTALS + expert, mask=is_used, other=0)
    row = tl.arange(0, 128)
    label = tl.where((group - start) * 128 + row < count, expert, -1)
    tl.store(EXPERTS + group * 128 + row, label)


def make_dispatch(experts: torch.Tensor, num_experts: int, height: int | None = None) -> Dispatch:
    """int32 [T, k] -> the rows; masked with a ``height`` >= T, a multiple of 128."""
    tokens, top_k = experts.shape
    device = experts.device
    width, blocks = triton.next_power_of_2(num_experts), triton.cdiv(tokens, TOKENS.value)
    counts = torch.empty((blocks, width), dtype=torch.int32, device=device)
    _count_kernel[(blocks,)](experts, counts, tokens, top_k, width, num_warps=8)
    places = torch.empty_like(experts)
    totals = torch.empty(num_experts, dtype=torch.int32, device=device)
    starts = torch.empty(num_experts + 1, dtype=torch.int32, device=device)
    _place_kernel[(blocks,)](
        experts, counts, places, totals, starts, tokens, blocks, height or 0,
        num_experts, top_k, width, height is not None, num_warps=8,
    )  # fmt: skip
    if height is not None:
        assert height >= tokens
        assert height % BLOCK == 0
        return Dispatch(places, num_experts * height, totals, starts, None, height)
    rows = most_rows(tokens, top_k, num_experts)
    labels = torch.empty(rows, dtype=torch.int32, device=device)
    _label_kernel[(rows // BLOCK,)](totals, starts, labels, num_experts, width, num_warps=4)
    return Dispatch(places, rows, totals, starts, labels, rows)


@triton.jit(do_not_specialize=["scale_stride", "height"])
def _gather_kernel(
    X, SCALES, scale_stride, PLACES, OUT, OUT_SCALES, height,
    C: tl.constexpr, WIDTH: tl.constexpr, TOP_K: tl.constexpr, NUMBER: tl.constexpr,
    GROUPS: tl.constexpr,
):  # fmt: skip
    """One program WIDTH columns of one choice; the first also its scales, GROUPS for NUMBER."""
    choice = tl.program_id(0).to(tl.int64)
    row = tl.load(PLACES + choice).to(tl.int64)
    token = choice // TOP_K
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    x = tl.load(X + token * C + column, mask=column < C)
    tl.store(OUT + row * C + column, x, mask=column < C)
    if SCALES is not None:
        group = tl.arange(0, GROUPS)
        inside = (group < NUMBER) & (tl.program_id(1) == 0)
        scales = tl.load(SCALES + group * scale_stride + token, mask=inside)
        place = OUT_SCALES + row // height * NUMBER * height + row % height
        tl.store(place + group.to(tl.int64) * height, scales, mask=inside)


def gather(x: Operand, dispatch: Dispatch, pads: bool = False) -> GroupedRows:
    """x [T, C] -> the rows of the tokens' choices; padding is zeros with ``pads``."""
    values = x if isinstance(x, torch.Tensor) else x.values
    scales = None if isinstance(x, torch.Tensor) else x.scales
    columns, device = values.shape[1], values.device
    format = "bf16" if scales is None else "int8" if isinstance(x, Int8Rows) else "e4m3"
    out = GroupedRows.empty(dispatch, columns, device, format)
    if pads:
        out.zero_()
    choices, top_k = dispatch.places.numel(), dispatch.places.shape[1]
    width = min(_WIDTH, triton.next_power_of_2(columns))
    bytes_of = torch.uint8 if scales is not None else torch.bfloat16
    stride = x.scales.stride(1) if isinstance(x, QuantRows) else 0
    groups = 1 if out.scales is None else out.scales.shape[1]
    _gather_kernel[(choices, triton.cdiv(columns, width))](
        values.view(bytes_of), scales, stride, dispatch.places, out.values.view(bytes_of),
        out.scales, dispatch.height, columns, width, top_k, groups, triton.next_power_of_2(groups),
        num_warps=4,
    )  # fmt: skip
    return out


@triton.jit
def _combine_kernel(
    ROWS, WEIGHTS, PLACES, OUT, C: tl.constexpr, WIDTH: tl.constexpr, TOP_K: tl.constexpr
):
    """One program WIDTH columns of one token."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    total = tl.zeros([WIDTH], tl.float32)
    for rank in tl.static_range(TOP_K):
        row = tl.load(PLACES + token * TOP_K + rank).to(tl.int64)
        x = tl.load(ROWS + row * C + column, mask=column < C, other=0.0).to(tl.float32)
        if WEIGHTS is not None:
            x *= tl.load(WEIGHTS + token * TOP_K + rank)
        total = x if rank == 0 else total + x
    tl.store(OUT + token * C + column, total.to(tl.bfloat16), mask=column < C)


def combine(
    rows: torch.Tensor, dispatch: Dispatch, weights: torch.Tensor | None = None
) -> torch.Tensor:
    """BF16 [rows, C] -> BF16 [T, C]: a token's choices times their ``weights`` FP32 [T, k], summed
    in FP32 in the order of the ranks and rounded once.
    """
    (tokens, top_k), columns = dispatch.places.shape, rows.shape[1]
    out = torch.empty((tokens, columns), dtype=torch.bfloat16, device=rows.device)
    width = min(_WIDTH, triton.next_power_of_2(columns))
    _combine_kernel[(tokens, triton.cdiv(columns, width))](
        rows, weights, dispatch.places, out, columns, width, top_k,
        num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return out
