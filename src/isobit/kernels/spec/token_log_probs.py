"""lm_head and log-probability as one operation: the logits of a batch never exist all at once.

    logits = H W^T (exact GEMM, FP32)      log p = log_softmax(logits / temperature) at the target tokens      entropy = -sum p log p

Rows are taken in chunks of at most ``_CHUNK`` logits.  The backward recomputes a chunk's logits
with a plain FP32 GEMM:

    d logits = g (onehot(target) - p) / temperature      dH = d logits W      dW = d logits^T H
"""

from typing import Any

import torch

from isobit.kernels.spec.gemm import gemm_snapped
from isobit.kernels.spec.grid import snap_rows
from isobit.kernels.spec.log_prob import log_softmax
from isobit.kernels.trace import observe

_CHUNK = 1 << 22


def head_logits(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """hidden [N, C], published weight [V, C] (snapped) -> FP32 logits [N, V]."""
    return observe(gemm_snapped(snap_rows(hidden), weight), "lm_head")


def token_log_probs(
    hidden: torch.Tensor,
    master: torch.Tensor | None,
    weight: torch.Tensor,
    targets: torch.Tensor,
    temperatures: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """hidden [N, C], head [V, C], targets int64 [N], temperatures FP32 [N] -> FP32
    log-probabilities [N] and entropies [N].

    Gradients of the log-probabilities reach hidden and the FP32 master; the entropies carry none.
    """
    return _TokenLogProbs.apply(hidden, master, weight, targets, temperatures)  # pyright: ignore[reportReturnType]


class _TokenLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        master: torch.Tensor,
        weight: torch.Tensor,
        targets: torch.Tensor,
        temperatures: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rows = _chunk_rows(weight)
        picked, entropies = (
            [hidden.new_empty(0, dtype=torch.float32)],
            [hidden.new_empty(0, dtype=torch.float32)],
        )
        for h, target, temperature in zip(
            hidden.split(rows), targets.split(rows), temperatures.split(rows), strict=True
        ):
            log_probs = log_softmax(head_logits(h, weight), temperature)
            picked.append(log_probs.gather(1, target[:, None])[:, 0])
            entropies.append(-(log_probs.exp() * log_probs).sum(-1))
        entropy = torch.cat(entropies)
        ctx.save_for_backward(hidden, weight, targets, temperatures)
        ctx.mark_non_differentiable(entropy)
        return torch.cat(picked), entropy

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, targets, temperatures = ctx.saved_tensors
        wide = weight.float()
        d_hidden, d_weight = torch.empty_like(hidden), torch.zeros_like(wide)
        rows = _chunk_rows(weight)
        for start in range(0, hidden.shape[0], rows):
            part = slice(start, start + rows)
            h, temperature = hidden[part].float(), temperatures[part, None]
            scaled = gradients[0][part, None] / temperature
            d_logits = torch.softmax(h @ wide.t() / temperature, -1).mul_(-scaled)
            d_logits.scatter_add_(1, targets[part, None], scaled)
            d_hidden[part] = (d_logits @ wide).to(hidden.dtype)
            d_weight.addmm_(d_logits.t(), h)
        return d_hidden, d_weight, None, None, None


def _chunk_rows(weight: torch.Tensor) -> int:
    return max(1, _CHUNK // weight.shape[0])
