"""What an objective takes and gives: the seam between the trainer and the family of algorithms.

An update is cut into micro-batches by a token budget, and the loss must not depend on the
cut.  So an objective is asked twice: once for the weight of every response token, with the whole
step in view, and then for the weighted **sum** of one micro-batch.  Sums over the micro-batches of
a step add up to the step's loss, and so do their gradients:

    loss = sum over micro-batches m, sum over tokens i of m:   w[i] * l[i]

Shapes: N response tokens of one micro-batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from isobit.records.batch import PackedBatch


@dataclass(frozen=True, slots=True)
class LossOutputs:
    """The micro-batch's part of the loss, and what to report about it.

    ``sums`` are added over the micro-batches and divided by the number of tokens, ``maxima`` are
    joined by ``max``.
    """

    loss: torch.Tensor  # float32 scalar
    sums: dict[str, float] = field(default_factory=dict)
    maxima: dict[str, float] = field(default_factory=dict)


class Objective(Protocol):
    """What the trainer minimises."""

    def weights(self, sequences: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """``PackedBatch.sequence`` of every micro-batch of a step (int64 [N] each) -> the weight of
        every response token in the mean over the step (float32 [N] each).
        """
        ...

    def loss(
        self, log_probs: torch.Tensor, batch: PackedBatch, weights: torch.Tensor
    ) -> LossOutputs:
        """The weighted sum over the response tokens of one micro-batch.

        ``log_probs`` float32 [N] are of the policy being trained and carry the gradient; ``batch``
        has what else is known of the tokens, and ``weights`` float32 [N] their shares.
        """
        ...


class Algorithm(Objective, Protocol):
    """An objective of reinforcement learning: it also turns the rewards of a group into
    advantages.
    """

    def advantages(self, rewards: Sequence[float | None]) -> list[float | None]:
        """Rewards of the samples of one prompt -> one advantage each; None leaves the sample out of
        training.
        """
        ...
