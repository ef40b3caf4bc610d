"""What fine-tuning learns: its examples, or its pairs of answers, and the objective of each.

SftData     examples to learn from, and held-out sets of them to be measured on
Lesson      one of the objectives: how examples become micro-batches, what is minimised,
            and what is measured on held-out ones
HeldOut     the figures of one held-out set
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, ClassVar, Generic, Self, TypeAlias, TypeVar

from isobit.algorithms.objective import Objective
from isobit.config import recipes
from isobit.config.data import ExampleSource, SftDataConfig
from isobit.config.training import OptimisationConfig
from isobit.data.examples import (
    Answered,
    Example,
    Pair,
    Turn,
    build_examples,
    build_pairs,
    iter_answered,
    iter_turns,
)
from isobit.data.prompts import (
    Noticed,
    TooLong,
    check_any_left,
    describe_too_long,
    drop_evaluated,
    learnt_sha256,
)
from isobit.data.sampler import Mapped, Spool, in_chunks
from isobit.models.folder import DescribedModel
from isobit.observe.evaluation import EvalResult
from isobit.records.batch import PackedBatch
from isobit.records.metrics import Kind, Metrics
from isobit.records.text import Prompt
from isobit.run.data import rendering_notes
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
from isobit.util.errors import ModelError

Item: TypeAlias = Example | Pair
"""What is learnt from: an example of supervised fine-tuning, a pair of preferences."""


@dataclass(frozen=True, slots=True)
class SftData:
    """All examples of a run of fine-tuning, or all pairs."""

    objective: recipes.Objective
    train: Mapping[str, Item]
    """Those to learn from, by the id of their prompt; none stands in a held-out set."""
    dropped: int
    """Training examples left out because a held-out set holds their prompt too."""
    sets: Mapping[str, Sequence[Item]]
    """The held-out ones of each set."""
    too_long: Mapping[str, TooLong] = field(default_factory=dict)
    """What was too long in each set, and what became of it."""
    notes: Sequence[str] = ()
    """Lines on how prompts were rendered."""

    @property
    def items(self) -> Sequence[Item]:
        """Those to learn from, in their order."""
        if isinstance(self.train, Spool):
            return self.train.items_in_order
        return list(self.train.values())

    @property
    def prompts(self) -> Sequence[Prompt]:
        """The prompts to learn from, in their order."""
        return Mapped(self.items, lambda item: item.prompt)

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence that training can meet; of both in a pair, which is never
        cut.
        """
        return max(example.tokens for example in self.items)

    @property
    def noun(self) -> str:
        """What one of them is called, in the plural."""
        return "pairs" if self.objective == "preference" else "examples"

    def figures(self) -> dict[str, Any]:
        """How many there are of each, for the manifest."""
        return {
            "training_examples": len(self.train),
            "dropped_examples": self.dropped,
            "held_out_examples": {name: len(examples) for name, examples in self.sets.items()},
            "too_long": {name: found.describe() for name, found in self.too_long.items()},
        }

    def digests(self) -> dict[str, str]:
        """SHA-256 of each set: prompts, and what is to be learnt behind them."""
        sets = {"train": self.items}
        sets |= {f"eval.{name}": items for name, items in self.sets.items()}
        return {
            name: learnt_sha256(
                Mapped(items, lambda item: item.prompt), (item.learnt for item in items)
            )
            for name, items in sets.items()
        }

    def describe(self, training: OptimisationConfig) -> str:
        """One line: how many there are, and how often each is gone through."""
        sets = ", ".join(f"{len(examples)} in {name}" for name, examples in self.sets.items())
        dropped = (
            f" ({self.dropped} more also stand in an evaluation set: dropped)"
            if self.dropped
            else ""
        )
        passes = training.steps * training.prompts_per_step / len(self.train)
        return (
            f"data: {len(self.train)} {self.noun}{dropped}, each seen {passes:.2g} times; held "
            f"out: {sets or 'none'}{describe_too_long(self.too_long)}"
            + (f"; {self.train.describe()}" if isinstance(self.train, Spool) else "")
        )


