"""What is computed: sequences of one length, laid end to end, and the FLOPs that a model's shape makes of them."""

from dataclasses import dataclass
from math import prod

import torch

from isobit.models.config import ModelConfig
from isobit.models.policy import master_shapes
from isobit.models.shapes import model_shape


@dataclass(frozen=True, slots=True)
class Case:
    """A micro-batch."""

    shape: str
    length: int
    sequences: int
    recompute: bool

    @property
    def tokens(self) -> int:
        """Of all sequences."""
        return self.length * self.sequences

    @property
    def config(self) -> ModelConfig:
        """The model."""
        return model_shape(self.shape)

    def token_ids(self, device: torch.device | str) -> torch.Tensor:
        """Random tokens, int64 [sequences, length], the same on every side."""
        generator = torch.Generator().manual_seed(0)
        return torch.randint(self.config.vocab_size, (self.sequences, self.length), generator=generator).to(device)

    def weights(self, device: torch.device | str) -> torch.Tensor:
        """What each predicted token's log-probability counts in the loss, FP32 [sequences, length - 1]."""
        generator = torch.Generator().manual_seed(1)
        return torch.randn((self.sequences, self.length - 1), generator=generator).to(device) / self.tokens


def flops(case: Case) -> float:
    """Of forward and backward, recomputation not counted: 6 a parameter and token, and the products of attention over L / 2 keys."""
    config = case.config
    parameters = sum(prod(shape) for name, shape in master_shapes(config).items() if name != "embed_tokens.weight")
    if config.tied_embeddings:
        parameters += config.vocab_size * config.hidden_size
    attention = 3 * 4 * (case.length / 2) * config.num_heads * config.head_dim * config.num_layers
    return case.tokens * (6 * parameters + attention)
