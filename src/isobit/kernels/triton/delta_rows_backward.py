"""The backward of ``isobit.kernels.triton.delta_rows``: from the gradients of q, k, v, g and beta
to those of the convolution's inputs, of a and b, and of the weights.

With m the convolution's output (rounded as in the forward), s = sigmoid(m), y = m s, and of q and k
z = y / |y|, whose gradient is summed over the value heads of a key head in ascending order:

    dy      1 / |y| (dz - z <z, dz>), of v that of v
    dm      dy s (1 + m (1 - s))                        FP32 [T, channels]
    dx_t    sum over back = 0 .. width - 1 of dm_(t + back) w_(width - 1 - back), of one sequence
    dw      sum over tokens of dm_t x_(t - back), by blocks of tokens, joined in one order

The sums repeat their bits for the same call.  Shapes are those of ``delta_rows``.
"""

# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportIndexIssue=false
# pyright: reportArgumentType=false, reportOperatorIssue=false
# (Triton's types know neither launch options nor what a kernel computes with)

import torch
import triton
import triton.language as tl

from isobit.kernels.operands import DeltaGradients, DeltaInputs, DeltaWeights
from isobit.kernels.spec.delta_rule import gradients_of
from isobit.kernels.triton.delta_rows import (
    EPSILON,
    by_place,
    padded,
    sigmoid,
    vectors_at_once,
    vectors_of_program,
)
from isobit.kernels.triton.sizes import DELTA_TOKENS

ROWS, SUMMED, CHANNELS = 16, 8, 128
"""Tokens of dx and of dw, and channels, that a program of the convolution's backward has at once.
"""


@triton.jit(do_not_specialize=["tokens"])
def _mixed_kernel(
    X, CONVOLUTION, POSITION, DQ, DK_, DV_, D_MIXED, tokens, H: tl.constexpr, KH: tl.constexpr,
    DK: tl.constexpr, DV: tl.constexpr, WIDTH: tl.constexpr, SIZE: tl.constexpr,
    VECTORS: tl.constexpr, ROOT: tl.constexpr,
):  # fmt: skip
    """One program VECTORS tokens of a head, as in the forward.  CONVOLUTION [WIDTH, channels]."""
    channels: tl.constexpr = 2 * KH * DK + H * DV
    is_key, size, t, head = vectors_of_program(H, KH, DK, DV, VECTORS)
    i = tl.arange(0, SIZE)[None, :]
    inside = (t < tokens) & (i < size)
    channel = tl.where(is_key, 0, 2 * KH * DK) + head * size + i
    position = tl.load(POSITION + t, mask=t < tokens, other=0)
    total = tl.zeros([VECTORS, SIZE], tl.float32)
    for place in tl.static_range(WIDTH):
        back = WIDTH - 1 - place
        at = (t - back) * channels + channel
        x = tl.load(X + at, mask=inside & (position >= back), other=0.0).to(tl.float32)
        factor = tl.load(CONVOLUTION + place * channels + channel, mask=inside, other=0.0)
        total += x * factor.to(tl.float32)
    m = total.to(X.dtype.element_ty).to(tl.float32)
    s = sigmoid(m)
    if is_key:
        repeat: tl.constexpr = H // KH
        is_query = head < KH
        of_head = (t * H + tl.where(is_query, head, head - KH) * repeat) * DK + i
        d_unit = tl.zeros([VECTORS, SIZE], tl.float32)
        for one in tl.static_range(repeat):
            d_unit += tl.load(DQ + of_head + one * DK, mask=inside & is_query, other=0.0)
            d_unit += tl.load(DK_ + of_head + one * DK, mask=inside & (head >= KH), other=0.0)
        d_unit *= tl.where(is_query, ROOT, 1.0)
        active = m * s
        inverse = tl.rsqrt(tl.sum(active * active, 1)[:, None] + EPSILON)
        unit = active * inverse
        d_active = inverse * (d_unit - unit * tl.sum(unit * d_unit, 1)[:, None])
    else:
        d_active = tl.load(DV_ + (t * H + head) * DV + i, mask=inside, other=0.0)
    d_mixed = d_active * (s * (1.0 + m * (1.0 - s)))
    tl.store(D_MIXED + t * channels + channel, d_mixed, mask=inside)


