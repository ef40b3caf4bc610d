"""What a row of the gated delta rule is computed from: its convolution with silu, the norms of q
and k, the decay g and beta.

The formulas are those of ``isobit.kernels.spec.delta_rule``: FP32 sums from the oldest input on,
rounded to the dtype of x, then FP32.  A vector's squares are added two neighbours at a time.  The
inputs in front of a sequence's first new row come from the carry that it reads, and new ones go to
that one and to the one that it writes, each as far as they are of its chunk.

Shapes: T new tokens of n sequences, H value heads, H / r key heads (KH), heads of DK and DV.
"""

# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportIndexIssue=false
# pyright: reportArgumentType=false, reportOperatorIssue=false
# (Triton's types know neither launch options nor what a kernel computes with)

from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from isobit.kernels.operands import DELTA_CHUNK, DeltaInputs, DeltaWeights
from isobit.kernels.spec.delta_rule import DeltaCarries

CHUNK = DELTA_CHUNK
_CHUNK = tl.constexpr(CHUNK)
EPSILON = tl.constexpr(1e-6)  # of the lengths of q and k
STEPS = 128  # numbers of g that a program makes
FEW, MANY = 1 << 10, 1 << 11
"""Numbers of a head that a program has; MANY in training of at least so many tokens:"""
MANY_TOKENS = 2048


@triton.jit
def silu(x):
    return x / (1.0 + tl.exp(-x))


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _softplus(x):
    """log(1 + exp(x)), to FP32's accuracy also where it is small (log1p by Kahan's quotient)."""
    small = tl.exp(-tl.abs(x))
    sum = 1.0 + small
    is_one = sum == 1.0
    more = tl.log(sum) * (small / tl.where(is_one, 1.0, sum - 1.0))
    return tl.maximum(x, 0.0) + tl.where(is_one, small, more)


@triton.jit
def carried_chunk(position, stop, is_one):
    """The chunk that a sequence's carry is of, in front of the new rows ``position`` .. ``stop`` -
    1: that of the row before; but where the carry is written too (``is_one``), that of them all,
    which may begin with it.
    """
    return tl.where(is_one, stop - 1, tl.maximum(position - 1, 0)) // _CHUNK


@triton.jit
def _sums_of_squares(x, VECTORS: tl.constexpr, LEVELS: tl.constexpr):
    """FP32 [VECTORS, 2^LEVELS] -> [VECTORS, 1], two neighbours at a time, so in any layout the
    same: the forms of the kernel with and without carries may have others.
    """
    x = x * x
    for level in tl.static_range(LEVELS):
        x = tl.sum(tl.reshape(x, [VECTORS, 1 << (LEVELS - level - 1), 2]), 2)
    return x


