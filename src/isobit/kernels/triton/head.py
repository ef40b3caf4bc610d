"""lm_head with its log-probabilities, and the scalar head.

**lm_head.**  The logits of a batch never exist all at once:

    logits   = H W^T                                  BF16 or INT8 operands, FP32 out; rows are
                                                      independent
    dH       = d logits W                              W in BF16
    dW      += d logits^T H

Rows are taken in parts.  In the forward a part is about a gigabyte of logits, and its size changes
no bit.  The backward computes a part's logits, L and entropies again, by the same kernels, and adds
the parts to the head's gradient one by one.  Its parts take 2 GiB, 4 bytes a logit and 2 for its
gradient: each part reads and writes the head's gradient, 5 GB for 151,936 x 4096, which would cost
small parts more than their products.

Of Qwen3's 151,936 rows 151,669 are in the distribution, which is a multiple of nothing.  Products
take whole tiles of rows; the others' logits are never read, and their gradients are zeros.

**Log-probabilities** are log-softmax(logits / temperature) over the full vocabulary:

    x = logits * (1 / temperature)                    one division a row, rounded; then one FP32
                                                      multiplication an entry
    log p_v = x_v - L,    L = M + log sum_v exp(x_v - M),    M = max x
    entropy = log sum_v exp(x_v - M) - sum_v p_v (x_v - M)

Sampler, loss and reference compute L in the same two steps, so a token's log-probability has the
bits that it was sampled with:

1. ``chunk_stats``: one program takes 4096 entries of a row and leaves m = max x,
     s = sum exp(x - m), t = sum exp(x - m) (x - m).  All callers use one compiled kernel with one
     layout, so the order of its sums depends on the vocabulary's size alone.
2. ``combine`` joins a row's chunks.  Their terms are added as integers, in units of 2^-40: that
     sum has no order, so it may be compiled into any kernel.

A row with a NaN or an infinity has L = NaN: t becomes NaN even where exp(-inf) would hide it.  A
temperature of 0 is greedy decoding, whose log-probabilities are taken at temperature 1.

With g and e the gradients of log p and of the entropy,

    d logits = (g (onehot(target) - p)
               - e p (log p + entropy)) / temperature rounded to BF16

**Scalar head.**  A number for each hidden state.

    y_n   = sum_c h_nc w_c                     FP32
    dh_n  = d_n w                              FP32, rounded to BF16 once
    dw   += sum over n of d_n h_n              FP32

One program takes a row whole, in a layout that depends on the width alone.  The backward's sums are
ordered as in RMSNorm's (``isobit.kernels.triton.pointwise``).
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from isobit.kernels.observing import observe
from isobit.kernels.operands import LOGITS_CHUNK, HeadWeight
from isobit.kernels.triton.device_functions import add_block_sums
from isobit.kernels.triton.pointwise import BLOCKS, layout
from isobit.kernels.triton.products import Products
from isobit.kernels.triton.quantise import quantise_int8
from isobit.kernels.triton.sizes import HEAD_ROWS, backward_rows, forward_rows

# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportIndexIssue=false
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportAttributeAccessIssue=false
# pyright: reportReturnType=false
# (Triton's types know neither launch options nor what a kernel computes with)

_LARGEST_VOCABULARY = 1 << 22  # the sums of ``combine`` stay below 2^63
UNITS = tl.constexpr(2.0**40)


@triton.jit
def inverse_temperature(temperature):
    """The factor of a row's logits."""
    return tl.div_rn(1.0, tl.where(temperature > 0, temperature, 1.0))


