"""lm_head and log-probability on a GPU: the logits of a batch never exist all at once.

    logits = H W^T (BF16 operands, FP32 out, rows free of the batch)      log p and entropy as in ``isobit.kernels.hopper.log_prob``

Rows are taken in parts of about a gigabyte of logits.  A part's size changes no bit: the product's rows do not depend on the batch, nor
does anything after it.  The sampler takes the same two steps, so a token's log-probability has the bits it was sampled with.
"""

import torch

from isobit.kernels.hopper.gemm import gemm_bf16
from isobit.kernels.hopper.log_prob import log_probs_at, log_sums_and_entropies
from isobit.kernels.trace import observe

_LOGITS = 1 << 28
_TILE = 128


def token_log_probs(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, temperatures: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """hidden BF16 [N, C], head BF16 [V, C], targets int64 [N], temperatures FP32 [N] -> FP32 log-probabilities [N] and entropies [N].

    Both are NaN for a row whose logits hold a NaN or an infinity.  Forward only.
    """
    rows = max(1, _LOGITS // weight.shape[0] // _TILE) * _TILE
    log_probs, entropies = torch.empty_like(temperatures), torch.empty_like(temperatures)
    for first in range(0, hidden.shape[0], rows):
        part = slice(first, first + rows)
        logits = observe(gemm_bf16(hidden[part], weight, torch.float32), "lm_head")
        log_sums, entropies[part] = log_sums_and_entropies(logits, temperatures[part])
        log_probs[part] = log_probs_at(logits, targets[part], temperatures[part], log_sums)
    return log_probs, entropies
