"""The backward of RMSNorm on Hopper, with the residual's gradient and the weight's, in one pass
over the tokens.

    n  = h / sqrt(mean(h^2) + eps)              h: the norm's input, the residual stream
    s  = dy w
    dh = d_residual + (s - n mean(s n)) / rms   FP32, rounded to BF16 once; without a residual the
                                                second term alone
    dw += sum over tokens of dy n               FP32

A token's sums are taken by one program in a layout that depends on the number of channels alone, so
a row of dh depends on no other row. At most BLOCKS programs walk the tokens, each a run of
neighbours in ascending order, and leave their sums of dy n to ``add_block_sums``: no atomics, and
one order for every number of tokens.  The kernel moves 8 bytes a number, and BLOCKS sums of 4 bytes
a channel.
"""

# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportIndexIssue=false
# pyright: reportArgumentType=false, reportReturnType=false
# (Triton's types know neither launch options nor what a kernel computes with)

import torch
import triton
import triton.language as tl

from isobit.kernels.hopper.block_sums import add_block_sums

BLOCKS = 512  # almost four programs for each of an H200's 132 multiprocessors
_NUMBERS = 2048  # that a program holds at once: rows of fewer channels are taken several at a time
_NUMBERS_OF_WARP = (
    512  # at 1024 the registers leave room for 8 warps a multiprocessor instead of 16
)
_MOST_WARPS = 16  # beyond 8192 channels a few registers spill, with 32 warps many


@triton.jit(do_not_specialize=["tokens", "tokens_of_block"])
def _norm_kernel(
    DY, H, WEIGHT, D_RESIDUAL, DH, SUMS, tokens, tokens_of_block, epsilon, C: tl.constexpr,
    WIDTH: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    """One program a block of tokens, ROWS at a time, of C channels padded to WIDTH."""
    block = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDTH)
    weight = tl.load(WEIGHT + column, mask=column < C, other=0.0).to(tl.float32)[None, :]
    sums = tl.zeros([WIDTH], tl.float32)
    end = tl.minimum((block + 1) * tokens_of_block, tokens)
    for first in range(block * tokens_of_block, end, ROWS):
        t = first + tl.arange(0, ROWS)
        inside = (t < end)[:, None] & (column < C)[None, :]
        at = t[:, None] * C + column[None, :]
        dy = tl.load(DY + at, mask=inside, other=0.0).to(tl.float32)
        h = tl.load(H + at, mask=inside, other=0.0).to(tl.float32)
        inverse = 1.0 / tl.sqrt_rn(tl.sum(h * h, 1) / C + epsilon)
        normalised = h * inverse[:, None]
        scaled = dy * weight
        mean = tl.sum(scaled * normalised, 1) / C
        dh = (scaled - normalised * mean[:, None]) * inverse[:, None]
        if D_RESIDUAL is not None:
            dh += tl.load(D_RESIDUAL + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(DH + at, dh.to(tl.bfloat16), mask=inside)
        sums += tl.sum(dy * normalised, 0)
    tl.store(SUMS + block * C + column, sums, mask=column < C)


def layout(columns: int) -> tuple[int, int, int]:
    """Channels -> their number as a power of two, and the rows and warps of a program."""
    width = triton.next_power_of_2(columns)
    return width, max(1, _NUMBERS // width), min(max(4, width // _NUMBERS_OF_WARP), _MOST_WARPS)


def rms_norm_backward(
    dy: torch.Tensor,
    h: torch.Tensor,
    weight: torch.Tensor,
    epsilon: float,
    d_residual: torch.Tensor | None,
    grad: torch.Tensor,
) -> torch.Tensor:
    """Gradients of ``y = RMSNorm(h)``: all BF16 [T, C] and contiguous, the published weight BF16
    [C] -> BF16 [T, C] for h.

    ``d_residual`` is the gradient that reaches h past the norm, or None.  The weight's is added to
    ``grad``, FP32 [C].
    """
    tokens, columns = h.shape
    dh = torch.empty_like(h)
    if not tokens:
        return dh
    width, rows, warps = layout(columns)
    tokens_of_block = triton.cdiv(triton.cdiv(tokens, BLOCKS), rows) * rows
    blocks = triton.cdiv(tokens, tokens_of_block)
    sums = torch.empty((blocks, columns), dtype=torch.float32, device=h.device)
    _norm_kernel[(blocks,)](
        dy, h, weight, d_residual, dh, sums, tokens, tokens_of_block, epsilon, columns, width, rows,
        num_warps=warps, enable_fp_fusion=False,
    )  # fmt: skip
    add_block_sums(sums, grad)
    return dh
