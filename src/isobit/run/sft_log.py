"""The log of fine-tuning: metrics and console lines of its steps, figures of its held-out sets, and
the summary of the run.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import exp
from pathlib import Path
from typing import Any, Self

from isobit.memory.sharing import MemorySharing
from isobit.observe.console import (
    Console,
    Part,
    describe_gain,
    describe_moment,
    describe_result,
    metric_parts,
    shares_right,
    time_left,
)
from isobit.observe.evaluation import EvalResult
from isobit.observe.training_log import RunSummary, TrainingLog
from isobit.records.metrics import Kind, Metrics, listed
from isobit.run.data import Lesson
from isobit.run.sft_objectives import SftObjective
from isobit.store.resume import Start
from isobit.store.training_run import TrainingRun
from isobit.training.comparison import UpdateMetrics
from isobit.training.supervised import DistilFigures, PairFigures
from isobit.util.clock import Clock
from isobit.util.terminal import counted


@dataclass(frozen=True, slots=True)
class HeldOut:
    """What was measured on one held-out set."""

    examples: int
    loss: float
    """Nats a completion token, over all of them together: of distillation those of the divergence;
    nats a pair for preferences.
    """
    result: EvalResult | None
    """Figures of the policy's own completions; None without a reward."""
    pairs: PairFigures | None = None
    """Figures of a reward model; None where completions are learnt."""
    distance: DistilFigures | None = None
    """The distance from a teacher; None without one."""

    def scalars(self, name: str) -> Metrics:
        """The figures for the metrics file, under ``eval/NAME/``."""
        figures: Metrics = {}
        if self.pairs is not None:
            figures |= {"accuracy": self.pairs.accuracy, "margin": self.pairs.margin}
        if self.distance is not None:
            figures |= {"nll": self.distance.nll, "teacher_nll": self.distance.teacher_nll}
        measured = {f"eval/{name}/{figure}": value for figure, value in figures.items()}
        of_policy = self.result.scalars(name) if self.result else {}
        return {f"eval/{name}/loss": self.loss, **of_policy, **measured}

    @property
    def accuracy(self) -> float | None:
        """The mean reward of the policy's completions, or the share of pairs that a reward model
        ranks right; None where neither was measured.
        """
        if self.pairs is not None:
            return self.pairs.accuracy
        return self.result.accuracy if self.result else None

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Self:
        """The record from what ``dataclasses.asdict`` and JSON made of it."""
        result, pairs = content["result"], content.get("pairs")
        distance = content.get("distance")
        return cls(
            content["examples"],
            content["loss"],
            None if result is None else EvalResult.from_json(result),
            None if pairs is None else PairFigures(**pairs),
            None if distance is None else DistilFigures(**distance),
        )


@dataclass(frozen=True, slots=True)
class SftSetSummary:
    """One held-out set before and after the run; losses in nats a token, accuracies as mean
    rewards, None without a reward.  For preferences losses are in nats a pair, accuracies the
    shares of pairs that are ranked right.
    """

    examples: int
    loss_before: float
    loss_after: float
    accuracy_before: float | None
    accuracy_after: float | None
    interval_before: tuple[float, float] | None
    interval_after: tuple[float, float] | None
    right: tuple[float, float] | None = None
    """The shares of completions that are exactly right; None where every reward was 0 or 1."""


@dataclass(frozen=True, slots=True)
class SftSummary(RunSummary):
    """The figures of a finished run.  Losses and accuracies on top are those of the first held-out
    set, None without one.
    """

    loss_before: float | None
    loss_after: float | None
    accuracy_before: float | None
    accuracy_after: float | None
    tokens_trained: int
    """Tokens of completions over all steps; of whole conversations for preferences."""
    skipped_updates: int
    train_seconds: float
    """Wall seconds of the steps, without evaluation and loading."""
    evaluation_seconds: float
    evaluations: Mapping[str, SftSetSummary]


def summarise_set(before: HeldOut, after: HeldOut) -> SftSetSummary:
    """The figures of one set at both ends of a run."""
    first, last = before.result, after.result
    return SftSetSummary(
        examples=after.examples,
        loss_before=before.loss,
        loss_after=after.loss,
        accuracy_before=before.accuracy,
        accuracy_after=after.accuracy,
        interval_before=first.interval if first else None,
        interval_after=last.interval if last else None,
        right=shares_right(first, last) if first and last else None,
    )


