"""lm_head and log-probability on a GPU: the logits of a batch never exist all at once, neither
forward nor backward.

    logits   = H W^T                                  BF16 operands, FP32 out; rows are independent
    log p, entropy                                    as in ``isobit.kernels.hopper.log_prob``
    d logits = (g (onehot(target) - p)
               - e p (log p + entropy)) / temperature rounded to BF16
    dH       = d logits W
    dW      += d logits^T H

g and e are the gradients of log p and of the entropy; without e the kernel has no trace of it.
Rows are taken in parts.  In the forward a part is about a gigabyte of logits, and its size changes
no bit: the product's rows do not depend on the batch, nor does anything after it.  The sampler
takes the same two steps, so a token's log-probability has the bits it was sampled with.  The
backward computes a part's logits, L and entropies again, by the same kernels, and adds the parts to
the head's gradient one by one.  Its parts take 2 GiB, 4 bytes a logit and 2 for its gradient: each
part reads and writes the head's gradient, 5 GB for 151,936 x 4096, so that small ones would cost
more than their products.
"""

# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportIndexIssue=false
# pyright: reportArgumentType=false, reportOperatorIssue=false
# (Triton's types know neither launch options nor what a kernel computes with)

import torch
import triton
import triton.language as tl

from isobit.kernels.hopper.gemm import bf16_gemm_nt
from isobit.kernels.hopper.linear_backward import bf16_gemm_tn
from isobit.kernels.hopper.log_prob import (
    inverse_temperature,
    log_probs_at,
    log_sums_and_entropies,
)
from isobit.kernels.hopper.sizes import backward_rows, forward_rows
from isobit.kernels.trace import observe

_WIDTH = 2048


def head_logits(hidden: torch.Tensor, head: torch.Tensor) -> torch.Tensor:
    """hidden BF16 [N, C], head BF16 [V, C] -> FP32 logits [N, V]."""
    return observe(bf16_gemm_nt(hidden, head, torch.float32), "lm_head")


def token_log_probs(
    hidden: torch.Tensor, head: torch.Tensor, targets: torch.Tensor, temperatures: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """hidden BF16 [N, C], head BF16 [V, C], targets int64 [N], temperatures FP32 [N] -> FP32
    log-probabilities [N] and entropies [N].

    Both are NaN for a row whose logits hold a NaN or an infinity.
    """
    rows = forward_rows(head.shape[0])
    log_probs, entropies = torch.empty_like(temperatures), torch.empty_like(temperatures)
    for first in range(0, hidden.shape[0], rows):
        part = slice(first, first + rows)
        logits = head_logits(hidden[part], head)
        log_sums, entropies[part] = log_sums_and_entropies(logits, temperatures[part])
        log_probs[part] = log_probs_at(logits, targets[part], temperatures[part], log_sums)
        del logits  # before the next part's are made
    return log_probs, entropies


def token_log_probs_backward(
    hidden: torch.Tensor,
    head: torch.Tensor,
    targets: torch.Tensor,
    temperatures: torch.Tensor,
    d_log_probs: torch.Tensor,
    grad: torch.Tensor,
    d_entropies: torch.Tensor | None = None,
) -> torch.Tensor:
    """Add the head's gradient to ``grad`` and return that of ``hidden``; the same bits every time
    at the same sizes.

    Args:
        hidden: BF16 [N, C].
        head: BF16 [V, C].
        targets: int64 [N].
        temperatures: FP32 [N].
        d_log_probs: FP32 [N], the loss's gradient by each log-probability.
        grad: FP32 [V, C].
        d_entropies: FP32 [N], that by each entropy; None for zeros.

    Returns:
        BF16 [N, C].  NaN where the logits are not finite.
    """
    rows = backward_rows(head.shape[0])
    d_hidden = torch.empty_like(hidden)
    for first in range(0, hidden.shape[0], rows):
        part = slice(first, first + rows)
        d_logits = _part_gradients(
            hidden[part],
            head,
            targets[part],
            temperatures[part],
            d_log_probs[part],
            None if d_entropies is None else d_entropies[part],
        )
        # FP32 out: cuBLAS may cut so long a sum, over the vocabulary, in pieces, and would add
        # those of a BF16 product in BF16.
        d_hidden[part] = torch.mm(d_logits, head, out_dtype=torch.float32)
        bf16_gemm_tn(d_logits, hidden[part], grad)
        del d_logits  # before the next part's are made
    return d_hidden


def _part_gradients(
    hidden: torch.Tensor,
    head: torch.Tensor,
    targets: torch.Tensor,
    temperatures: torch.Tensor,
    d_log_probs: torch.Tensor,
    d_entropies: torch.Tensor | None,
) -> torch.Tensor:
    """-> d logits BF16 [N, V]; the FP32 logits are gone when this returns."""
    logits = bf16_gemm_nt(hidden, head, torch.float32)
    log_sums, entropies = log_sums_and_entropies(logits, temperatures)
    of_entropies = None if d_entropies is None else (entropies, d_entropies)
    return logit_gradients(logits, targets, temperatures, log_sums, d_log_probs, of_entropies)


def logit_gradients(
    logits: torch.Tensor,
    targets: torch.Tensor,
    temperatures: torch.Tensor,
    log_sums: torch.Tensor,
    d_log_probs: torch.Tensor,
    of_entropies: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """FP32 logits [N, V] and their L [N], int64 targets [N], FP32 temperatures and d
    log-probabilities [N], and the entropies with their gradients, FP32 [N] -> d logits, BF16
    [N, V].
    """
    rows, vocab_size = logits.shape
    assert logits.is_contiguous()
    out = torch.empty(logits.shape, dtype=torch.bfloat16, device=logits.device)
    grid = (rows * triton.cdiv(vocab_size, _WIDTH),)
    entropies, d_entropies = of_entropies or (None, None)
    _gradient_kernel[grid](
        logits, targets, temperatures, log_sums, d_log_probs, entropies, d_entropies, out,
        vocab_size, _WIDTH, num_warps=4, enable_fp_fusion=False
    )  # fmt: skip
    return out


@triton.jit
def _gradient_kernel(
    LOGITS, TARGET, TEMPERATURE, LOG_SUM, D_LOG_PROB, ENTROPY, D_ENTROPY, OUT, V: tl.constexpr,
    WIDTH: tl.constexpr
):  # fmt: skip
    """One program WIDTH entries of a row; a row has ``pieces`` programs, which follow each other.

    The scaled logit x has the forward's own bits, and so has L: p is what was sampled from.
    """
    pieces: tl.constexpr = (V + WIDTH - 1) // WIDTH
    n = (tl.program_id(0) // pieces).to(tl.int64)
    column = tl.program_id(0) % pieces * WIDTH + tl.arange(0, WIDTH)
    inside = column < V
    inverse = inverse_temperature(tl.load(TEMPERATURE + n))
    scaled = tl.load(D_LOG_PROB + n) * inverse
    x = tl.load(LOGITS + n * V + column, mask=inside, other=0.0) * inverse
    log_p = x - tl.load(LOG_SUM + n)
    p = tl.exp(log_p)
    onehot = (column == tl.load(TARGET + n)).to(tl.float32)
    gradient = (onehot - p) * scaled
    if D_ENTROPY is not None:
        of_entropy = tl.load(D_ENTROPY + n) * inverse
        gradient -= p * (log_p + tl.load(ENTROPY + n)) * of_entropy
    tl.store(OUT + n * V + column, gradient.to(tl.bfloat16), mask=inside)
