"""The prompts of a run of reinforcement learning: those it learns from, and those it is measured
on.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from isobit.config.data import DataConfig, DataSource
from isobit.data.digest import prompts_sha256
from isobit.data.prompts import TooLong, build_prompts, describe_too_long, drop_evaluated
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
