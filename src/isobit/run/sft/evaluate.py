"""What is measured on a held-out set: the loss of its completions, and with a reward how often the policy's own are right."""

from collections.abc import Sequence
from dataclasses import dataclass

from isobit.records import Group
from isobit.run.eval_result import EvalResult
from isobit.run.evaluate import OnProgress
from isobit.run.metrics import Metrics
from isobit.run.sft.setup import SftRun


@dataclass(frozen=True, slots=True)
class HeldOut:
    """The figures of one set."""

    examples: int
    loss: float
    """Nats a completion token, over all of them together."""
    result: EvalResult | None
    """Of the policy's own completions; None without a reward, like ``groups``, which is empty then."""
    groups: Sequence[Group]

    def scalars(self, name: str) -> Metrics:
        """The figures for the metrics file, under ``eval/NAME/``."""
        return {f"eval/{name}/loss": self.loss, **(self.result.scalars(name) if self.result else {})}


def measure(run: SftRun, progress: OnProgress | None = None) -> dict[str, HeldOut]:
    """Every held-out set under the current policy, by name."""
    graded = run.evaluator.run(progress) if run.evaluator else {}
    figures = {}
    for name, examples in run.sets.items():
        result, groups = graded.get(name, (None, []))
        figures[name] = HeldOut(len(examples), run.loss_of(examples), result, groups)
    return figures
