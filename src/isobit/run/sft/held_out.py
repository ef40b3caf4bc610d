"""What is measured on a held-out set: the loss of its completions, and with a reward how often the
policy's own are right.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from isobit.observe.eval_result import EvalResult
from isobit.observe.metrics import Metrics


@dataclass(frozen=True, slots=True)
class HeldOut:
    """What was measured on one held-out set."""

    examples: int
    loss: float
    """Nats a completion token, over all of them together."""
    result: EvalResult | None
    """Of the policy's own completions; None without a reward."""

    def scalars(self, name: str) -> Metrics:
        """The figures for the metrics file, under ``eval/NAME/``."""
        return {
            f"eval/{name}/loss": self.loss,
            **(self.result.scalars(name) if self.result else {}),
        }

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Self:
        """The record from what ``dataclasses.asdict`` and JSON made of it."""
        result = content["result"]
        return cls(
            content["examples"],
            content["loss"],
            None if result is None else EvalResult.from_json(result),
        )
