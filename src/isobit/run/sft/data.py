"""The examples of a run of supervised fine-tuning: what it learns from, and what it is measured
on.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from isobit.config.sft import ExampleSource, SftConfig
from isobit.data.examples import Example, build_examples
from isobit.data.prompts import drop_evaluated
from isobit.errors import CheckpointError
from isobit.models.loaded import DescribedModel
from isobit.records.text import Prompt


@dataclass(frozen=True, slots=True)
class SftData:
    """All examples of a run."""

    train: Sequence[Example]
    prompts: Sequence[Prompt]
    """Of those of ``train`` that stand in no held-out set."""
    dropped: int
    """The others."""
    sets: Mapping[str, Sequence[Example]]
    """The held-out ones of each set."""

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence that training can meet."""
        return max(example.tokens for example in self.train)

    def figures(self) -> dict[str, object]:
        """How many there are of each."""
        return {
            "training_examples": len(self.prompts),
            "dropped_examples": self.dropped,
            "held_out_examples": {name: len(examples) for name, examples in self.sets.items()},
        }

    def describe(self, config: SftConfig) -> str:
        """One line: how many there are, and how often each is gone through."""
        sets = (
            ", ".join(f"{len(examples)} in {name}" for name, examples in self.sets.items())
            or "none"
        )
        dropped = (
            f" ({self.dropped} more also stand in an evaluation set: dropped)"
            if self.dropped
            else ""
        )
        passes = config.training.steps * config.training.prompts_per_step / len(self.prompts)
        return f"data: {len(self.prompts)} examples{dropped}, each seen {passes:.2g} times; held out: {sets}"


def load_data(config: SftConfig, model: DescribedModel) -> SftData:
    """Read and tokenise all sets.  Raises DataError for what cannot be used, CheckpointError for a
    tokenizer of another model.
    """
    sets = {
        name: _examples(name, source, model, config) for name, source in config.data.eval.items()
    }
    train = _examples("train", config.data.train, model, config)
    held_out = [[example.prompt for example in examples] for examples in sets.values()]
    prompts, dropped = drop_evaluated([example.prompt for example in train], held_out)
    return SftData(train, prompts, dropped, sets)


def _examples(
    name: str, source: ExampleSource, model: DescribedModel, config: SftConfig
) -> list[Example]:
    shape = model.config
    examples = build_examples(
        name, source, model.tokenizer, model.stop_token_ids, config.data, shape.max_positions
    )
    largest = max(max((*example.prompt.token_ids, *example.completion_ids)) for example in examples)
    if largest >= shape.vocab_size:
        raise CheckpointError(
            f"{model.folder}: the tokenizer gives the token {largest}, but the model knows 0 to "
            f"{shape.vocab_size - 1}: the "
            "tokenizer belongs to another model"
        )
    return examples
