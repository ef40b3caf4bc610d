"""lm_head: from hidden states to logits (rollout) and to the log-probabilities of given tokens
(scoring, training).  The logits of a batch never exist all at once, but where the rollout draws.
"""

from dataclasses import dataclass

import torch

from isobit.models.layers import embedding
from isobit.models.layers.unit import Gradient, Master
from isobit.models.weights import Weights

PUBLISHED = "head"
"""What lm_head multiplies with, among the plain tensors of ``Weights``."""


@dataclass(frozen=True, slots=True)
class Head:
    """The matrix [V, C]: its own master, or the embedding's where they are tied."""

    vocab_size: int
    hidden_size: int
    tied: bool

    @property
    def master(self) -> str:
        """The name of the master that it multiplies with."""
        return embedding.NAME if self.tied else "lm_head.weight"

    def masters(self) -> dict[str, Master]:
        """The matrix; none where it is the embedding's."""
        if self.tied:
            return {}
        rows = {self.master: self.vocab_size}
        return {self.master: Master((self.vocab_size, self.hidden_size), rows)}

    def logits(self, weights: Weights, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [N, C] -> FP32 logits [N, V]."""
        mine = weights.backend.head_logits(hidden, weights.plain[PUBLISHED])
        return weights.cut.columns(mine, weights.cut.vocabulary)

    def token_log_probs(
        self,
        weights: Weights,
        hidden: torch.Tensor,
        targets: torch.Tensor,
        temperatures: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """hidden [N, C], targets int64 [N], temperatures FP32 [N] -> FP32 log-probabilities [N] and
        entropies [N].
        """
        head = weights.plain[PUBLISHED]
        return weights.backend.token_log_probs(hidden, head, targets, temperatures)

    def backward(
        self,
        weights: Weights,
        gradient: Gradient,
        hidden: torch.Tensor,
        targets: torch.Tensor,
        temperatures: torch.Tensor,
        d_log_probs: torch.Tensor,
        d_entropies: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The gradients of the log-probabilities and of the entropies, FP32 [N] each, None for
        zeros -> that of ``hidden`` [N, C].
        """
        head = weights.plain[PUBLISHED]
        return weights.backend.token_log_probs_backward(
            hidden, head, targets, temperatures, d_log_probs, gradient(self.master), d_entropies
        )
