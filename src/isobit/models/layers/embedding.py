"""The embedding: a token's row of the published table begins its residual stream."""

from dataclasses import dataclass

import torch

from isobit.kernels.trace import observe
from isobit.models.layers.unit import Gradient, Master
from isobit.models.weights import Weights

NAME = "embed_tokens.weight"


@dataclass(frozen=True, slots=True)
class Embedding:
    """The table [V, C]."""

    vocab_size: int
    hidden_size: int

    def masters(self) -> dict[str, Master]:
        """The table."""
        rows = {f"model.{NAME}": self.vocab_size}
        return {NAME: Master((self.vocab_size, self.hidden_size), rows)}

    def forward(self, weights: Weights, token_ids: torch.Tensor) -> torch.Tensor:
        """int64 [T] -> [T, C]."""
        return observe(weights.backend.embedding(token_ids, weights.plain[NAME]), "embed_tokens")

    def backward(
        self, weights: Weights, gradient: Gradient, d: torch.Tensor, token_ids: torch.Tensor
    ) -> None:
        """d [T, C] is the gradient of what ``forward`` gave."""
        weights.backend.embedding_backward(d, token_ids, gradient(NAME))