def load_examples(
    data: SftDataConfig, model: DescribedModel, objective: recipes.Objective
) -> SftData:
    """Read and tokenise all sets.  Raises DataError for what cannot be used, ModelError for a
    tokenizer of another model.
    """
    build: Callable[..., Sequence[Item]] = _pairs if objective == "preference" else _examples
    too_long, noticed = dict[str, TooLong](), dict[str, Noticed]()

    def read(name: str, source: ExampleSource) -> Sequence[Item]:
        counts = too_long[name] = TooLong(data.too_long)
        seen = noticed[name] = Noticed()
        return build(name, source, model, data, counts, seen)

    sets = {name: read(name, source) for name, source in data.eval.items()}
    if data.streaming:
        counts = too_long["train"] = TooLong(data.too_long, in_parts=True)
        parts: Iterable[Any] = iter_turns(data.train)
        if objective == "preference":
            parts = iter_answered(data.train)
        seen = noticed["train"] = Noticed()

        def build_part(part: Sequence[Any], first: int) -> Sequence[Item]:
            return build("train", part, model, data, counts, seen, first)

        spool, dropped = _spooled(parts, sets, counts, build_part)
        notes = rendering_notes(data, model.tokenizer, noticed)
        return SftData(objective, spool, dropped, sets, _told(too_long), notes)
    train = read("train", data.train)
    held_out = [[example.prompt for example in examples] for examples in sets.values()]
    kept, dropped = drop_evaluated([example.prompt for example in train], held_out)
    by_id = {example.prompt.id: example for example in train}
    learnt = {prompt.id: by_id[prompt.id] for prompt in kept}
    notes = rendering_notes(data, model.tokenizer, noticed)
    return SftData(objective, learnt, dropped, sets, _told(too_long), notes)


def _told(too_long: Mapping[str, TooLong]) -> dict[str, TooLong]:
    return {name: one for name, one in too_long.items() if one.describe()}


def _spooled(
    parts: Iterable[Any],
    sets: Mapping[str, Sequence[Item]],
    too_long: TooLong,
    build: Callable[[Sequence[Any], int], Sequence[Item]],
) -> tuple[Spool[Item], int]:
    """What ``build`` makes of chunks of ``parts``, and the number of the first one in each, but
    without prompts of the sets, in a spool; and how many were left out.
    """
    held_out, dropped = {item.prompt.text for items in sets.values() for item in items}, 0

    def kept() -> Iterator[Item]:
        nonlocal dropped
        first = 0
        for chunk in in_chunks(parts):
            for item in build(chunk, first):
                if item.prompt.text not in held_out:
                    yield item
                else:
                    dropped += 1
            first += len(chunk)

    spool = Spool(kept(), lambda item: item.prompt.id)
    check_any_left("train", spool, dropped, too_long)
    return spool, dropped


def _examples(
    name: str,
    source: ExampleSource | Sequence[Turn],
    model: DescribedModel,
    data: SftDataConfig,
    too_long: TooLong,
    noticed: Noticed,
    first: int = 0,
) -> list[Example]:
    examples = build_examples(
        name,
        source,
        model.tokenizer,
        model.stop_token_ids,
        data,
        model.config.max_positions,
        too_long,
        noticed,
        first,
    )
    largest = (max((*one.prompt.token_ids, *one.completion_ids)) for one in examples)
    _check_vocabulary(max(largest, default=0), model)
    return examples


def _pairs(
    name: str,
    source: ExampleSource | Sequence[Answered],
    model: DescribedModel,
    data: SftDataConfig,
    too_long: TooLong,
    noticed: Noticed,
    first: int = 0,
) -> list[Pair]:
    context = model.config.max_positions
    pairs = build_pairs(name, source, model.tokenizer, data, context, too_long, noticed, first)
    largest = chain.from_iterable(chain(*pair.learnt) for pair in pairs)
    _check_vocabulary(max(largest, default=0), model)
    return pairs


def _check_vocabulary(largest: int, model: DescribedModel) -> None:
    if largest >= model.config.vocab_size:
        raise ModelError(
            f"{model.folder}: the tokenizer gives the token {largest}, but the model knows 0 to "
            f"{model.config.vocab_size - 1}: the tokenizer belongs to another model"
        )


