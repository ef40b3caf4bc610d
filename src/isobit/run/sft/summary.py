"""What a run of fine-tuning achieved, in one record: the last lines on the console and
``summary.json``.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from isobit.observe.summary import RunSummary
from isobit.run.sft.held_out import HeldOut


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
    """Of completions, over all steps; of whole conversations for preferences."""
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
    )


def describe_summary(summary: SftSummary, unit: str, noun: str) -> list[str]:
    """What a finished run of fine-tuning prints last; losses are in nats a ``unit``, and ``noun``
    are measured on.
    """
    lines = []
    for name, figures in summary.evaluations.items():
        text = (
            f"{name}: loss {figures.loss_before:.4f} -> {figures.loss_after:.4f} nats a {unit} on "
            f"{figures.examples} {noun}"
        )
        before, after = figures.accuracy_before, figures.accuracy_after
        if before is not None and after is not None:
            text += f", accuracy {100 * before:.1f}% -> {100 * after:.1f}%"
        lines.append(text)
    files = directory_files(summary.directory)
    return [
        *lines,
        *summary.describe_memory(),
        f"time: {summary.train_seconds:.1f} s for {summary.steps} steps, "
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
