"""The two objectives of fine-tuning, as a run of either asks for them: how examples become
micro-batches, what is minimised, and what is measured on examples that are not learnt from.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Generic, TypeVar

from isobit.algorithms.objective import Objective
from isobit.config import sft
from isobit.data.examples import Example
from isobit.data.pairs import Pair
from isobit.records.batch import PackedBatch
from isobit.run.sft.data import Item
from isobit.training.figures import UpdateMetrics
from isobit.training.preference import (
    PairFigures,
    PreferenceObjective,
    measure_pairs,
    pack_preferences,
)
from isobit.training.supervised import SupervisedObjective, mean_loss, pack_pairs
from isobit.training.trainer import Trainer

Taught = TypeVar("Taught", bound=Item)


class Lesson(ABC, Generic[Taught]):
    """One objective of fine-tuning."""

    objective: ClassVar[Objective]
    unit: ClassVar[str]
    """What the loss is a mean over."""
    shown: ClassVar[Mapping[str, str]]
    """The figures of a step that its line on the console has, with their formats."""

    @abstractmethod
    def pack(
        self, trainer: Trainer, examples: Sequence[Taught], tokens_per_microbatch: int
    ) -> list[PackedBatch]:
        """Examples -> packed micro-batches of at most so many tokens."""

    @abstractmethod
    def measure(
        self, trainer: Trainer, batches: Sequence[PackedBatch]
    ) -> tuple[float, PairFigures | None]:
        """The loss of examples that are not learnt from, and what else is measured of pairs; both
        do not depend on the cut into batches.
        """

    @abstractmethod
    def tokens(self, examples: Sequence[Taught], update: UpdateMetrics) -> int:
        """The tokens that an update has learnt from."""

    def scalars(self, update: UpdateMetrics) -> dict[str, float]:
        """The figures of an update, by name."""
        return update.scalars()


class _Supervised(Lesson[Example]):
    """The completions' tokens are learnt."""

    objective = SupervisedObjective()
    unit = "token"
    shown: ClassVar[Mapping[str, str]] = {"loss": ".4f", "entropy": ".3f", "grad_norm": ".3f"}

    def pack(
        self, trainer: Trainer, examples: Sequence[Example], tokens_per_microbatch: int
    ) -> list[PackedBatch]:
        """See ``pack_examples``."""
        return pack_examples(examples, tokens_per_microbatch)

    def measure(
        self, trainer: Trainer, batches: Sequence[PackedBatch]
    ) -> tuple[float, PairFigures | None]:
        """See ``mean_loss``."""
        return mean_loss(trainer, batches), None

    def tokens(self, examples: Sequence[Example], update: UpdateMetrics) -> int:
        """Of completions."""
        return update.tokens


class _Preference(Lesson[Pair]):
    """Which of two answers is preferred is learnt."""

    objective = PreferenceObjective()
    unit = "pair"
    shown: ClassVar[Mapping[str, str]] = {
        "loss": ".4f",
        "accuracy": ".3f",
        "margin": ".3f",
        "grad_norm": ".3f",
    }

    def pack(
        self, trainer: Trainer, examples: Sequence[Pair], tokens_per_microbatch: int
    ) -> list[PackedBatch]:
        """See ``pack_preferences``."""
        pairs = [pair.learnt for pair in examples]
        return pack_preferences(pairs, tokens_per_microbatch, trainer.policy.config.pad_token_id)

    def measure(
        self, trainer: Trainer, batches: Sequence[PackedBatch]
    ) -> tuple[float, PairFigures | None]:
        """See ``measure_pairs``."""
        figures = measure_pairs(trainer.scorer, batches, trainer.policy.world)
        return figures.loss, figures

    def tokens(self, examples: Sequence[Pair], update: UpdateMetrics) -> int:
        """Of both conversations of each pair: every token has a part in its score."""
        return sum(pair.tokens for pair in examples)

    def scalars(self, update: UpdateMetrics) -> dict[str, float]:
        """Without what only a language model has."""
        figures = update.scalars()
        return {
            name: figures[name] for name in figures if name not in ("entropy", "response_tokens")
        }


LESSONS: Mapping[sft.Objective, Lesson[Any]] = {
    "supervised": _Supervised(),
    "preference": _Preference(),
}


def pack_examples(examples: Sequence[Example], tokens_per_microbatch: int) -> list[PackedBatch]:
    """Examples -> packed micro-batches of at most so many tokens."""
    return pack_pairs(
        [(example.prompt.token_ids, example.completion_ids) for example in examples],
        tokens_per_microbatch,
    )
