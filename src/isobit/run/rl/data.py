"""The prompts of a run of reinforcement learning: those it learns from, and those it is measured
on.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from isobit.config.data import DataConfig, DataSource
from isobit.data.digest import prompts_sha256
from isobit.data.prompts import build_prompts, drop_evaluated
from isobit.models.loaded import DescribedModel
from isobit.records.text import Prompt


@dataclass(frozen=True, slots=True)
class RlData:
    """All prompts of a run of reinforcement learning."""

    prompts: Sequence[Prompt]
    """Those to learn from, none of which stands in an evaluation set."""
    dropped: int
    """Training prompts left out because an evaluation set holds them too."""
    sets: Mapping[str, Sequence[Prompt]]
    """The problems of each evaluation set."""

    def figures(self) -> dict[str, Any]:
        """How many there are of each, for the manifest."""
        return {
            "training_prompts": len(self.prompts),
            "dropped_prompts": self.dropped,
            "evaluation_problems": {name: len(prompts) for name, prompts in self.sets.items()},
        }

    def digests(self) -> dict[str, str]:
        """SHA-256 of each set."""
        return {
            "train": prompts_sha256(self.prompts),
            **{f"eval.{name}": prompts_sha256(prompts) for name, prompts in self.sets.items()},
        }

    def describe(self) -> str:
        """One line: how many training prompts and evaluation problems there are."""
        sets = ", ".join(f"{len(prompts)} in {name}" for name, prompts in self.sets.items())
        dropped = (
            f" ({self.dropped} more also stand in an evaluation set: dropped)"
            if self.dropped
            else ""
        )
        return (
            f"data: {len(self.prompts)} training prompts{dropped}; evaluation problems: "
            f"{sets or 'none'}"
        )


def load_prompts(data: DataConfig, model: DescribedModel) -> RlData:
    """Read and tokenise all sets.  Raises DataError for what cannot be used."""

    def prompts_of(name: str, source: DataSource) -> list[Prompt]:
        return build_prompts(name, source, model.tokenizer, data, model.config.max_positions)

    train = prompts_of("train", data.train)
    sets = {name: prompts_of(name, source) for name, source in data.eval.items()}
    prompts, dropped = drop_evaluated(train, sets.values())
    return RlData(prompts, dropped, sets)
