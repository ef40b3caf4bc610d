"""Steps in a row without a signal: a run that learns nothing says so, and can stop
(``check.on_no_signal``).
"""

from isobit.config.check import CheckConfig
from isobit.errors import NoSignalError
from isobit.observe.metrics import Metrics
from isobit.parallel.agreement import agreed


class SignalWatch:
    """Counts them, on every rank alike: all have the rewards of all groups."""

    def __init__(self, config: CheckConfig) -> None:
        self._config = config
        self.steps = 0
        """The last steps that had no signal."""

    def count(self, has_signal: bool) -> None:
        """One more step."""
        self.steps = 0 if has_signal else self.steps + 1

    def notes(self, metrics: Metrics) -> list[str]:
        """What to print after a step with these figures: nothing, or one line where it is time.

        Raises NoSignalError instead where the run is to stop; every rank does.
        """
        patience = self._config.no_signal_steps
        if self._config.on_no_signal == "ignore" or self.steps == 0 or self.steps % patience:
            return []
        problem = f"{_described(self.steps)} had no signal: {_of_rewards(metrics)}"
        if self._config.on_no_signal == "warn":
            return [f"{problem} (check.on_no_signal)"]
        raise agreed(
            NoSignalError(
                f'{problem}. check.on_no_signal is "stop", and check.no_signal_steps '
                f'{patience}; with "warn" the run goes on'
            )
        )


def _described(steps: int) -> str:
    return "the last step" if steps == 1 else f"the last {steps} steps"


def _of_rewards(metrics: Metrics) -> str:
    mean = metrics.get("reward/mean")
    if mean is None:
        return "every reward failed, so that there is nothing to learn from"
    return (
        f"all rewards of each prompt are equal (the mean is {mean:g}), so that there is nothing to "
        "learn from. Is the reward the right one, and are some answers right and others wrong? "
        "completions.jsonl has both"
    )
