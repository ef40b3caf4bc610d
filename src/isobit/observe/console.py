"""What a run prints: the precision flow at the start, a line a step, a progress bar while it
generates, the figures at the end.

On a terminal the bar shows tokens per second and goes away when the generation is over.  Elsewhere
(a pipe, a log file) there is no bar and no colour: the lines are the same.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from time import perf_counter

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.progress import Progress as ProgressBar

from isobit.memory.machine import gib
from isobit.models.policy import Policy
from isobit.observe.eval_result import EvalResult
from isobit.observe.metrics import Metrics
from isobit.observe.summary import Summary
from isobit.precision.compare import describe_flow
from isobit.precision.flow import PrecisionFlow
from isobit.rollout.progress import Progress
from isobit.run.setup import Run

LARGE = 1 << 30
"""Bytes from which on writing or checking takes so long that it is announced."""


class Report:
    """Prints the course of a run to a console."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console()

    def line(self, text: str = "") -> None:
        """One line as it stands: no markup, no wrapping, no control characters that a model or a
        path might hold.
        """
        self._console.print(printable(text), markup=False, highlight=False, soft_wrap=True)

    def start(self, run: Run) -> None:
        """The model, the data, and the flow with its fallbacks."""
        sets = (
            ", ".join(f"{len(prompts)} in {name}" for name, prompts in run.evaluator.sets.items())
            or "none"
        )
        dropped = (
            f" ({run.dropped_prompts} more also stand in an evaluation set: dropped)"
            if run.dropped_prompts
            else ""
        )
        self.line(model_line(run.config.model, run.model.policy))
        self.line(
            f"data: {run.sampler.state()['prompts']} training prompts{dropped}; evaluation "
            f"problems: {sets}"
        )
        self.flow(run.model.policy.flow)
        for line in run.turns.plan.describe() if run.turns else ():
            self.line(line)

    def flow(self, flow: PrecisionFlow) -> None:
        """The formats of every site, the fallbacks, and whether the sides are one function."""
        for line in describe_flow(flow):
            self.line(f"  {line}")

    @contextmanager
    def generating(self, label: str) -> Iterator[Callable[[Progress], None] | None]:
        """A progress bar for one call of the engine; None, so that nothing is computed for it,
        without a terminal.
        """
        if not self._console.is_terminal:
            yield None
            return
        with ProgressBar(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]:,.0f} tokens/s"),
            TimeElapsedColumn(),
            console=self._console,
            transient=True,
        ) as bar:
            task = bar.add_task(label, total=None, rate=0.0)
            yield lambda moment: bar.update(
                task, total=moment.total, completed=moment.finished, rate=moment.tokens_per_second
            )

    @contextmanager
    def busy(self, label: str) -> Iterator[None]:
        """A spinner with ``label`` and the seconds so far for work that cannot say how far it is;
        nothing without a terminal.
        """
        if not self._console.is_terminal:
            yield
            return
        columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        with ProgressBar(*columns, console=self._console, transient=True) as bar:
            bar.add_task(label, total=None)
            yield

    @contextmanager
    def writing(self, what: str, num_bytes: int) -> Iterator[None]:
        """A spinner while ``what`` is written; from ``LARGE`` bytes on a line with the size before,
        and one with the seconds after.
        """
        if num_bytes >= LARGE:
            self.line(f"writing {what}: {gib(num_bytes)}")
        started_at = perf_counter()
        with self.busy(f"writing {what}"):
            yield
        if num_bytes >= LARGE:
            self.line(f"written in {perf_counter() - started_at:.0f} s")

    def step(self, step: int, steps: int, metrics: Metrics) -> None:
        """Reward, length, entropy, differing tokens, rates and seconds of one step."""
        seconds = sum(metrics[f"time/{part}_s"] for part in ("rollout", "grading", "training"))
        parts = [
            f"step {step:>{len(str(steps))}}/{steps}",
            f"reward {metrics['reward/mean']:.3f}",
            f"length {metrics['response_length/mean']:.1f}",
            f"entropy {metrics['entropy']:.3f}" if "entropy" in metrics else "no update",
            f"differing {metrics['log_prob_diff/tokens_differing']:.0f} of "
            f"{metrics['log_prob_diff/tokens_compared']:.0f}",
            f"rollout {metrics['tokens_per_s/rollout']:,.0f} tok/s",
            f"training {metrics['tokens_per_s/training']:,.0f} tok/s",
            f"{seconds:.1f} s",
        ]
        self.line("  ".join(parts))

    def notes(self, notes: Sequence[str]) -> None:
        """What went wrong in a step without ending the run."""
        for note in notes:
            self.line(f"  note: {note}")

    def evaluation(self, step: int, results: Mapping[str, EvalResult]) -> None:
        """A line a set."""
        for name, result in results.items():
            self.line(
                f"{'before' if step == 0 else f'after step {step}'}: "
                f"{describe_result(name, result)}"
            )

    def summary(self, summary: Summary) -> None:
        """The figures of the run and where its files are."""
        for line in describe_summary(summary):
            self.line(line)


def model_line(name: str, policy: Policy) -> str:
    """A model in one line."""
    parameters = sum(master.numel() for master in policy.parameters())
    return f"model {name}: {policy.config.family}, {parameters:,} parameters, {policy.config.num_layers} layers"


def describe_result(name: str, result: EvalResult) -> str:
    """One evaluation set in one line."""
    if 0 <= result.accuracy <= 1:
        text, unit, digits = f"{name} accuracy {100 * result.accuracy:.1f}%", 100, 1
    else:  # rewards that are no shares
        text, unit, digits = f"{name} mean reward {result.accuracy:.3f}", 1, 3
    if result.interval is not None:
        low, high = (f"{unit * bound:.{digits}f}" for bound in result.interval)
        text += f" (95% interval {low} to {high})"
    text += f" on {result.problems} problems"
    text += f", {result.samples} samples each" if result.samples > 1 else ""
    text += "".join(
        f", pass@{k} {100 * value:.1f}%" for k, value in result.pass_at.items() if k > 1
    )
    text += f", length {result.response_length:.1f}"
    return text + (f", {result.failed} rewards failed" if result.failed else "")


def describe_summary(summary: Summary) -> list[str]:
    """The last lines of a run."""
    lines = []
    for name, figures in summary.evaluations.items():
        before, after = figures.accuracy_before, figures.accuracy_after
        if all(0 <= value <= 1 for value in (before, after)):
            change = f"accuracy {100 * before:.1f}% -> {100 * after:.1f}% ({100 * (after - before):+.1f} points)"
        else:
            change = f"mean reward {before:.3f} -> {after:.3f}"
        lines.append(f"{name}: {change} on {figures.problems} problems")
    lines += [
        *summary.describe_memory(),
        f"{summary.preset}: {summary.tokens_differing:,} of {summary.tokens_compared:,} "
        "log-probabilities differ in rollout and training",
        f"time: {summary.train_seconds:.1f} s for {summary.steps} steps, "
        f"{summary.evaluation_seconds:.1f} s for evaluation",
        f"model: {summary.model}",
        f"files: {summary.directory} (summary.json, metrics.jsonl, completions.jsonl, "
        "tensorboard/, run.json)",
        f"figures as a page: isobit report {summary.directory}",
    ]
    return lines


def printable(text: str) -> str:
    """``text`` without control characters other than tabs and line ends, which could drive the
    terminal.
    """
    return "".join(
        character for character in text if character in "\t\n" or character.isprintable()
    )