@triton.jit(do_not_specialize=["tokens"])
def _steps_kernel(A, B, A_LOG, DT_BIAS, DECAY, BETA, tokens, H: tl.constexpr, SIZE: tl.constexpr):
    """One program SIZE numbers of g and beta."""
    place = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    inside = place < tokens * H
    rate = tl.exp(tl.load(A_LOG + place % H).to(tl.float32))
    step = tl.load(A + place, mask=inside, other=0.0).to(tl.float32)
    step += tl.load(DT_BIAS + place % H).to(tl.float32)
    tl.store(DECAY + place, -rate * _softplus(step), mask=inside)
    b = tl.load(B + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(BETA + place, sigmoid(b), mask=inside)


@triton.jit
def vectors_of_program(
    H: tl.constexpr, KH: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, VECTORS: tl.constexpr
):
    """A program's vectors are of one head of q, k or v and of VECTORS tokens.  -> Whether it is of
    q or k, how many numbers it has, the tokens [VECTORS, 1], and the head, which goes on from q to
    k.
    """
    t = (tl.program_id(0).to(tl.int64) * VECTORS + tl.arange(0, VECTORS))[:, None]
    head = tl.program_id(1)
    is_key = head < 2 * KH
    return is_key, tl.where(is_key, DK, DV), t, tl.where(is_key, head, head - 2 * KH)


@triton.jit(do_not_specialize=["tokens"])
def _rows_kernel(
    X, CONVOLUTION, OWNER, POSITION, COUNT, TOKEN, READ, WRITTEN, INPUTS, Q, K, V, tokens,
    H: tl.constexpr, KH: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, WIDTH: tl.constexpr,
    LEVELS: tl.constexpr, VECTORS: tl.constexpr, ROOT: tl.constexpr, STEP: tl.constexpr,
    PLACE: tl.constexpr,
):  # fmt: skip
    """One program VECTORS tokens of a head, padded to 2^LEVELS numbers; ROOT is 1 / sqrt(DK).
    CONVOLUTION is STEP from channel to channel and PLACE from place to place.
    INPUTS, READ and WRITTEN may be None.
    """
    channels: tl.constexpr = 2 * KH * DK + H * DV
    held: tl.constexpr = _CHUNK + WIDTH - 1  # inputs of a carry
    is_key, size, t, head = vectors_of_program(H, KH, DK, DV, VECTORS)
    i = tl.arange(0, 1 << LEVELS)[None, :]
    is_there = t < tokens
    inside = is_there & (i < size)
    channel = tl.where(is_key, 0, 2 * KH * DK) + head * size + i
    n = tl.load(OWNER + t, mask=is_there, other=0)
    position = tl.load(POSITION + n).to(tl.int64)  # which times channels is more than int32 holds
    row = (t - tl.load(TOKEN + n)).to(tl.int32)  # among the new ones
    total = tl.zeros([VECTORS, 1 << LEVELS], tl.float32)
    if INPUTS is not None:
        stop = position + tl.load(COUNT + n)
        read, written = tl.load(READ + n).to(tl.int64), tl.load(WRITTEN + n).to(tl.int64)
        chunk = carried_chunk(position, stop, read == written)
        shift = WIDTH - 1 - chunk * _CHUNK  # position -> row of the carry read
        source = INPUTS + (read * held + shift) * channels + channel
    for place in tl.static_range(WIDTH):
        back = WIDTH - 1 - place
        x = tl.load(X + (t - back) * channels + channel, mask=inside & (row >= back), other=0.0)
        if INPUTS is not None:
            seen = position + row - back
            before = inside & (row < back) & (seen >= 0)
            x = tl.where(before, tl.load(source + seen * channels, mask=before, other=0.0), x)
        factor = tl.load(CONVOLUTION + channel * STEP + place * PLACE, mask=inside, other=0.0)
        term = x.to(tl.float32) * factor.to(tl.float32)
        total = term if place == 0 else total + term
    active = silu(total.to(X.dtype.element_ty).to(tl.float32))
    if is_key:
        unit = active * tl.rsqrt(_sums_of_squares(active, VECTORS, LEVELS) + EPSILON)
        of_head = (t * KH + head) * DK + i
        tl.store(Q + of_head, unit * ROOT, mask=inside & (head < KH))
        tl.store(K + of_head - KH * DK, unit, mask=inside & (head >= KH))
    else:
        tl.store(V + (t * H + head) * DV + i, active, mask=inside)
    if INPUTS is not None:
        begin = (stop - 1) // _CHUNK * _CHUNK - (WIDTH - 1)  # of the carry written
        to = INPUTS + written * held * channels + channel
        own = position + row
        x = tl.load(X + t * channels + channel, mask=inside, other=0.0)
        tl.store(to + (own - begin) * channels, x, mask=inside & (own >= begin))
        is_its = (read >= 0) & (read != written) & (own < (chunk + 1) * _CHUNK)
        tl.store(source + own * channels, x, mask=inside & is_its)
        moves = is_there & (row == 0) & (read != written)  # then what is in front moves too
        for old in range(0, tl.max(tl.where(moves, position - begin, 0))):
            seen = begin + old
            copied = inside & moves & (seen < position)
            x = tl.load(source + seen * channels, mask=copied & (seen >= 0), other=0.0)
            tl.store(to + old * channels, x, mask=copied)


@dataclass(frozen=True, slots=True)
class DeltaRows:
    """What rows are computed from, FP32: q and k [T, KH, DK], v [T, H, DV], decay g and beta [T,
    H].
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    decay: torch.Tensor
    beta: torch.Tensor


@dataclass(frozen=True, slots=True)
class DeltaBatch:
    """New tokens of n sequences; int32 [n] on the device."""

    positions: torch.Tensor  # of the first new token
    counts: torch.Tensor  # new tokens
    tokens: torch.Tensor  # the row of the first one among the tokens of all sequences
    read: torch.Tensor | None  # the carry that a sequence goes on from; -1 where it begins
    written: torch.Tensor | None
    """The carry of its last row (``PagedBatch.carries``).  None, as ``read``, in training, which
    has no carries.
    """
    longest: int  # a bound of the counts
    chunks: tuple[int, ...] = ()
    """How many sequences have a first chunk, a second one, and so on, at most; each time they are
    the first of all.  Where sequences have one new row, it is not asked for.
    """

    def sequences(self, index: torch.Tensor, longest: int, chunks: tuple[int, ...]) -> "DeltaBatch":
        """Some of them, int64 on the device."""
        return self._map(lambda x: x.index_select(0, index), longest, chunks)

    def part(self, first: int, last: int) -> "DeltaBatch":
        """Views of those from ``first`` to ``last`` - 1, without their chunks."""
        return self._map(lambda x: x[first:last], self.longest, ())

    def _map(
        self, take: Callable[[torch.Tensor], torch.Tensor], longest: int, chunks: tuple[int, ...]
    ) -> "DeltaBatch":
        read, written = (x if x is None else take(x) for x in (self.read, self.written))
        places = (take(x) for x in (self.positions, self.counts, self.tokens))
        return DeltaBatch(*places, read, written, longest, chunks)


def reach_of(chunks: torch.Tensor) -> tuple[int, ...]:
    """``DeltaBatch.chunks`` of sequences that have so many."""
    return tuple((chunks[:, None] > torch.arange(int(chunks.max()))).sum(0).tolist())


def padded(size: int) -> int:
    """The next power of two that is at least 16."""
    return max(16, 1 << (size - 1).bit_length())


def vectors_at_once(tokens: int, size: int, is_paged: bool = False) -> int:
    """Tokens of a head of ``size`` numbers, padded, that a program has."""
    return max(1, (FEW if is_paged or tokens < MANY_TOKENS else MANY) // size)


def by_place(convolution: torch.Tensor) -> torch.Tensor:
    """The same [channels, width], whose neighbours in memory are those of a place, so that one load
    has several; worth its launch where tokens are many.
    """
    return convolution.t().contiguous().t()


def rows_of(
    inputs: DeltaInputs,
    weights: DeltaWeights,
    batch: DeltaBatch,
    owners: torch.Tensor,
    carries: DeltaCarries | None,
) -> DeltaRows:
    """Convolution, silu, norms, decay and beta of new tokens, whose x go to the carries of their
    chunks; ``owners`` int32 [T], the sequence of each token.
    """
    shape, tokens, x = weights.shape, len(inputs.x), inputs.x
    heads, key_heads = shape.value_heads, shape.key_heads

    def empty(*sizes: int) -> torch.Tensor:
        return torch.empty(tokens, *sizes, dtype=torch.float32, device=x.device)

    rows = DeltaRows(
        empty(key_heads, shape.key_dim), empty(key_heads, shape.key_dim),
        empty(heads, shape.value_dim), empty(heads), empty(heads),
    )  # fmt: skip
    _steps_kernel[(triton.cdiv(tokens * heads, STEPS),)](
        inputs.a, inputs.b, weights.a_log, weights.dt_bias, rows.decay, rows.beta, tokens, heads,
        STEPS, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    size = padded(max(shape.key_dim, shape.value_dim))
    vectors = vectors_at_once(tokens, size, carries is not None)
    convolution = weights.convolution if tokens < MANY_TOKENS else by_place(weights.convolution)
    _rows_kernel[(triton.cdiv(tokens, vectors), 2 * key_heads + heads)](
        x, convolution, owners, batch.positions, batch.counts, batch.tokens, batch.read,
        batch.written, None if carries is None else carries.inputs, rows.q, rows.k, rows.v, tokens,
        heads, key_heads, shape.key_dim, shape.value_dim, shape.width,
        size.bit_length() - 1, vectors, shape.key_dim**-0.5, *convolution.stride(),
        num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return rows
