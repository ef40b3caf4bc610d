"""What a command prints: lines, progress, the line of a step, and descriptions of models and
evaluations.

On a terminal a progress bar shows tokens per second and disappears after the generation, and the
line of a step is coloured, and shortened until it fits.  Elsewhere (a pipe, a log file) there is no
colour, lines are whole, and a line every ``LINE_EVERY_S`` seconds replaces the bar.
"""

import textwrap
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from time import perf_counter
from typing import Literal, TextIO, cast

import rich.console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.progress import Progress as ProgressBar
from rich.text import Text

from isobit.models.decoder import parameter_count
from isobit.models.policy import Policy
from isobit.observe.evaluation import EvalResult
from isobit.records.metrics import METRICS, Kind, Metrics
from isobit.rollout.engine_stats import Progress
from isobit.util.files import LARGE
from isobit.util.terminal import Standard, counted, gib

GOOD, BAD, WARNING = "green", "bold red", "yellow"
"""Styles of a terminal, which a file never has."""

GAP = "  "
"""The space between two parts of a line."""
WIDTH = 80
"""Columns of tables in a file."""

_STEPS = 10
"""The last steps, whose pace gives the remaining time."""


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a line.

    ``shorter`` has the texts that replace it where the line is too long, each with its order among
    the replacements of all parts, lowest first; an empty text leaves the part out.
    """

    text: str
    style: str = ""
    shorter: tuple[tuple[int, str], ...] = ()


def fit(parts: Sequence[Part], width: int | None) -> list[Part]:
    """The parts, cut as far as possible to a line of at most ``width`` columns."""
    found = list(parts)
    cuts = sorted((cut, place) for place, part in enumerate(parts) for cut in part.shorter)
    for (_, text), place in cuts:
        line = GAP.join(part.text for part in found if part.text)
        if width is None or len(line) <= width:
            break
        found[place] = Part(text, parts[place].style)
    return [part for part in found if part.text]


def metric_parts(metrics: Metrics, kind: Kind, exact: bool = False) -> dict[str, Part]:
    """The parts of a step's line for a kind of run, by metric.  With ``exact``, metrics that have a
    known value in an exact flow are coloured.
    """
    parts: dict[str, Part] = {}
    for name, row in METRICS.items():
        if row.line is not None and kind in row.line.runs and name in metrics:
            coloured = exact and row.exact is not None
            style = (GOOD if metrics[name] == row.exact else BAD) if coloured else ""
            shorter = ((order, text.format_map(metrics)) for order, text in row.line.shorter)
            parts[name] = Part(row.line.text.format_map(metrics), style, tuple(shorter))
    return parts


class TimeLeft:
    """Estimates the remaining time of a run from the pace of its last steps, including evaluations
    and checkpoints between them.  The first step, a warm-up, counts only until there is another.
    """

    def __init__(self, steps: int, now: Callable[[], float] = time.monotonic) -> None:
        self._steps, self._now = steps, now
        self._ends = deque([now()], maxlen=_STEPS + 1)
        self._is_warm = False

    def after(self, step: int) -> float:
        """Seconds until the end of the run; to be called once at the end of each step."""
        if len(self._ends) == 2 and not self._is_warm:
            self._ends.popleft()
            self._is_warm = True
        self._ends.append(self._now())
        pace = (self._ends[-1] - self._ends[0]) / (len(self._ends) - 1)
        return pace * (self._steps - step)


def time_left(seconds: float) -> Part:
    """The remaining time as text; ``done`` after the last step."""
    if seconds <= 0:
        return Part("done")
    minutes, hours = round(seconds / 60), round(seconds / 3600)
    text = (
        f"{seconds:.0f} s"
        if seconds < 90
        else f"{minutes} min"
        if minutes < 90
        else f"{hours} h"
        if hours < 72
        else f"{hours / 24:.0f} days"
    )
    return Part(f"{text} left")


LINE_EVERY_S = 30.0
"""Seconds between two lines that replace a progress bar."""


class Console:
    """Prints lines anywhere, and progress bars and spinners on a terminal only; by default on
    standard output (``terminal_on``).
    """

    def __init__(self, terminal: rich.console.Console | None = None) -> None:
        self._terminal = terminal or terminal_on("stdout")

    @property
    def width(self) -> int:
        """Columns for tables."""
        return self._terminal.width if self._terminal.is_terminal else WIDTH

    def line(self, text: str = "", style: str = "") -> None:
        """One line without markup and without control characters, which a path or a model's text
        may contain.  On a narrower terminal it is broken between words.
        """
        shown = printable(text)
        if self._terminal.is_terminal and len(shown) > self._terminal.width:
            shown = wrapped(shown, self._terminal.width)
        self._terminal.print(shown, style=style, markup=False, highlight=False, soft_wrap=True)

    def parts(self, parts: Sequence[Part]) -> None:
        """One line of the parts that fit the terminal."""
        width = self._terminal.width if self._terminal.is_terminal else None
        line = Text(GAP).join(Text(printable(p.text), p.style) for p in fit(parts, width))
        self._terminal.print(line, highlight=False, soft_wrap=True)

    def lines(self, texts: Iterable[str]) -> None:
        for text in texts:
            self.line(text)

    @contextmanager
    def generating(self, label: str) -> Iterator[Callable[[Progress], None] | None]:
        """A progress bar for one call of the engine; without a terminal, a line every
        ``LINE_EVERY_S`` seconds.  None where nothing is printed.
        """
        if not self._terminal.is_terminal:
            yield None if self._terminal.quiet else self._lines_of(label)
            return
        with ProgressBar(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]:,.0f} tokens/s"),
            TimeElapsedColumn(),
            console=self._terminal,
            transient=True,
        ) as bar:
            task = bar.add_task(label, total=None, rate=0.0)
            yield lambda moment: bar.update(
                task, total=moment.total, completed=moment.finished, rate=moment.tokens_per_second
            )

    @contextmanager
    def counting(self, what: str) -> Iterator[Callable[[int, int], None] | None]:
        """A progress bar, updated with the number done and the total, which is there from the first
        update on; None without a terminal.
        """
        if not self._terminal.is_terminal:
            yield None
            return
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
        bar = ProgressBar(*columns, console=self._terminal, transient=True)
        task = bar.add_task(what, total=None)

        def update(done: int, total: int) -> None:
            bar.start()
            bar.update(task, completed=done, total=total)

        try:
            yield update
        finally:
            bar.stop()

    @contextmanager
    def busy(self, label: str) -> Iterator[None]:
        """A spinner with ``label`` and the elapsed seconds, for work without a measure of
        progress; nothing without a terminal.
        """
        if not self._terminal.is_terminal:
            yield
            return
        columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        with ProgressBar(*columns, console=self._terminal, transient=True) as bar:
            bar.add_task(label, total=None)
            yield

    @contextmanager
    def writing(self, what: str, num_bytes: int) -> Iterator[None]:
        """A spinner while ``what`` is written; for ``LARGE`` bytes or more also a line with the
        size before, and one with the seconds after.
        """
        if num_bytes >= LARGE:
            self.line(f"writing {what}: {gib(num_bytes)}")
        started_at = perf_counter()
        with self.busy(f"writing {what}"):
            yield
        if num_bytes >= LARGE:
            self.line(f"written in {perf_counter() - started_at:.0f} s")

    def notes(self, notes: Sequence[str]) -> None:
        """Problems of a step that did not end the run."""
        for note in notes:
            self.line(f"  note: {note}", WARNING)

    def _lines_of(self, label: str) -> Callable[[Progress], None]:
        said_at = 0.0

        def say(moment: Progress) -> None:
            nonlocal said_at
            if moment.seconds - said_at >= LINE_EVERY_S:
                said_at = moment.seconds
                self.line(
                    f"  {label}: {moment.finished:,} of {moment.total:,} completions, "
                    f"{moment.tokens_per_second:,.0f} tokens/s, {moment.seconds:.0f} s"
                )

        return say


def terminal_on(name: Literal["stdout", "stderr"]) -> rich.console.Console:
    """A standard stream.  Printing to it never raises, even where its reader or the terminal is
    closed, so it cannot end a run.  In a notebook all lines are one output.
    """
    stream = cast(TextIO, Standard(name))
    terminal = rich.console.Console(file=stream)
    if not terminal.is_jupyter:
        return terminal
    return rich.console.Console(file=stream, force_jupyter=False, force_terminal=False)


def silent() -> Console:
    """The console of every rank but the first: all ranks would print the same."""
    return Console(rich.console.Console(quiet=True, force_terminal=False))


def describe_policy(name: str, policy: Policy) -> str:
    layers, trained = policy.config.num_layers, sum(map(prod, policy.shapes.values()))
    parameters = parameter_count(policy.config) if policy.config.lora is not None else trained
    size = f"{parameters:,} parameters, {counted(layers, 'layers')}"
    line = f"model {name}: {policy.config.family}, {size}"
    lora = policy.config.lora
    if lora is None:
        return line
    return (
        f"{line}; LoRA of rank {lora.rank} on {', '.join(lora.targets)}: {trained:,} parameters "
        "are trained"
    )


def describe_moment(step: int) -> str:
    """The moment of an evaluation: ``before`` the first step, or ``after step 3``."""
    return "before" if step == 0 else f"after step {step}"


def describe_result(name: str, result: EvalResult) -> str:
    """One evaluation set in one line."""
    if result.is_accuracy:
        text, unit, digits = f"{name} accuracy {100 * result.accuracy:.1f}%", 100, 1
    else:
        text, unit, digits = f"{name} mean reward {result.accuracy:.3f}", 1, 3
    if result.interval is not None:
        low, high = (f"{unit * bound:.{digits}f}" for bound in result.interval)
        text += f" (95% interval {low} to {high})"
    if result.right is not None:
        text += f", {100 * result.right:.1f}% exactly right (reward at least 1)"
    text += f" on {counted(result.problems, 'problems')}"
    text += f", {result.samples} samples each" if result.samples > 1 else ""
    text += "".join(
        f", pass@{k} {100 * value:.1f}%" for k, value in result.pass_at.items() if k > 1
    )
    text += f", length {result.response_length:.1f}"
    text += f", {counted(result.failed, 'rewards')} failed" if result.failed else ""
    met = ", ".join(f"{number:,} {kind}" for kind, number in result.counts.items())
    return text + (f"; graders met: {met}" if met else "")


def describe_gain(
    accuracy: tuple[float, float], right: tuple[float, float] | None, points: bool = False
) -> str:
    """The mean reward of a set before and after a run: as an accuracy, where every reward was 0 or
    1, with the difference in ``points``; else beside the shares that are exactly ``right``.
    """
    before, after = accuracy
    if right is None:
        gain = f" ({100 * (after - before):+.1f} points)" if points else ""
        return f"accuracy {100 * before:.1f}% -> {100 * after:.1f}%{gain}"
    shares = f"{100 * right[0]:.1f}% -> {100 * right[1]:.1f}%"
    return f"mean reward {before:.3f} -> {after:.3f}, exactly right {shares}"


def shares_right(before: EvalResult, after: EvalResult) -> tuple[float, float] | None:
    """The shares of right answers of two results of a set; None where all rewards are 0 or 1."""
    if before.is_accuracy and after.is_accuracy:
        return None
    first, last = (one.accuracy if one.right is None else one.right for one in (before, after))
    return first, last


def wrapped(text: str, width: int) -> str:
    """Lines of at most ``width`` columns, all but the first indented; a longer word, such as a
    path, stays whole.
    """
    indent = len(text) - len(text.lstrip(" "))
    lines = textwrap.wrap(
        text.lstrip(" "),
        width - indent,
        subsequent_indent="    ",
        break_long_words=False,
        break_on_hyphens=False,
    )
    return "\n".join(" " * indent + line for line in lines)


def columns(rows: Sequence[Sequence[str]], gap: str = GAP) -> list[str]:
    """Rows of one length as lines of columns, the first to the left and the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        gap.join(
            [
                row[0].ljust(widths[0]),
                *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)),
            ]
        ).rstrip()
        for row in rows
    ]


def stacked(rows: Sequence[Sequence[str]], width: int) -> list[str]:
    """``columns`` of a header and rows, as many as fit beside one another in ``width``; the others
    follow below, behind the first column again. Where not one fits, each row is a list.
    """
    (_, *header), *below = rows
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    if widths[0] + len(GAP) + max(widths[1:]) > width:
        return [
            line
            for name, *cells in below
            for line in (
                name,
                *(f"  {one[0]}  {one[1]}" for one in zip(header, cells, strict=True)),
            )
        ]
    blocks, room = list[list[int]](), 0
    for place, own in enumerate(widths[1:], start=1):
        if room < len(GAP) + own:
            blocks.append([0])
            room = width - widths[0]
        blocks[-1].append(place)
        room -= len(GAP) + own
    tables = [columns([[row[place] for place in block] for row in rows]) for block in blocks]
    return [line for table in tables for line in ("", *table)][1:]


def printable(text: str) -> str:
    """``text`` without control characters, except tabs and line ends."""
    return "".join(
        character for character in text if character in "\t\n" or character.isprintable()
    )
