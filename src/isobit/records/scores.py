"""What a forward over packed sequences says of the tokens in the loss mask."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class TokenScores:
    """Of the N targets of a batch, FP32 [N] each, on the host."""

    log_probs: torch.Tensor
    """At the temperature that each target was drawn with; [0] for a model without lm_head."""
    entropies: torch.Tensor
    """Of the distribution that each target was drawn from, nats; [0] likewise."""
    values: torch.Tensor | None = None
    """By a scalar head, at the row that predicts each target; None where the model has none."""