@dataclass(frozen=True, slots=True)
class HeldOut:
    """What was measured on one held-out set."""

    examples: int
    loss: float
    """Nats a completion token, over all of them together: of distillation those of the divergence;
    nats a pair for preferences.
    """
    result: EvalResult | None
    """Of the policy's own completions; None without a reward."""
    pairs: PairFigures | None = None
    """Of a reward model; None where completions are learnt."""
    distance: DistilFigures | None = None
    """From a teacher; None without one."""

    def scalars(self, name: str) -> Metrics:
        """The figures for the metrics file, under ``eval/NAME/``."""
        return {
            f"eval/{name}/loss": self.loss,
            **(self.result.scalars(name) if self.result else {}),
            **(self._of_pairs(name, self.pairs) if self.pairs else {}),
            **(self._of_distance(name, self.distance) if self.distance else {}),
        }

    @property
    def accuracy(self) -> float | None:
        """The mean reward of the policy's completions, or the share of pairs that a reward model
        ranks right; None where neither was measured.
        """
        if self.pairs is not None:
            return self.pairs.accuracy
        return self.result.accuracy if self.result else None

    @staticmethod
    def _of_pairs(name: str, pairs: PairFigures) -> Metrics:
        return {f"eval/{name}/accuracy": pairs.accuracy, f"eval/{name}/margin": pairs.margin}

    @staticmethod
    def _of_distance(name: str, distance: DistilFigures) -> Metrics:
        return {
            f"eval/{name}/nll": distance.nll,
            f"eval/{name}/teacher_nll": distance.teacher_nll,
        }

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Self:
        """The record from what ``dataclasses.asdict`` and JSON made of it."""
        result, pairs = content["result"], content.get("pairs")
        distance = content.get("distance")
        return cls(
            content["examples"],
            content["loss"],
            None if result is None else EvalResult.from_json(result),
            None if pairs is None else PairFigures(**pairs),
            None if distance is None else DistilFigures(**distance),
        )


Figures: TypeAlias = PairFigures | DistilFigures | None
"""What else is measured beside the loss."""
Taught = TypeVar("Taught", bound=Item)


class Lesson(ABC, Generic[Taught]):
    """One objective of fine-tuning."""

    objective: ClassVar[Objective]
    unit: ClassVar[str]
    """What the loss is a mean over."""
    kind: ClassVar[Kind]
    """Which metrics it writes (``isobit.records.metrics``)."""

    @abstractmethod
    def pack(
        self, trainer: Trainer, examples: Sequence[Taught], tokens_per_microbatch: int
    ) -> list[PackedBatch]:
        """Examples -> packed micro-batches of at most so many tokens."""

    @abstractmethod
    def measure(self, trainer: Trainer, batches: Sequence[PackedBatch]) -> tuple[float, Figures]:
        """The loss of examples that are not learnt from, and what else is measured; both do not
        depend on the cut into batches.
        """

    @abstractmethod
    def tokens(self, examples: Sequence[Taught], update: UpdateMetrics) -> int:
        """The tokens that an update has learnt from."""


class _Supervised(Lesson[Example]):
    """The completions' tokens are learnt."""

    objective = SupervisedObjective()
    unit = "token"
    kind: ClassVar[Kind] = "sft"

    def pack(
        self, trainer: Trainer, examples: Sequence[Example], tokens_per_microbatch: int
    ) -> list[PackedBatch]:
        """See ``pack_examples``."""
        return pack_examples(examples, tokens_per_microbatch)

    def measure(self, trainer: Trainer, batches: Sequence[PackedBatch]) -> tuple[float, Figures]:
        """See ``mean_loss``."""
        return mean_loss(trainer, batches), None

    def tokens(self, examples: Sequence[Example], update: UpdateMetrics) -> int:
        """Of completions."""
        return update.tokens


class _Distil(_Supervised):
    """A teacher's distribution of the completions' tokens is learnt."""

    objective = DistilObjective()

    def measure(self, trainer: Trainer, batches: Sequence[PackedBatch]) -> tuple[float, Figures]:
        """See ``measure_distance``."""
        figures = measure_distance(trainer, batches)
        return figures.kl, figures


class _Preference(Lesson[Pair]):
    """Which of two answers is preferred is learnt."""

    objective = PreferenceObjective()
    unit = "pair"
    kind: ClassVar[Kind] = "preference"

    def pack(
        self, trainer: Trainer, examples: Sequence[Pair], tokens_per_microbatch: int
    ) -> list[PackedBatch]:
        """See ``pack_preferences``."""
        pairs = [pair.learnt for pair in examples]
        return pack_preferences(pairs, tokens_per_microbatch, trainer.policy.config.pad_token_id)

    def measure(self, trainer: Trainer, batches: Sequence[PackedBatch]) -> tuple[float, Figures]:
        """See ``measure_pairs``."""
        figures = measure_pairs(trainer.scorer, batches, trainer.policy.world)
        return figures.loss, figures

    def tokens(self, examples: Sequence[Pair], update: UpdateMetrics) -> int:
        """Of both conversations of each pair: every token has a part in its score."""
        return sum(pair.tokens for pair in examples)


LESSONS: Mapping[recipes.Objective, Lesson[Any]] = {
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
