"""Drawing tokens from FP32 logits, which are read once; a token's bits depend on its row, key and
position alone.

The draw is Gumbel-max in two stages.  With S_c the log-sum-exp of the x of chunk c and independent
Gumbel noise g,

    c* = argmax_c S_c + g_(V + c)        v* = argmax over v in c* of x_v + g_v

gives v with probability exp(S_c - L) exp(x_v - S_c) = p_v.  So noise is made only for the chunks
and for one chunk's entries.  g_i comes from output i of the sample's generator at that position
(``isobit.kernels.spec.head``), in FP32: with u the uniform of 53 bits, -log(u) is -log1p(-(1 - u)),
which keeps its relative precision where it is small, the only range that decides a draw.
Temperature 0 takes the largest logit, the lowest id among equals.

Chunks, L and log-probabilities are those of ``isobit.kernels.triton.head``.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from isobit.kernels.operands import LOGITS_CHUNK, Drawn, Draws
from isobit.kernels.spec.head import draw, truncate
from isobit.kernels.triton.head import (
    chunk_stats,
    combine,
    inverse_temperature,
    log_probs_at,
    log_probs_of,
    log_sums_and_entropies,
)

# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportIndexIssue=false
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportAttributeAccessIssue=false
# (Triton's types know neither launch options nor what a kernel computes with)


_GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
_MULTIPLIER_1 = tl.constexpr(0xBF58476D1CE4E5B9)
_MULTIPLIER_2 = tl.constexpr(0x94D049BB133111EB)


@triton.jit
def splitmix64(seed, index):
    """Output number ``index`` + 1 of the generator, all uint64."""
    bits = seed + (index + 1) * _GOLDEN
    bits ^= bits >> 30
    bits *= _MULTIPLIER_1
    bits ^= bits >> 27
    bits *= _MULTIPLIER_2
    return bits ^ (bits >> 31)


_UNIT = tl.constexpr(2.0**-53)
_BELOW_1 = tl.constexpr(1 - 2.0**-24)  # a complement that rounds to 1 would make the noise infinite
_TRUNCATED_ROWS = 16
"""Rows of a block that is sorted: fixed, since a library may choose its algorithm by it."""


@triton.jit
def _gumbel(seed, index):
    """-log(-log u) in FP32."""
    odd = (splitmix64(seed, index.to(tl.uint64)) >> 11) | 1  # u is odd * 2^-53
    complement = ((1 << 53) - odd).to(tl.float32) * _UNIT
    return -tl.log(-libdevice.log1p(-tl.minimum(complement, _BELOW_1)))


@triton.jit
def _draw_kernel(
    LOGITS, ROW, TEMPERATURE, KEY, POSITION, STATS, TOKEN, LOG_PROB,
    V: tl.constexpr, STRIDE: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
    PADDED: tl.constexpr,
):  # fmt: skip
    """One program a sample; ``argmax`` takes the lowest index among equals."""
    n = tl.program_id(0).to(tl.int64)
    temperature = tl.load(TEMPERATURE + n)
    inverse = inverse_temperature(temperature)
    logits = LOGITS + tl.load(ROW + n).to(tl.int64) * STRIDE
    seed = splitmix64(tl.load(KEY + n).to(tl.uint64), tl.load(POSITION + n).to(tl.uint64))

    # S_c = m + log s; padding has m = -inf and s = 0.
    m, s, log_sum, _ = combine(STATS, n, CHUNKS, PADDED)
    score = m
    if temperature > 0:
        score += tl.log(s) + _gumbel(seed, V + tl.arange(0, PADDED))

    # Only the chosen chunk's logits are read again.
    column = tl.argmax(score, 0) * CHUNK + tl.arange(0, CHUNK)
    score = tl.load(logits + column, mask=column < STRIDE, other=0.0) * inverse
    score = tl.where(column < V, score, -float("inf"))
    if temperature > 0:
        score += _gumbel(seed, column)
    token = tl.argmax(score, 0) + tl.min(column, 0)
    # A row with a NaN would give an arbitrary index.
    token = tl.where(log_sum == log_sum, token, 0)
    tl.store(TOKEN + n, token.to(tl.int64))
    tl.store(LOG_PROB + n, tl.load(logits + token) * inverse - log_sum)


def sample_tokens(
    logits: Tensor, rows: Tensor, temperatures: Tensor, keys: Tensor, positions: Tensor
) -> tuple[Tensor, Tensor]:
    """Tokens int64 [N] and log-probabilities FP32 [N] from FP32 logits [R, V]; the other arguments
    are those of ``Draws``.  A row with a NaN or an infinity gives token 0 and NaN.  A graph can
    capture this.
    """
    stats = chunk_stats(logits, rows, temperatures)
    tokens, log_probs = torch.empty_like(keys), torch.empty_like(temperatures)
    vocab_size, chunks = logits.shape[1], stats.shape[2]
    _draw_kernel[(rows.numel(),)](
        logits, rows, temperatures, keys, positions, stats, tokens, log_probs,
        vocab_size, logits.stride(0), LOGITS_CHUNK, chunks, triton.next_power_of_2(chunks),
        num_warps=8, enable_fp_fusion=False,
    )  # fmt: skip
    return tokens, log_probs


def sample_truncated(
    logits: Tensor,
    rows: Tensor,
    temperatures: Tensor,
    keys: Tensor,
    positions: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """``sample_tokens`` where some samples truncate their distribution by ``Draws.filters``
    (``isobit.kernels.spec.head.truncate``).

    -> tokens int64 [N], log-probabilities over the full vocabulary and under the truncated
    distribution, FP32 [N].  A sample without a filter, or greedy, gets what ``sample_tokens``
    gives.
    """
    # Every sample is drawn both ways: only the device knows which of them truncates.
    tokens, log_probs = sample_tokens(logits, rows, temperatures, keys, positions)
    log_sums, _ = log_sums_and_entropies(logits, temperatures, rows)

    # The last block is filled up from the first samples.
    samples = rows.numel()
    order = (
        torch.arange(-(-samples // _TRUNCATED_ROWS) * _TRUNCATED_ROWS, device=logits.device)
        % samples
    )
    blocks = [
        _draw_truncated(
            logits,
            *(
                x[block]
                for x in (rows, temperatures, log_sums, keys, positions, top_k, top_p, min_p)
            ),
        )
        for block in order.split(_TRUNCATED_ROWS)
    ]
    drawn, full, truncated = (torch.cat(parts)[:samples] for parts in zip(*blocks, strict=True))

    truncates = (temperatures > 0) & ((top_k > 0) | (top_p < 1) | (min_p > 0))
    return (
        torch.where(truncates, drawn, tokens),
        torch.where(truncates, full, log_probs),
        torch.where(truncates, truncated, log_probs),
    )


def _draw_truncated(
    logits: Tensor,
    rows: Tensor,
    temperatures: Tensor,
    log_sums: Tensor,
    keys: Tensor,
    positions: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    picked = logits.index_select(0, rows)
    finite = ~log_sums.isnan()
    # A row that is not finite is drawn from as if it were flat, so that no index leaves the
    # vocabulary; its log-probabilities stay NaN.
    log_probs = log_probs_of(picked, temperatures, log_sums).where(finite[:, None], 0.0)
    truncated = truncate(log_probs, top_k, top_p, min_p)
    tokens = draw(truncated, keys, positions)
    chosen = truncated.gather(1, tokens[:, None])[:, 0].where(finite, torch.nan)
    return tokens, log_probs_at(picked, tokens, temperatures, log_sums), chosen


def draw_tokens(logits: Tensor, draws: Draws) -> Drawn:
    """The next token of N samples from FP32 [R, V]; without filters the host does not wait."""
    noise = draws.rows, draws.temperatures, draws.keys, draws.positions
    if draws.filters is None:
        return Drawn(*sample_tokens(logits, *noise))
    return Drawn(*sample_truncated(logits, *noise, *draws.filters))
