"""What a forward over packed sequences says of the tokens in the loss mask."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class RouterScores:
    """The routers of S sequences over all sparse layers, on the host
    (``isobit.kernels.router_loss``).
    """

    balance: torch.Tensor
    """FP32 [S]: the mean over the layers; 1 where all experts are chosen equally often."""
    z: torch.Tensor
    """FP32 [S], likewise."""
    load: torch.Tensor
    """int64 [layers, E]: choices that fell on each expert, of all sequences together."""


@dataclass(frozen=True, slots=True)
class TokenScores:
    """Of the N targets of a batch, on the host; FP32 [N] where nothing else is said."""

    log_probs: torch.Tensor
    """At the temperature that each target was drawn with; [0] for a model without lm_head."""
    entropies: torch.Tensor
    """Of the distribution that each target was drawn from, nats; [0] likewise."""
    values: torch.Tensor | None = None
    """By a scalar head, at the row that predicts each target; None where the model has none."""
    routings: torch.Tensor | None = None
    """int64 [N]: the digest of the experts at the row that predicts each target
    (``isobit.models.routes``); None for a dense model.
    """
    router: RouterScores | None = None
    """Of a mixture of experts in a pass that is learnt from."""
