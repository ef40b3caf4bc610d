"""What a run of reinforcement learning achieved, in one record: the last lines on the console and
``summary.json``.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from isobit.observe.eval_result import EvalResult
from isobit.observe.summary import RunSummary


@dataclass(frozen=True, slots=True)
class RlSetSummary:
    """One evaluation set before and after the run; accuracies are mean rewards, intervals cover
    95%.
    """

    problems: int
    accuracy_before: float
    accuracy_after: float
    interval_before: tuple[float, float] | None
    interval_after: tuple[float, float] | None


@dataclass(frozen=True, slots=True)
class RlSummary(RunSummary):
    """The figures of a finished run.  The accuracies and ``problems`` on top are those of the first
    evaluation set, None without one.
    """

    accuracy_before: float | None
    accuracy_after: float | None
    problems: int
    tokens_compared: int
    """Response tokens whose recorded log-probability was compared with the trainer's, bit for
    bit.
    """
    tokens_differing: int
    max_abs_diff: float
    tokens_generated: int
    skipped_updates: int
    failed_rewards: int
    train_seconds: float
    """Wall seconds of the steps: rollout, grading and training, without evaluation and loading."""
    rollout_seconds: float
    evaluation_seconds: float
    evaluations: Mapping[str, RlSetSummary]
    routings_compared: int = 0
    """Response tokens of a mixture of experts whose recorded experts were compared with the
    trainer's; 0 for another model.
    """
    routings_differing: int = 0
    updates_without_signal: int = 0
    """Updates that had nothing to learn from."""
    steps_without_signal: int = 0
    """Steps all of whose updates had nothing to learn from."""


def summarise_set(before: EvalResult, after: EvalResult) -> RlSetSummary:
    """The figures of one set at both ends of a run."""
    return RlSetSummary(
        after.problems, before.accuracy, after.accuracy, before.interval, after.interval
    )


def describe_summary(summary: RlSummary) -> list[str]:
    """What a finished run of reinforcement learning prints last."""
    lines = []
    for name, figures in summary.evaluations.items():
        before, after = figures.accuracy_before, figures.accuracy_after
        if all(0 <= value <= 1 for value in (before, after)):
            points = f"{100 * (after - before):+.1f} points"
            change = f"accuracy {100 * before:.1f}% -> {100 * after:.1f}% ({points})"
        else:
            change = f"mean reward {before:.3f} -> {after:.3f}"
        lines.append(f"{name}: {change} on {figures.problems} problems")
    return [
        *lines,
        *_describe_signal(summary),
        *summary.describe_memory(),
        f"{summary.preset}: {summary.tokens_differing:,} of {summary.tokens_compared:,} "
        f"log-probabilities{_routings(summary)} differ in rollout and training",
        f"time: {summary.train_seconds:.1f} s for {summary.steps} steps, "
        f"{summary.evaluation_seconds:.1f} s for evaluation",
        f"model: {summary.model}",
        f"files: {summary.directory} (summary.json, metrics.jsonl, completions.jsonl, "
        "tensorboard/, run.json)",
        f"figures as a page: isobit report {summary.directory}",
    ]


def _describe_signal(summary: RlSummary) -> list[str]:
    """A line where steps taught nothing; one that cannot be missed where all did."""
    without, steps = summary.steps_without_signal, summary.steps
    if without == 0:
        return []
    if without < steps:
        return [f"no signal in {without:,} of {steps:,} steps: all rewards of a prompt were equal"]
    return [
        "warning: no step had a signal: all rewards of each prompt were equal, and nothing was "
        "learnt; see whether the reward reads the answers (completions.jsonl)"
    ]


def _routings(summary: RlSummary) -> str:
    if not summary.routings_compared:
        return ""
    return f", {summary.routings_differing:,} of {summary.routings_compared:,} routings"
