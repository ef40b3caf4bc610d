"""The data of fine-tuning: examples or pairs of answers to learn from, and held-out sets."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, TypeAlias

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
from isobit.data.prompts import Noticed, TooLong, describe_too_long, learnt_sha256
from isobit.data.spool import Mapped, Spool
from isobit.models.folder import DescribedModel
from isobit.records.text import Prompt
from isobit.run.data import rendering_notes
from isobit.run.data_sets import read_data_sets
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
    of_pairs = objective == "preference"
    make: Callable[..., Sequence[Item]] = _pairs if of_pairs else _examples

    def build(
        name: str, source: Any, too_long: TooLong, noticed: Noticed, first: int
    ) -> Sequence[Item]:
        return make(name, source, model, data, too_long, noticed, first)

    def rows() -> Iterable[Any]:
        return iter_answered(data.train) if of_pairs else iter_turns(data.train)

    sets = read_data_sets(data, build, build, rows, lambda item: item.prompt)
    notes = rendering_notes(data, model.tokenizer, sets.noticed)
    return SftData(objective, sets.train, sets.dropped, sets.evaluated, sets.too_long, notes)


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
