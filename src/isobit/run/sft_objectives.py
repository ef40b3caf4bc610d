"""The objectives of fine-tuning: how examples become micro-batches, what is minimised, and what is
measured on held-out ones.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Generic, TypeAlias, TypeVar

from isobit.algorithms.objective import Objective
from isobit.config import recipes
from isobit.data.examples import Example, Pair
from isobit.records.batch import PackedBatch
from isobit.records.metrics import Kind
from isobit.run.data import Lesson
from isobit.training.comparison import UpdateMetrics
from isobit.training.supervised import (
    DistilFigures,
    DistilObjective,
    PairFigures,
    PreferenceObjective,
    SupervisedObjective,
    mean_loss,
    measure_distance,
    measure_pairs,
    pack_pairs,
    pack_preferences,
)
from isobit.training.trainer import Trainer

Figures: TypeAlias = PairFigures | DistilFigures | None
"""What else is measured beside the loss."""
Learnt = TypeVar("Learnt", bound=Lesson)


class SftObjective(ABC, Generic[Learnt]):
    """One objective of fine-tuning."""

    loss: ClassVar[Objective]
    unit: ClassVar[str]
    """The noun that the loss is a mean over."""
    kind: ClassVar[Kind]
    """The kind of metrics that it writes (``isobit.records.metrics``)."""

    @abstractmethod
    def pack(
        self, trainer: Trainer, examples: Sequence[Learnt], tokens_per_microbatch: int
    ) -> list[PackedBatch]:
        """Examples -> packed micro-batches of at most so many tokens."""

    @abstractmethod
    def measure(self, trainer: Trainer, batches: Sequence[PackedBatch]) -> tuple[float, Figures]:
        """The loss of examples that are not learnt from, and what else is measured; both do not
        depend on the cut into batches.
        """

    @abstractmethod
    def tokens(self, examples: Sequence[Learnt], update: UpdateMetrics) -> int:
        """The tokens that an update has learnt from."""


class _Supervised(SftObjective[Example]):
    """The tokens of completions are learnt."""

    loss = SupervisedObjective()
    unit = "token"
    kind: ClassVar[Kind] = "sft"

    def pack(
        self, trainer: Trainer, examples: Sequence[Example], tokens_per_microbatch: int
    ) -> list[PackedBatch]:
        return pack_examples(examples, tokens_per_microbatch)

    def measure(self, trainer: Trainer, batches: Sequence[PackedBatch]) -> tuple[float, Figures]:
        return mean_loss(trainer, batches), None

    def tokens(self, examples: Sequence[Example], update: UpdateMetrics) -> int:
        """The tokens of the completions."""
        return update.tokens


class _Distil(_Supervised):
    """A teacher's distribution of the completions' tokens is learnt."""

    loss = DistilObjective()

    def measure(self, trainer: Trainer, batches: Sequence[PackedBatch]) -> tuple[float, Figures]:
        figures = measure_distance(trainer, batches)
        return figures.kl, figures


class _Preference(SftObjective[Pair]):
    """A reward model learns which of two answers is preferred."""

    loss = PreferenceObjective()
    unit = "pair"
    kind: ClassVar[Kind] = "preference"

    def pack(
        self, trainer: Trainer, examples: Sequence[Pair], tokens_per_microbatch: int
    ) -> list[PackedBatch]:
        pairs = [pair.learnt for pair in examples]
        return pack_preferences(pairs, tokens_per_microbatch, trainer.policy.config.pad_token_id)

    def measure(self, trainer: Trainer, batches: Sequence[PackedBatch]) -> tuple[float, Figures]:
        figures = measure_pairs(trainer.scorer, batches, trainer.policy.world)
        return figures.loss, figures

    def tokens(self, examples: Sequence[Pair], update: UpdateMetrics) -> int:
        """The tokens of both conversations of each pair: every one has a part in a score."""
        return sum(pair.tokens for pair in examples)


SFT_OBJECTIVES: Mapping[recipes.Objective, SftObjective[Any]] = {
    "supervised": _Supervised(),
    "preference": _Preference(),
    "distil": _Distil(),
}


def pack_examples(examples: Sequence[Example], tokens_per_microbatch: int) -> list[PackedBatch]:
    """Examples -> packed micro-batches of at most so many tokens."""
    return pack_pairs(
        [(example.prompt.token_ids, example.completion_ids) for example in examples],
        tokens_per_microbatch,
    )