@triton.jit(do_not_specialize=["tokens"])
def _inputs_kernel(
    D_MIXED, CONVOLUTION, POSITION, DX, tokens, channels: tl.constexpr, WIDTH: tl.constexpr,
    ROWS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """One program ROWS x CHANNELS of dx; CONVOLUTION [WIDTH, channels]."""
    t = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    channel = (tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS))[None, :]
    at = t * channels + channel
    dx = tl.zeros([ROWS, CHANNELS], tl.float32)
    for back in tl.static_range(WIDTH):
        later = tl.load(POSITION + t + back, mask=t + back < tokens, other=0)
        is_its = (t + back < tokens) & (later >= back) & (channel < channels)
        sent = tl.load(D_MIXED + at + back * channels, mask=is_its, other=0.0)
        place = CONVOLUTION + (WIDTH - 1 - back) * channels + channel
        dx += sent * tl.load(place, mask=is_its, other=0.0).to(tl.float32)
    inside = (t < tokens) & (channel < channels)
    tl.store(DX + at, dx.to(DX.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["tokens"])
def _convolution_sums_kernel(
    D_MIXED, X, POSITION, SUMS, tokens, channels: tl.constexpr, WIDTH: tl.constexpr,
    PLACES: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """One program CHANNELS of dw of TOKENS tokens, ROWS at once; SUMS [blocks of tokens, WIDTH,
    channels].  PLACES is WIDTH, padded.
    """
    block = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, PLACES)[:, None, None]
    back = WIDTH - 1 - place
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    own = channel[None, None, :]
    total = tl.zeros([PLACES, ROWS, CHANNELS], tl.float32)
    for first in range(0, TOKENS, ROWS):
        t = (block * TOKENS + first + tl.arange(0, ROWS))[None, :, None]
        position = tl.load(POSITION + t, mask=t < tokens, other=-1)
        inside = (position >= 0) & (own < channels)
        d_mixed = tl.load(D_MIXED + t * channels + own, mask=inside, other=0.0)
        is_its = inside & (place < WIDTH) & (position >= back)
        x = tl.load(X + (t - back) * channels + own, mask=is_its, other=0.0)
        total += d_mixed * x.to(tl.float32)
    place, channel = tl.arange(0, PLACES)[:, None], channel[None, :]
    to = SUMS + (block * WIDTH + place) * channels + channel
    tl.store(to, tl.sum(total, 1), mask=(place < WIDTH) & (channel < channels))


def rows_backward(
    inputs: DeltaInputs,
    d_rows: tuple[torch.Tensor, ...],
    weights: DeltaWeights,
    positions: torch.Tensor,
    gradients: DeltaGradients,
) -> DeltaInputs:
    """The gradients of x, a and b in their dtype; adds to those of the weights.

    Args:
        d_rows: FP32 of q and k by value heads [T, H, DK], v [T, H, DV], g and beta [T, H].
        positions: int64 [T], the place of each token in its sequence.
    """
    shape, x = weights.shape, inputs.x
    tokens, heads, key_heads = len(x), shape.value_heads, shape.key_heads
    dq, dk, dv, d_decay, d_beta = d_rows
    d_mixed = torch.empty(tokens, shape.channels, dtype=torch.float32, device=x.device)
    convolution = by_place(weights.convolution)
    size = padded(max(shape.key_dim, shape.value_dim))
    vectors = vectors_at_once(tokens, size)
    _mixed_kernel[(triton.cdiv(tokens, vectors), 2 * key_heads + heads)](
        x, convolution, positions, dq, dk, dv, d_mixed, tokens, heads, key_heads,
        shape.key_dim, shape.value_dim, shape.width, size, vectors,
        shape.key_dim**-0.5, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    dx, blocks = torch.empty_like(x), triton.cdiv(tokens, DELTA_TOKENS)
    sums = d_mixed.new_empty(blocks, shape.width, shape.channels)
    of_channels = triton.cdiv(shape.channels, CHANNELS)
    _inputs_kernel[(triton.cdiv(tokens, ROWS), of_channels)](
        d_mixed, convolution, positions, dx, tokens, shape.channels, shape.width, ROWS,
        CHANNELS, num_warps=4,
    )  # fmt: skip
    _convolution_sums_kernel[(blocks, of_channels)](
        d_mixed, x, positions, sums, tokens, shape.channels, shape.width,
        triton.next_power_of_2(shape.width), DELTA_TOKENS, SUMMED, CHANNELS, num_warps=4,
    )  # fmt: skip
    gradients.convolution.add_(sums.sum(0).t())
    given = inputs.a, inputs.b, weights.a_log, weights.dt_bias
    da, db, d_rate, d_step = gradients_of(_steps, given, (d_decay, d_beta))
    gradients.a_log.add_(d_rate)
    gradients.dt_bias.add_(d_step)
    return DeltaInputs(dx, da.to(x.dtype), db.to(x.dtype))


def _steps(
    a: torch.Tensor, b: torch.Tensor, rate: torch.Tensor, step: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """a and b [T, H] -> g and beta."""
    decay = -torch.exp(rate) * torch.nn.functional.softplus(a + step)
    return decay, torch.sigmoid(b)
