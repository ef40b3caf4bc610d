"""lm_head on Hopper, with its log-probabilities (``isobit.kernels.triton.head``).

The logits of a batch never exist all at once:

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
"""

import torch
import torch.nn.functional as F

from isobit.kernels.hopper.gemm import bf16_gemm_nt
from isobit.kernels.hopper.int8 import int8_gemm_nt
from isobit.kernels.hopper.linear import bf16_gemm_tn
from isobit.kernels.hopper.sizes import HEAD_ROWS, backward_rows, forward_rows
from isobit.kernels.operands import HeadWeight, observe
from isobit.kernels.triton.head import log_probs_at, log_sums_and_entropies, logit_gradients
from isobit.kernels.triton.quantise import quantise_int8


def head_logits(hidden: torch.Tensor, head: HeadWeight, drawn: int | None = None) -> torch.Tensor:
    """hidden BF16 [N, C], head [V, C] -> FP32 logits [N, V] of its first ``drawn`` rows: then a
    view, whose rows are those of the product apart.
    """
    head = head.first(_in_tiles(drawn))
    count = head.table.shape[0]
    rows = -(-count // HEAD_ROWS) * HEAD_ROWS
    whole = torch.empty((hidden.shape[0], rows), dtype=torch.float32, device=hidden.device)
    logits = whole[:, :count]
    if head.int8 is None:
        bf16_gemm_nt(hidden, head.table, out=logits)
    else:
        x = quantise_int8(hidden)
        observe(x.values, "lm_head", "input", scales=x.scales)
        int8_gemm_nt(x, head.int8, out=logits)
    return observe(logits[:, : drawn or count], "lm_head")


def _in_tiles(drawn: int | None) -> int | None:
    """The first ``drawn`` rows of the head, and those that fill up their last tile."""
    return None if drawn is None else -(-drawn // HEAD_ROWS) * HEAD_ROWS


def token_log_probs(
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
        logits = head_logits(hidden[part], head, drawn)
        log_sums, entropies[part] = log_sums_and_entropies(logits, temperatures[part])
        log_probs[part] = log_probs_at(logits, targets[part], temperatures[part], log_sums)
        del logits  # before the next part's are made
    return log_probs, entropies


def token_log_probs_backward(
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
            hidden[part], head, targets[part], temperatures[part], d_log_probs[part],
            None if d_entropies is None else d_entropies[part], drawn,
        )  # fmt: skip
        # FP32 out: cuBLAS may cut so long a sum, over the vocabulary, in pieces, and would add
        # those of a BF16 product in BF16.
        d_hidden[part] = torch.mm(d_logits, head.table, out_dtype=torch.float32)
        if grad is not None:
            bf16_gemm_tn(d_logits, hidden[part], grad[: _in_tiles(drawn)])
        del d_logits  # before the next part's are made
    return d_hidden


def head_logits_backward(
    hidden: torch.Tensor, head: HeadWeight, d_logits: torch.Tensor, grad: torch.Tensor | None
) -> torch.Tensor:
    """The gradient of the logits of the head's first V' rows, FP32 [N, V'], which is rounded to
    BF16 -> that of hidden, BF16 [N, C]; adds the head's to ``grad``, FP32 [V, C], if it is given.
    """
    columns = d_logits.shape[1]
    table = head.first(_in_tiles(columns)).table
    d = F.pad(d_logits.to(torch.bfloat16), (0, table.shape[0] - columns))
    if grad is not None:
        bf16_gemm_tn(d, hidden, grad[: table.shape[0]])
    return torch.mm(d, table, out_dtype=torch.float32).to(hidden.dtype)


def _part_gradients(
    hidden: torch.Tensor,
    head: HeadWeight,
    targets: torch.Tensor,
    temperatures: torch.Tensor,
    d_log_probs: torch.Tensor,
    d_entropies: torch.Tensor | None,
    drawn: int | None,
) -> torch.Tensor:
    """-> d logits BF16 [N, V], of all rows; the FP32 logits are freed when this returns."""
    logits = head_logits(hidden, head, drawn)
    log_sums, entropies = log_sums_and_entropies(logits, temperatures)
    of_entropies = None if d_entropies is None else (entropies, d_entropies)
    return logit_gradients(
        logits, targets, temperatures, log_sums, d_log_probs, of_entropies, head.table.shape[0]
    )
