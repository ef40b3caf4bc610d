"""What is measured on a held-out set: the loss of its completions, and with a reward how often the
policy's own are right; or how a reward model ranks its pairs.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from isobit.observe.eval_result import EvalResult
from isobit.observe.metrics import Metrics
from isobit.training.preference import PairFigures


@dataclass(frozen=True, slots=True)
class HeldOut:
    """What was measured on one held-out set."""

    examples: int
    loss: float
    """Nats a completion token, over all of them together; nats a pair for preferences."""
    result: EvalResult | None
    """Of the policy's own completions; None without a reward."""
    pairs: PairFigures | None = None
    """Of a reward model; None where completions are learnt."""

    def scalars(self, name: str) -> Metrics:
        """The figures for the metrics file, under ``eval/NAME/``."""
        return {
            f"eval/{name}/loss": self.loss,
            **(self.result.scalars(name) if self.result else {}),
            **(self._of_pairs(name, self.pairs) if self.pairs else {}),
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

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Self:
        """The record from what ``dataclasses.asdict`` and JSON made of it."""
        result, pairs = content["result"], content.get("pairs")
        return cls(
            content["examples"],
            content["loss"],
            None if result is None else EvalResult.from_json(result),
            None if pairs is None else PairFigures(**pairs),
        )
