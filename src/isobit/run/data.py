"""The prompts of a run of reinforcement learning: those it learns from, and those it is measured
on.

The examples of a run of fine-tuning, or its pairs: what it learns from, and what it is measured
on.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, TypeAlias

from isobit.config.data import DataConfig, DataSource, ExampleSource, SftDataConfig
from isobit.config.recipes import Objective
from isobit.config.tables import OptimisationConfig
from isobit.data.examples import Example, Pair, build_examples, build_pairs
from isobit.data.prompts import (
    TooLong,
    build_prompts,
    describe_too_long,
    drop_evaluated,
    learnt_sha256,
    prompts_sha256,
)
from isobit.models.folder import DescribedModel
from isobit.records.text import Prompt
from isobit.util.errors import ModelError


@dataclass(frozen=True, slots=True)
class RlData:
    """All prompts of a run of reinforcement learning."""

    prompts: Sequence[Prompt]
    """Those to learn from, none of which stands in an evaluation set."""
    dropped: int
    """Training prompts left out because an evaluation set holds them too."""
    sets: Mapping[str, Sequence[Prompt]]
    """The problems of each evaluation set."""
    too_long: Mapping[str, TooLong] = field(default_factory=dict)
    """What was too long in each set, and what became of it."""

    def figures(self) -> dict[str, Any]:
        """How many there are of each, for the manifest."""
        return {
            "training_prompts": len(self.prompts),
            "dropped_prompts": self.dropped,
            "evaluation_problems": {name: len(prompts) for name, prompts in self.sets.items()},
            "too_long": {name: found.describe() for name, found in self.too_long.items()},
        }

    def digests(self) -> dict[str, str]:
        """SHA-256 of each set."""
        return {
            "train": prompts_sha256(self.prompts),
            **{f"eval.{name}": prompts_sha256(prompts) for name, prompts in self.sets.items()},
        }

    def describe(self, prompts_per_step: int) -> str:
        """One line: how many training prompts and evaluation problems there are, what was left out
        or cut, and whether a step has a prompt more than once.
        """
        sets = ", ".join(f"{len(prompts)} in {name}" for name, prompts in self.sets.items())
        dropped = (
            f" ({self.dropped} more also stand in an evaluation set: dropped)"
            if self.dropped
            else ""
        )
        return (
            f"data: {len(self.prompts)} training prompts{dropped}; evaluation problems: "
            f"{sets or 'none'}{describe_too_long(self.too_long)}" + self._repeated(prompts_per_step)
        )

    def _repeated(self, prompts_per_step: int) -> str:
        if prompts_per_step <= len(self.prompts):
            return ""
        times = -(-prompts_per_step // len(self.prompts))
        return (
            f"; warning: a step takes {prompts_per_step} prompts (training.prompts_per_step), so "
            f"that it has the same prompt up to {times} times"
        )


def load_prompts(data: DataConfig, model: DescribedModel) -> RlData:
    """Read and tokenise all sets.  Raises DataError for what cannot be used."""
    too_long: dict[str, TooLong] = {}

    def prompts_of(name: str, source: DataSource) -> list[Prompt]:
        counts = too_long[name] = TooLong(data.too_long)
        context = model.config.max_positions
        return build_prompts(name, source, model.tokenizer, data, context, counts)

    train = prompts_of("train", data.train)
    sets = {name: prompts_of(name, source) for name, source in data.eval.items()}
    prompts, dropped = drop_evaluated(train, sets.values())
    return RlData(prompts, dropped, sets, {n: one for n, one in too_long.items() if one.describe()})


Item: TypeAlias = Example | Pair
"""What is learnt from: an example of supervised fine-tuning, a pair of preferences."""


@dataclass(frozen=True, slots=True)
class SftData:
    """All examples of a run of fine-tuning, or all pairs."""

    objective: Objective
    train: Mapping[str, Item]
    """Those to learn from, by the id of their prompt; none stands in a held-out set."""
    dropped: int
    """Training examples left out because a held-out set holds their prompt too."""
    sets: Mapping[str, Sequence[Item]]
    """The held-out ones of each set."""
    too_long: Mapping[str, TooLong] = field(default_factory=dict)
    """What was too long in each set, and what became of it."""

    @property
    def prompts(self) -> list[Prompt]:
        """The prompts to learn from, in their order."""
        return [example.prompt for example in self.train.values()]

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence that training can meet; of both in a pair, which is never
        cut.
        """
        return max(example.tokens for example in self.train.values())

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
        sets = {"train": list(self.train.values())}
        sets |= {f"eval.{name}": list(items) for name, items in self.sets.items()}
        return {
            name: learnt_sha256([item.prompt for item in items], [item.learnt for item in items])
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
        )


def load_examples(data: SftDataConfig, model: DescribedModel, objective: Objective) -> SftData:
    """Read and tokenise all sets.  Raises DataError for what cannot be used, ModelError for a
    tokenizer of another model.
    """
    build = _pairs if objective == "preference" else _examples
    too_long: dict[str, TooLong] = {}

    def read(name: str, source: ExampleSource) -> Sequence[Item]:
        counts = too_long[name] = TooLong(data.too_long)
        return build(name, source, model, data, counts)

    sets = {name: read(name, source) for name, source in data.eval.items()}
    train = read("train", data.train)
    held_out = [[example.prompt for example in examples] for examples in sets.values()]
    kept, dropped = drop_evaluated([example.prompt for example in train], held_out)
    by_id = {example.prompt.id: example for example in train}
    learnt = {prompt.id: by_id[prompt.id] for prompt in kept}
    found = {name: one for name, one in too_long.items() if one.describe()}
    return SftData(objective, learnt, dropped, sets, found)


def _examples(
    name: str,
    source: ExampleSource,
    model: DescribedModel,
    data: SftDataConfig,
    too_long: TooLong,
) -> list[Example]:
    examples = build_examples(
        name,
        source,
        model.tokenizer,
        model.stop_token_ids,
        data,
        model.config.max_positions,
        too_long,
    )
    _check_vocabulary(
        max(max((*example.prompt.token_ids, *example.completion_ids)) for example in examples),
        model,
    )
    return examples


def _pairs(
    name: str,
    source: ExampleSource,
    model: DescribedModel,
    data: SftDataConfig,
    too_long: TooLong,
) -> list[Pair]:
    context = model.config.max_positions
    pairs = build_pairs(name, source, model.tokenizer, data, context, too_long)
    _check_vocabulary(max(chain.from_iterable(chain(*pair.learnt) for pair in pairs)), model)
    return pairs


def _check_vocabulary(largest: int, model: DescribedModel) -> None:
    if largest >= model.config.vocab_size:
        raise ModelError(
            f"{model.folder}: the tokenizer gives the token {largest}, but the model knows 0 to "
            f"{model.config.vocab_size - 1}: the tokenizer belongs to another model"
        )
