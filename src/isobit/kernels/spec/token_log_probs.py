"""lm_head and log-probability as one operation: the logits of a batch never exist all at once.

    logits  = H W^T                                   exact GEMM, FP32
    log p   = log_softmax(logits / temperature)       at the target tokens
    entropy = -sum p log p

Rows are taken in chunks of at most ``CHUNK`` logits.  The backward recomputes a chunk's logits
with a plain FP32 GEMM:

    d logits = (g (onehot(target) - p) - e p (log p + entropy)) / temperature
    dH = d logits W      dW = d logits^T H

of the gradients g of log p and e of the entropy.
"""

import torch

from isobit.kernels.spec.gemm import grid_gemm_nt
from isobit.kernels.spec.grid import snap_rows
from isobit.kernels.spec.log_prob import log_softmax
from isobit.kernels.trace import observe

CHUNK = 1 << 22


def head_logits(hidden: torch.Tensor, head: torch.Tensor) -> torch.Tensor:
    """hidden [N, C], published head [V, C] (snapped) -> FP32 logits [N, V]."""
    return observe(grid_gemm_nt(snap_rows(hidden), head), "lm_head")


def token_log_probs(
    hidden: torch.Tensor,
    head: torch.Tensor,
    targets: torch.Tensor,
    temperatures: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """hidden [N, C], published head [V, C], targets int64 [N], temperatures FP32 [N] -> FP32
    log-probabilities [N] and entropies [N].

    Raises NonFiniteError where logits are not finite.
    """
    rows = _chunk_rows(head)
    picked = [hidden.new_empty(0, dtype=torch.float32)]
    entropies = [hidden.new_empty(0, dtype=torch.float32)]
    parts = (x.split(rows) for x in (hidden, targets, temperatures))
    for h, target, temperature in zip(*parts, strict=True):
        log_probs = log_softmax(head_logits(h, head), temperature)
        picked.append(log_probs.gather(1, target[:, None])[:, 0])
        entropies.append(-(log_probs.exp() * log_probs).sum(-1))
    return torch.cat(picked), torch.cat(entropies)


def token_log_probs_backward(
    hidden: torch.Tensor,
    head: torch.Tensor,
    targets: torch.Tensor,
    temperatures: torch.Tensor,
    d_log_probs: torch.Tensor,
    grad: torch.Tensor,
    d_entropies: torch.Tensor | None = None,
) -> torch.Tensor:
    """The gradients of the log-probabilities and of the entropies, FP32 [N] each, None for zeros ->
    that of hidden [N, C]; grad, FP32 [V, C], += that of the head.
    """
    wide = head.float()
    d_hidden, d_head = torch.empty_like(hidden), torch.zeros_like(wide)
    rows = _chunk_rows(head)
    for start in range(0, hidden.shape[0], rows):
        part = slice(start, start + rows)
        h, temperature = hidden[part].float(), temperatures[part, None]
        d_logits = _scaled_gradients(
            h @ wide.t() / temperature,
            targets[part, None],
            d_log_probs[part, None] / temperature,
            None if d_entropies is None else d_entropies[part, None] / temperature,
        )
        d_hidden[part] = (d_logits @ wide).to(hidden.dtype)
        d_head.addmm_(d_logits.t(), h)
    grad.add_(d_head)
    return d_hidden


def _scaled_gradients(
    logits: torch.Tensor,
    targets: torch.Tensor,
    d_log_probs: torch.Tensor,
    d_entropies: torch.Tensor | None,
) -> torch.Tensor:
    """d logits [N, V], from the logits over the temperature and gradients [N, 1] over it."""
    p = torch.softmax(logits, -1)
    if d_entropies is None:
        d_logits = p.mul_(-d_log_probs)
    else:
        log_p = torch.log_softmax(logits, -1)
        entropies = -(p * log_p).sum(-1, keepdim=True)
        d_logits = p.mul_(log_p.add_(entropies).mul_(-d_entropies).sub_(d_log_probs))
    return d_logits.scatter_add_(1, targets, d_log_probs)


def _chunk_rows(head: torch.Tensor) -> int:
    return max(1, CHUNK // head.shape[0])
