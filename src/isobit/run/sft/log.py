"""What a run of fine-tuning leaves behind as it goes, in the files and under the names
of ``isobit train``.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from isobit.clock import Clock
from isobit.observe.console import Console, describe_moment, describe_result
from isobit.observe.metrics import Metrics
from isobit.observe.step_line import Part, time_left
from isobit.observe.training_log import TrainingLog
from isobit.run.sft.data import Item
from isobit.run.sft.held_out import HeldOut
from isobit.run.sft.setup import SftRun
from isobit.run.sft.summary import SftSummary, describe_summary, summarise_set
from isobit.store.checkpoint.start import Start
from isobit.training.figures import UpdateMetrics


class SftLog(TrainingLog[HeldOut]):
    """The log of supervised fine-tuning: figures and lines of its steps."""

    phases = ("training",)
    counts = ("tokens", "skipped")

    def __init__(self, run: SftRun, start: Start, console: Console, clock: Clock) -> None:
        self._run = run
        super().__init__(run, start, console, clock)

    def step(self, step: int, examples: Sequence[Item], update: UpdateMetrics) -> None:
        """The figures of one step: a line of metrics and a line on the console."""
        spent = self._take_seconds()
        seconds = spent["training"]
        metrics = {
            **self._run.lesson.scalars(update),
            "updates/skipped": int(update.skipped is not None),
            **{f"time/{name}_s": value for name, value in spent.items()},
            "tokens_per_s/training": sum(example.tokens for example in examples) / seconds,
        }
        metrics |= self._run.turns.figures()
        metrics |= self._waiting_figures()
        self._add_metrics(step, metrics)
        self._write()
        self._totals["tokens"] += self._run.lesson.tokens(examples, update)
        self._totals["skipped"] += update.skipped is not None
        self.boundary = self._take_boundary(step)
        self._console.parts(describe_step(step, self._run, metrics, self._time_left.after(step)))
        if update.skipped is not None:
            self._console.notes([f"the update was skipped: {update.skipped}"])

    def finish(self) -> SftSummary:
        """Write ``summary.json``, print the last lines, and return what the run achieved."""
        sets = {name: summarise_set(*ends) for name, ends in self._first_and_last().items()}
        first = next(iter(sets.values()), None)
        summary = SftSummary(
            directory=self.directory.root,
            preset=self._run.config.precision.preset,
            steps=self._run.config.training.steps,
            loss_before=first.loss_before if first else None,
            loss_after=first.loss_after if first else None,
            accuracy_before=first.accuracy_before if first else None,
            accuracy_after=first.accuracy_after if first else None,
            tokens_trained=self._totals["tokens"],
            skipped_updates=self._totals["skipped"],
            train_seconds=self._seconds["training"],
            evaluation_seconds=self._seconds["evaluation"],
            evaluations=sets,
            gpu_memory=self._run.turns.summary(),
        )
        self._write_summary(summary)
        self._console.lines(describe_summary(summary, self._run.lesson.unit, self._run.data.noun))
        return summary

    def _say_evaluation(self, step: int, results: Mapping[str, HeldOut]) -> None:
        when = describe_moment(step)
        for name, held_out in results.items():
            self._console.line(
                f"{when}: {name} loss {held_out.loss:.4f} nats a {self._run.lesson.unit} on "
                f"{held_out.examples} {self._run.data.noun}"
            )
            if held_out.pairs is not None:
                self._console.line(
                    f"{when}: {name} accuracy {100 * held_out.pairs.accuracy:.1f}% of pairs, "
                    f"margin {held_out.pairs.margin:.3f}"
                )
            if held_out.result is not None:
                self._console.line(f"{when}: {describe_result(name, held_out.result)}")

    def _result(self, content: Mapping[str, Any]) -> HeldOut:
        return HeldOut.from_json(content)


def describe_step(step: int, run: SftRun, metrics: Metrics, seconds_left: float) -> list[Part]:
    """What the objective shows of one step of fine-tuning, its rate and seconds, and how long the
    run will still take.
    """
    steps = run.config.training.steps
    return [
        Part(f"step {step:>{len(str(steps))}}/{steps}"),
        *(Part(f"{name} {metrics[name]:{style}}") for name, style in run.lesson.shown.items()),
        Part(f"training {metrics['tokens_per_s/training']:,.0f} tok/s", shorter=((1, ""),)),
        Part(f"{metrics['time/training_s']:.1f} s"),
        time_left(seconds_left),
    ]
