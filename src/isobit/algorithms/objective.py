"""What an objective takes and gives: the seam between the trainer and the family of algorithms.

An update is cut into micro-batches by a token budget, and the loss must not depend on the
cut.  So an objective is asked twice: once for the share of every response token, with the whole
update in view, and then for the weighted **sum** of one micro-batch.  Sums over the micro-batches
of an update add up to its loss, and so do their gradients:

    loss = sum over micro-batches m, sum over tokens i of m:   w[i] * l[i]

An algorithm of reinforcement learning also says what each completion of a step was worth
(``credit``), with all groups of the step in view.

A teacher whose whole distributions are known adds a term to any algorithm's loss (``Distilled``),
with w the mean weights of that algorithm and KL the divergence of each response token
(``isobit.models.teacher``):

    loss + coefficient * sum over tokens i of   w[i] * KL[i]

Shapes: N response tokens of one micro-batch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeAlias

import torch

from isobit.records.batch import PackedBatch, TokenScores
from isobit.records.text import Group

Columns: TypeAlias = Mapping[str, float | Sequence[float]]
"""Columns of one completion of n response tokens by their names in ``isobit.records.sequence``:
``advantages``, and ``returns`` for a value head to learn.  Each is one number for all of its
response tokens, or n numbers.
"""


@dataclass(frozen=True, slots=True)
class Shares:
    """The shares of one micro-batch's N response tokens, made with the whole update in view."""

    mean: torch.Tensor
    """float32 [N], each token's weight in the mean over the update."""
    selected: torch.Tensor | None = None
    """bool [N], the tokens that a method picked out of the whole update; None where it picks none.
    """


@dataclass(frozen=True, slots=True)
class LossOutputs:
    """The micro-batch's part of the loss, and what to report about it.

    ``metrics`` are reduced over the micro-batches as ``isobit.records.metrics`` says of each name:
    a mean is given as the sum over the N tokens.
    """

    loss: torch.Tensor  # float32 scalar
    metrics: dict[str, float] = field(default_factory=dict)
    ratios: torch.Tensor | None = None
    """float64 [S, 3], ``isobit.algorithms.sample_size.ratio_sums`` of the S sequences; None where
    the objective has no ratios.
    """


class Objective(Protocol):
    """What the trainer minimises."""

    def shares(self, batches: Sequence[PackedBatch]) -> list[Shares]:
        """All micro-batches of an update -> the share of every response token of each."""
        ...

    def loss(self, scores: TokenScores, batch: PackedBatch, shares: Shares) -> LossOutputs:
        """The weighted sum over the response tokens of one micro-batch.

        ``scores`` are of the policy being trained, and all of them carry gradients; ``batch`` has
        what else is known of the tokens.
        """
        ...


class Algorithm(Objective, Protocol):
    """An objective of reinforcement learning."""

    @property
    def needs_values(self) -> bool:
        """Whether the policy has a value head, which this trains and reads."""
        ...

    @property
    def needs_greedy(self) -> bool:
        """Whether each prompt is also completed greedily, for a baseline."""
        ...

    def credit(self, groups: Sequence[Group]) -> list[list[Columns | None]]:
        """The groups of a step -> the columns that each completion is learnt from with; None leaves
        it out.

        A reward of None excludes a completion.  Sequences have ``kl_penalties``, which are taken
        from the reward token by token, ``turn_rewards``, which are added to it, and ``values``,
        where there are any; a group has its ``baseline`` where ``needs_greedy`` asks for one.
        With ``algorithm.credit = "turn"`` it is asked once for each turn (``turn_credit``).
        """
        ...


@dataclass(frozen=True, slots=True)
class Distilled:
    """An ``Algorithm`` with a teacher beside it."""

    algorithm: Algorithm
    coefficient: float

    has_other_terms = True
    """Every token is learnt from, whatever its advantage."""

    @property
    def needs_values(self) -> bool:
        return self.algorithm.needs_values

    @property
    def needs_greedy(self) -> bool:
        return self.algorithm.needs_greedy

    def credit(self, groups: Sequence[Group]) -> list[list[Columns | None]]:
        """The algorithm's own."""
        return self.algorithm.credit(groups)

    def shares(self, batches: Sequence[PackedBatch]) -> list[Shares]:
        """The algorithm's own."""
        return self.algorithm.shares(batches)

    def loss(self, scores: TokenScores, batch: PackedBatch, shares: Shares) -> LossOutputs:
        """The algorithm's loss, and the weighted divergences of the N tokens."""
        divergences = scores.divergences
        assert divergences is not None, "the trainer has a teacher"
        own = self.algorithm.loss(scores, batch, shares)
        return replace(
            own,
            loss=own.loss + self.coefficient * (shares.mean * divergences).sum(),
            metrics=own.metrics | {"teacher/kl": float(divergences.detach().double().sum())},
        )
