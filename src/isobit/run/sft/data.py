"""The examples of a run of fine-tuning, or its pairs: what it learns from, and what it is measured
on.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, TypeAlias

from isobit.config.examples import ExampleSource, SftDataConfig
from isobit.config.sft import Objective
from isobit.config.training import OptimisationConfig
from isobit.data.digest import learnt_sha256
from isobit.data.examples import Example, build_examples
from isobit.data.pairs import Pair, build_pairs
from isobit.data.prompts import TooLong, describe_too_long, drop_evaluated
from isobit.errors import ModelError
from isobit.models.loaded import DescribedModel
from isobit.records.text import Prompt

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
