"""The data of fine-tuning: examples or pairs of answers to learn from, and held-out sets."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
from isobit.data.prompts import (
    Noticed,
    TooLong,
    check_any_left,
    describe_too_long,
    drop_evaluated,
    learnt_sha256,
)
from isobit.data.spool import Mapped, Spool, in_chunks
from isobit.models.folder import DescribedModel
from isobit.records.text import Prompt
from isobit.run.data import rendering_notes
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