@triton.jit
def _chunk_kernel(
    LOGITS, ROW, TEMPERATURE, STATS, V: tl.constexpr, STRIDE: tl.constexpr, CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr
):  # fmt: skip
    """One program a chunk of a row: m, s and t to STATS [N, 3, CHUNKS]."""
    program = tl.program_id(0)
    n = (program // CHUNKS).to(tl.int64)
    chunk = program % CHUNKS
    column = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = column < V
    row = tl.load(ROW + n).to(tl.int64)
    inverse = inverse_temperature(tl.load(TEMPERATURE + n))
    # All of a row's memory, so that loads are wide whatever V is a multiple of.
    x = tl.load(LOGITS + row * STRIDE + column, mask=column < STRIDE, other=0.0) * inverse
    x = tl.where(inside, x, -float("inf"))
    m = tl.max(x, 0)
    below = tl.where(inside, x - m, -1000.0)  # exp is 0 there, and 0 * -1000 too
    p = tl.exp(below)
    stats = STATS + n * (3 * CHUNKS) + chunk
    tl.store(stats, m)
    tl.store(stats + CHUNKS, tl.sum(p, 0))
    tl.store(stats + 2 * CHUNKS, tl.sum(p * below, 0))


@triton.jit
def _sum(terms):
    """FP32 sum of FP32 numbers in whole units, which has no order."""
    return (tl.sum((terms.to(tl.float64) * UNITS).to(tl.int64), 0).to(tl.float64) / UNITS).to(
        tl.float32
    )


@triton.jit
def combine(STATS, n, CHUNKS: tl.constexpr, PADDED: tl.constexpr):
    """-> m and s of the chunks [PADDED] (-inf and 0 in the padding), and the row's L and entropy in
    FP32.

    A chunk's terms move from its own maximum m to the row's M, by the weight exp(m - M):

        sum exp(x - M) = s exp(m - M)    sum exp(x - M) (x - M) = (t + (m - M) s) exp(m - M)
    """
    chunk = tl.arange(0, PADDED)
    inside = chunk < CHUNKS
    stats = STATS + n * (3 * CHUNKS) + chunk
    m = tl.load(stats, mask=inside, other=-float("inf"))
    s = tl.load(stats + CHUNKS, mask=inside, other=0.0)
    t = tl.load(stats + 2 * CHUNKS, mask=inside, other=0.0)
    top = tl.max(m, 0)
    below = tl.where(inside, m - top, 0.0)
    weight = tl.exp(below)
    total = _sum(s * weight)
    mean = tl.div_rn(_sum((t + below * s) * weight), total)
    log_total = tl.log(total)
    bad = tl.max((t != t).to(tl.int32), 0) > 0
    return (
        m,
        s,
        tl.where(bad, float("nan"), top + log_total),
        tl.where(bad, float("nan"), log_total - mean),
    )


@triton.jit
def _combine_kernel(STATS, LOG_SUM, ENTROPY, CHUNKS: tl.constexpr, PADDED: tl.constexpr):
    """One program a row."""
    n = tl.program_id(0).to(tl.int64)
    _, _, log_sum, entropy = combine(STATS, n, CHUNKS, PADDED)
    tl.store(LOG_SUM + n, log_sum)
    tl.store(ENTROPY + n, entropy)


def chunk_stats(
    logits: torch.Tensor, rows: torch.Tensor, temperatures: torch.Tensor
) -> torch.Tensor:
    """FP32 logits [R, V], int32 rows [N], FP32 temperatures [N] -> m, s and t of each row's chunks,
    FP32 [N, 3, chunks].
    """
    vocab_size = logits.shape[1]
    assert logits.dtype == torch.float32
    assert logits.stride(1) == 1
    # Another alignment would give the kernel another layout, and its sums another order.
    if logits.stride(0) % 4:
        logits = F.pad(logits, (0, -vocab_size % 4))[:, :vocab_size]
    assert logits.data_ptr() % 16 == 0
    assert vocab_size <= _LARGEST_VOCABULARY
    chunks = triton.cdiv(vocab_size, LOGITS_CHUNK)
    stats = torch.empty((rows.numel(), 3, chunks), dtype=torch.float32, device=logits.device)
    grid = (rows.numel() * chunks,)
    _chunk_kernel[grid](
        logits, rows, temperatures, stats, vocab_size, logits.stride(0), LOGITS_CHUNK, chunks,
        num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return stats


def log_sums_and_entropies(
    logits: torch.Tensor, temperatures: torch.Tensor, rows: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """FP32 logits [R, V], FP32 temperatures [N], int32 rows [N] (default: 0 .. R - 1) -> L and the
    entropy, FP32 [N].
    """
    if rows is None:
        rows = torch.arange(logits.shape[0], dtype=torch.int32, device=logits.device)
    stats = chunk_stats(logits, rows, temperatures)
    log_sums, entropies = torch.empty_like(temperatures), torch.empty_like(temperatures)
    chunks = stats.shape[2]
    padded = triton.next_power_of_2(chunks)
    _combine_kernel[(rows.numel(),)](
        stats, log_sums, entropies, chunks, padded, num_warps=1, enable_fp_fusion=False
    )
    return log_sums, entropies


def log_sum_exp(logits: torch.Tensor, temperatures: torch.Tensor) -> torch.Tensor:
    """L, FP32 [N]; NaN where a row holds a NaN or an infinity."""
    return log_sums_and_entropies(logits, temperatures)[0]


def log_probs_at(
    logits: torch.Tensor, tokens: torch.Tensor, temperatures: torch.Tensor, log_sums: torch.Tensor
) -> torch.Tensor:
    """FP32 logits [N, V], int64 tokens [N] -> FP32 log-probabilities [N]."""
    return logits.gather(1, tokens[:, None])[:, 0] * _inverse(temperatures) - log_sums


def log_softmax(logits: torch.Tensor, temperatures: torch.Tensor) -> torch.Tensor:
    """FP32 logits [N, V] -> all log-probabilities, FP32 [N, V]."""
    return log_probs_of(logits, temperatures, log_sum_exp(logits, temperatures))


def log_probs_of(
    logits: torch.Tensor, temperatures: torch.Tensor, log_sums: torch.Tensor
) -> torch.Tensor:
    """``log_softmax`` where L is known."""
    return logits * _inverse(temperatures)[:, None] - log_sums[:, None]


def _inverse(temperatures: torch.Tensor) -> torch.Tensor:
    """``inverse_temperature`` in torch: the same rounded division."""
    return torch.where(temperatures > 0, temperatures, 1.0).reciprocal()


_WIDTH = 2048


def logit_gradients(
    logits: torch.Tensor,
    targets: torch.Tensor,
    temperatures: torch.Tensor,
    log_sums: torch.Tensor,
    d_log_probs: torch.Tensor,
    of_entropies: tuple[torch.Tensor, torch.Tensor] | None = None,
    columns: int | None = None,
) -> torch.Tensor:
    """FP32 logits [N, V] and their L [N], int64 targets [N], FP32 temperatures and d
    log-probabilities [N], and the entropies with their gradients, FP32 [N] -> d logits, BF16 [N,
    V], or [N, ``columns``] with zeros behind V.
    """
    rows, vocab_size = logits.shape
    columns = columns or vocab_size
    assert logits.stride(1) == 1
    out = torch.empty((rows, columns), dtype=torch.bfloat16, device=logits.device)
    grid = (rows * triton.cdiv(columns, _WIDTH),)
    entropies, d_entropies = of_entropies or (None, None)
    _gradient_kernel[grid](
        logits, targets, temperatures, log_sums, d_log_probs, entropies, d_entropies, out,
        vocab_size, logits.stride(0), columns, _WIDTH, num_warps=4, enable_fp_fusion=False
    )  # fmt: skip
    return out


@triton.jit
def _gradient_kernel(
    LOGITS, TARGET, TEMPERATURE, LOG_SUM, D_LOG_PROB, ENTROPY, D_ENTROPY, OUT, V: tl.constexpr,
    STRIDE: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """One program WIDTH entries of a row, of which ``pieces`` consecutive programs compute one.  x
    and L have the forward's bits, so p is what was sampled from.
    """
    pieces: tl.constexpr = (COLUMNS + WIDTH - 1) // WIDTH
    n = (tl.program_id(0) // pieces).to(tl.int64)
    column = tl.program_id(0) % pieces * WIDTH + tl.arange(0, WIDTH)
    inverse = inverse_temperature(tl.load(TEMPERATURE + n))
    scaled = tl.load(D_LOG_PROB + n) * inverse
    x = tl.load(LOGITS + n * STRIDE + column, mask=column < STRIDE, other=0.0) * inverse
    log_p = x - tl.load(LOG_SUM + n)
    p = tl.exp(log_p)
    onehot = (column == tl.load(TARGET + n)).to(tl.float32)
    gradient = (onehot - p) * scaled
    if D_ENTROPY is not None:
        of_entropy = tl.load(D_ENTROPY + n) * inverse
        gradient -= p * (log_p + tl.load(ENTROPY + n)) * of_entropy
    gradient = tl.where(column < V, gradient, 0.0)
    tl.store(OUT + n * COLUMNS + column, gradient.to(tl.bfloat16), mask=column < COLUMNS)


def head_logits(
    products: type[Products], hidden: torch.Tensor, head: HeadWeight, drawn: int | None = None
) -> torch.Tensor:
    """hidden BF16 [N, C], head [V, C] -> FP32 logits [N, V] of its first ``drawn`` rows: then a
    view, whose rows are those of the product apart.
    """
    head = head.first(_in_tiles(drawn))
    count = head.table.shape[0]
    rows = -(-count // HEAD_ROWS) * HEAD_ROWS
    whole = torch.empty((hidden.shape[0], rows), dtype=torch.float32, device=hidden.device)
    logits = whole[:, :count]
    if head.int8 is None:
        products.bf16_gemm_nt(hidden, head.table, out=logits)
    else:
        x = quantise_int8(hidden)
        observe(x.values, "lm_head", "input", scales=x.scales)
        products.int8_gemm_nt(x, head.int8, out=logits)
    return observe(logits[:, : drawn or count], "lm_head")


def _in_tiles(drawn: int | None) -> int | None:
    """The first ``drawn`` rows of the head, and those that fill up their last tile."""
    return None if drawn is None else -(-drawn // HEAD_ROWS) * HEAD_ROWS


def token_log_probs(
    products: type[Products],
    hidden: torch.Tensor,
    head: HeadWeight,
    targets: torch.Tensor,
    temperatures: torch.Tensor,
    drawn: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """hidden BF16 [N, C], head BF16 [V, C], targets int64 [N], temperatures FP32 [N] -> FP32
    log-probabilities [N] and entropies [N] of the distribution over the first ``drawn`` rows, NaN
    where a row's logits are not finite.
    """
    head = head.first(_in_tiles(drawn))
    rows = forward_rows(head.table.shape[0])
    log_probs, entropies = torch.empty_like(temperatures), torch.empty_like(temperatures)
    for first in range(0, hidden.shape[0], rows):
        part = slice(first, first + rows)
        logits = head_logits(products, hidden[part], head, drawn)
        log_sums, entropies[part] = log_sums_and_entropies(logits, temperatures[part])
        log_probs[part] = log_probs_at(logits, targets[part], temperatures[part], log_sums)
        del logits  # before the next part's are made
    return log_probs, entropies


def token_log_probs_backward(
    products: type[Products],
    hidden: torch.Tensor,
    head: HeadWeight,
    targets: torch.Tensor,
    temperatures: torch.Tensor,
    d_log_probs: torch.Tensor,
    grad: torch.Tensor | None,
    d_entropies: torch.Tensor | None = None,
    drawn: int | None = None,
) -> torch.Tensor:
    """Inputs as for ``token_log_probs``; d_log_probs and d_entropies FP32 [N] are the loss's
    gradients, None for zeros -> that of hidden, BF16 [N, C], NaN where the logits are not finite;
    adds the head's to ``grad``, FP32 [V, C], if it is given.  Repeats its bits at the same sizes.
    """
    head = head.first(_in_tiles(drawn))
    rows = backward_rows(head.table.shape[0])
    d_hidden = torch.empty_like(hidden)
    for first in range(0, hidden.shape[0], rows):
        part = slice(first, first + rows)
        d_logits = _part_gradients(
            products, hidden[part], head, targets[part], temperatures[part], d_log_probs[part],
            None if d_entropies is None else d_entropies[part], drawn,
        )  # fmt: skip
        # FP32 out: a library may cut so long a sum, over the vocabulary, in pieces.
        d_hidden[part] = products.bf16_gemm_nn(d_logits, head.table, dtype=torch.float32)
        if grad is not None:
            products.bf16_gemm_tn(d_logits, hidden[part], grad[: _in_tiles(drawn)])
        del d_logits  # before the next part's are made
    return d_hidden


def head_logits_backward(
    products: type[Products],
    hidden: torch.Tensor,
    head: HeadWeight,
    d_logits: torch.Tensor,
    grad: torch.Tensor | None,
) -> torch.Tensor:
    """The gradient of the logits of the head's first V' rows, FP32 [N, V'], which is rounded to
    BF16 -> that of hidden, BF16 [N, C]; adds the head's to ``grad``, FP32 [V, C], if it is given.
    """
    columns = d_logits.shape[1]
    table = head.first(_in_tiles(columns)).table
    d = F.pad(d_logits.to(torch.bfloat16), (0, table.shape[0] - columns))
    if grad is not None:
        products.bf16_gemm_tn(d, hidden, grad[: table.shape[0]])
    return products.bf16_gemm_nn(d, table, dtype=torch.float32).to(hidden.dtype)


def _part_gradients(
    products: type[Products],
    hidden: torch.Tensor,
    head: HeadWeight,
    targets: torch.Tensor,
    temperatures: torch.Tensor,
    d_log_probs: torch.Tensor,
    d_entropies: torch.Tensor | None,
    drawn: int | None,
) -> torch.Tensor:
    """-> d logits BF16 [N, V], of all rows; the FP32 logits are freed when this returns."""
    logits = head_logits(products, hidden, head, drawn)
    log_sums, entropies = log_sums_and_entropies(logits, temperatures)
    of_entropies = None if d_entropies is None else (entropies, d_entropies)
    return logit_gradients(
        logits, targets, temperatures, log_sums, d_log_probs, of_entropies, head.table.shape[0]
    )


@triton.jit(do_not_specialize=["count"])
def _output_kernel(
    HIDDEN, WEIGHT, OUT, count, C: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr
):
    """One program ROWS rows of C channels padded to WIDTH."""
    n = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)
    weight = tl.load(WEIGHT + column, mask=column < C, other=0.0).to(tl.float32)[None, :]
    inside = (n < count)[:, None] & (column < C)[None, :]
    at = n[:, None] * C + column[None, :]
    hidden = tl.load(HIDDEN + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(OUT + n, tl.sum(hidden * weight, 1), mask=n < count)


@triton.jit(do_not_specialize=["count", "rows_of_block"])
def _backward_kernel(
    HIDDEN, WEIGHT, D, D_HIDDEN, SUMS, count, rows_of_block, C: tl.constexpr, WIDTH: tl.constexpr,
    ROWS: tl.constexpr
):  # fmt: skip
    """One program a block of rows, ROWS at a time."""
    block = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDTH)
    weight = tl.load(WEIGHT + column, mask=column < C, other=0.0).to(tl.float32)[None, :]
    sums = tl.zeros([WIDTH], tl.float32)
    end = tl.minimum((block + 1) * rows_of_block, count)
    for first in range(block * rows_of_block, end, ROWS):
        n = first + tl.arange(0, ROWS)
        inside = (n < end)[:, None] & (column < C)[None, :]
        at = n[:, None] * C + column[None, :]
        d = tl.load(D + n, mask=n < end, other=0.0)[:, None]
        hidden = tl.load(HIDDEN + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(D_HIDDEN + at, (d * weight).to(tl.bfloat16), mask=inside)
        sums += tl.sum(d * hidden, 0)
    tl.store(SUMS + block * C + column, sums, mask=column < C)


def scalar_head(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """hidden BF16 [N, C] and weight BF16 [C], contiguous -> FP32 [N]."""
    count, columns = hidden.shape
    _check_alignment(hidden, weight)
    out = torch.empty(count, dtype=torch.float32, device=hidden.device)
    if count:
        width, rows, warps = layout(columns)
        _output_kernel[(triton.cdiv(count, rows),)](
            hidden, weight, out, count, columns, width, rows, num_warps=warps,
            enable_fp_fusion=False,
        )  # fmt: skip
    return out


def scalar_head_backward(
    hidden: torch.Tensor, weight: torch.Tensor, d: torch.Tensor, grad: torch.Tensor
) -> torch.Tensor:
    """The gradient of the outputs, FP32 [N] -> that of hidden, BF16 [N, C]; adds that of the weight
    to ``grad``, FP32 [C].  Repeats its bits at the same sizes.
    """
    count, columns = hidden.shape
    _check_alignment(hidden, weight)
    d_hidden = torch.empty_like(hidden)
    if not count:
        return d_hidden
    width, rows, warps = layout(columns)
    rows_of_block = triton.cdiv(triton.cdiv(count, BLOCKS), rows) * rows
    blocks = triton.cdiv(count, rows_of_block)
    sums = torch.empty((blocks, columns), dtype=torch.float32, device=hidden.device)
    _backward_kernel[(blocks,)](
        hidden, weight, d, d_hidden, sums, count, rows_of_block, columns, width, rows,
        num_warps=warps, enable_fp_fusion=False,
    )  # fmt: skip
    add_block_sums(sums, grad)
    return d_hidden


def _check_alignment(hidden: torch.Tensor, weight: torch.Tensor) -> None:
    """Another alignment would give the kernels another layout, and their sums another order."""
    assert hidden.is_contiguous()
    assert hidden.data_ptr() % 16 == weight.data_ptr() % 16 == 0
