"""The examples of a run of supervised fine-tuning: what it learns from, and what it is measured
on.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from isobit.config.examples import ExampleSource, SftDataConfig
from isobit.config.training import OptimisationConfig
from isobit.data.examples import Example, build_examples
from isobit.data.prompts import drop_evaluated
from isobit.errors import ModelError
from isobit.models.loaded import DescribedModel
from isobit.records.text import Prompt


@dataclass(frozen=True, slots=True)
class SftData:
    """All examples of a run of supervised fine-tuning."""

    train: Mapping[str, Example]
    """Those to learn from, by the id of their prompt; none stands in a held-out set."""
    dropped: int
    """Training examples left out because a held-out set holds their prompt too."""
    sets: Mapping[str, Sequence[Example]]
    """The held-out ones of each set."""

    @property
    def prompts(self) -> list[Prompt]:
        """The prompts to learn from, in their order."""
        return [example.prompt for example in self.train.values()]

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence that training can meet."""
        return max(example.tokens for example in self.train.values())

    def figures(self) -> dict[str, Any]:
        """How many there are of each, for the manifest."""
        return {
            "training_examples": len(self.train),
            "dropped_examples": self.dropped,
            "held_out_examples": {name: len(examples) for name, examples in self.sets.items()},
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
            f"data: {len(self.train)} examples{dropped}, each seen {passes:.2g} times; held out: "
            f"{sets or 'none'}"
        )


def load_examples(data: SftDataConfig, model: DescribedModel) -> SftData:
    """Read and tokenise all sets.  Raises DataError for what cannot be used, ModelError for a
    tokenizer of another model.
    """
    sets = {name: _examples(name, source, model, data) for name, source in data.eval.items()}
    train = _examples("train", data.train, model, data)
    held_out = [[example.prompt for example in examples] for examples in sets.values()]
    kept, dropped = drop_evaluated([example.prompt for example in train], held_out)
    by_id = {example.prompt.id: example for example in train}
    return SftData({prompt.id: by_id[prompt.id] for prompt in kept}, dropped, sets)


def _examples(
    name: str, source: ExampleSource, model: DescribedModel, data: SftDataConfig
) -> list[Example]:
    shape = model.config
    examples = build_examples(
        name, source, model.tokenizer, model.stop_token_ids, data, shape.max_positions
    )
    largest = max(max((*example.prompt.token_ids, *example.completion_ids)) for example in examples)
    if largest >= shape.vocab_size:
        raise ModelError(
            f"{model.folder}: the tokenizer gives the token {largest}, but the model knows 0 to "
            f"{shape.vocab_size - 1}: the tokenizer belongs to another model"
        )
    return examples