def describe_summary(summary: SftSummary, unit: str, noun: str) -> list[str]:
    """What a finished run of fine-tuning prints last; losses are in nats a ``unit``, and ``noun``
    are measured on.
    """
    lines = []
    for name, figures in summary.evaluations.items():
        text = (
            f"{name}: loss {figures.loss_before:.4f} -> {figures.loss_after:.4f} nats a {unit} on "
            f"{counted(figures.examples, noun)}"
        )
        before, after = figures.accuracy_before, figures.accuracy_after
        if before is not None and after is not None:
            text += f", {describe_gain((before, after), figures.right)}"
        lines.append(text)
    files = directory_files(summary.directory)
    return [
        *lines,
        *summary.describe_memory(),
        f"time: {summary.train_seconds:.1f} s for {counted(summary.steps, 'steps')}, "
        f"{summary.evaluation_seconds:.1f} s for evaluation",
        f"model: {summary.model}",
        f"files: {summary.directory} ({', '.join(files)})",
        f"figures as a page: isobit report {summary.directory}",
    ]


def directory_files(directory: Path) -> list[str]:
    """What the run left there beside the model."""
    return sorted(
        f"{path.name}/" if path.is_dir() else path.name
        for path in directory.iterdir()
        if path.name != "model" and path.name[0] != "."
    )


class SftLog(TrainingLog[HeldOut]):
    """The log of supervised fine-tuning: figures and lines of its steps."""

    phases = ("training",)
    counts = ("tokens", "skipped")

    def __init__(
        self,
        run: TrainingRun,
        start: Start,
        console: Console,
        clock: Clock,
        *,
        objective: SftObjective[Any],
        noun: str,
        turns: MemorySharing,
    ) -> None:
        """``noun``: what is learnt from, in the plural."""
        self._config = run.config
        self._objective = objective
        self._noun = noun
        self._turns = turns
        super().__init__(run, start, console, clock)

    def step(self, step: int, examples: Sequence[Lesson], update: UpdateMetrics) -> None:
        """The figures of one step: a line of metrics and a line on the console."""
        spent = self._take_seconds()
        seconds = spent["training"]
        metrics = {
            **listed(update.metrics, self._objective.kind),
            "updates/skipped": int(update.skipped is not None),
            **{f"time/{name}_s": value for name, value in spent.items()},
            "tokens_per_s/training": sum(example.tokens for example in examples) / seconds,
        }
        metrics |= self._turns.figures()
        metrics |= self._waiting_figures()
        self._add_metrics(step, metrics)
        self._write()
        self._totals["tokens"] += self._objective.tokens(examples, update)
        self._totals["skipped"] += update.skipped is not None
        self._console.parts(
            describe_step(
                step,
                self._config.training.steps,
                metrics,
                self._objective.kind,
                self._time_left.after(step),
            )
        )
        if update.skipped is not None:
            self._console.notes([f"the update was skipped: {update.skipped}"])

    def finish(self) -> SftSummary:
        """Write ``summary.json``, print the last lines, and return what the run achieved."""
        sets = {name: summarise_set(*ends) for name, ends in self._first_and_last().items()}
        first = next(iter(sets.values()), None)
        summary = SftSummary(
            directory=self.directory.root,
            preset=self._config.precision.preset,
            precision=self._config.precision.name,
            steps=self._config.training.steps,
            loss_before=first.loss_before if first else None,
            loss_after=first.loss_after if first else None,
            accuracy_before=first.accuracy_before if first else None,
            accuracy_after=first.accuracy_after if first else None,
            tokens_trained=self._totals["tokens"],
            skipped_updates=self._totals["skipped"],
            train_seconds=self._seconds["training"],
            evaluation_seconds=self._seconds["evaluation"],
            evaluations=sets,
            gpu_memory=self._turns.summary(),
        )
        self._write_summary(summary)
        self._console.lines(describe_summary(summary, self._objective.unit, self._noun))
        return summary

    def _say_evaluation(self, step: int, results: Mapping[str, HeldOut]) -> None:
        when = describe_moment(step)
        for name, held_out in results.items():
            self._console.line(
                f"{when}: {name} loss {held_out.loss:.4f} nats a {self._objective.unit} on "
                f"{counted(held_out.examples, self._noun)}"
            )
            if (distance := held_out.distance) is not None:
                self._console.line(
                    f"{when}: {name} divergence {distance.kl:.3g} nats a token, perplexity "
                    f"{exp(distance.nll):.4f}, the teacher's {exp(distance.teacher_nll):.4f}"
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


def describe_step(
    step: int, steps: int, metrics: Metrics, kind: Kind, seconds_left: float
) -> list[Part]:
    """What the objective shows of one step of fine-tuning, its rate and seconds, and how long the
    run will still take.
    """
    return [
        Part(f"step {step:>{len(str(steps))}}/{steps}"),
        *metric_parts(metrics, kind).values(),
        Part(f"{metrics['time/training_s']:.1f} s"),
        time_left(seconds_left),
    ]
