"""The state of a run and its chief figures, which stand above its charts."""

from collections.abc import Iterator
from dataclasses import dataclass

from isobit.observe.report.numbers import duration_text, number_text
from isobit.observe.run_record import RunRecord

_MOST_SETS = 3


@dataclass(frozen=True, slots=True)
class Tile:
    """A figure at the top of the page."""

    label: str
    value: str
    detail: str


def tiles_of(record: RunRecord) -> list[Tile]:
    """Losses of fine-tuning first, then evaluations, then the rest."""
    losses = record.evaluation_sets("loss")[:_MOST_SETS]
    return [
        *(_change(record, name) for name in losses),
        *(_accuracy(record, name) for name in record.evaluation_sets()[:_MOST_SETS]),
        *_differing(record, "log_prob_diff", "log-probabilities"),
        *_differing(record, "routing_diff", "routings"),
        *_last(record),
        *_time(record),
    ]


def _change(record: RunRecord, name: str) -> Tile:
    values = record.values(f"eval/{name}/loss")
    if not values:
        return Tile(f"{name} loss", number_text(None), "no evaluation has a figure")
    before = "measured once" if len(values) == 1 else f"from {number_text(values[0])}"
    return Tile(f"{name} loss", number_text(values[-1]), before)


def _accuracy(record: RunRecord, name: str) -> Tile:
    steps = record.steps_of(f"eval/{name}/accuracy")
    if not steps:
        return Tile(f"{name} accuracy", number_text(None), "no evaluation has a figure")
    first, last = record.figures[steps[0]], record.figures[steps[-1]]
    before, after = (row[f"eval/{name}/accuracy"] or 0.0 for row in (first, last))
    percent = record.is_accuracy(name)
    low, high = (last.get(f"eval/{name}/{side}") for side in ("low", "high"))
    problems = last.get(f"eval/{name}/problems")
    parts = [] if len(steps) == 1 else [f"from {number_text(before, percent)}"]
    if low is not None and high is not None:
        parts.append(f"95% interval {number_text(low, percent)} to {number_text(high, percent)}")
    if not percent:
        right = last.get(f"eval/{name}/right", after if 0.0 <= after <= 1.0 else None)
        parts.append(f"{number_text(right, percent=True)} exactly right")
    if problems is not None:
        parts.append(f"{number_text(problems)} problems")
    label = f"{name} accuracy" if percent else f"{name} mean reward"
    return Tile(label, number_text(after, percent), "; ".join(parts))


def _differing(record: RunRecord, kind: str, noun: str) -> Iterator[Tile]:
    compared = record.total(f"{kind}/tokens_compared")
    differing = record.total(f"{kind}/tokens_differing")
    if compared:
        yield Tile(
            f"{noun} that differ",
            "0" if not differing else f"{100 * differing / compared:.3g}%",
            f"{differing:,.0f} of {compared:,.0f} in rollout and training",
        )


def _last(record: RunRecord) -> Iterator[Tile]:
    """The first and the last step's reward, or loss where there is none."""
    for metric, label in (("reward/mean", "training reward"), ("loss", "training loss")):
        if values := record.values(metric):
            detail = f"mean of the last step; {number_text(values[0])} in the first"
            yield Tile(label, number_text(values[-1]), detail)
            return


def _time(record: RunRecord) -> Iterator[Tile]:
    phases = {
        name: record.total(f"time/{name}_s")
        for name in ("rollout", "training", "grading", "evaluation")
    }
    if sum(phases.values()):
        parts = [
            f"{name} {duration_text(spent)}" for name, spent in phases.items() if spent >= 0.05
        ]
        yield Tile("time", duration_text(sum(phases.values())), ", ".join(parts))


def state_of(record: RunRecord) -> str:
    """How many steps are done, and whether the run goes on."""
    steps = record.setting("config", "training", "steps")
    done = record.figures.last_step(
        name for name in record.names if not name.startswith(("eval/", "time/"))
    )
    of = f"{done} of {steps} steps" if isinstance(steps, int) else f"{done} steps"
    if record.finished:
        return f"finished, {of}"
    if record.is_running:
        return f"running: {of} so far"
    if record.ending:
        return f"stopped early: {of}"
    return f"not finished (stopped, or running elsewhere): {of} so far"


def reason_of(record: RunRecord) -> str:
    """Why a run was stopped early, and where it can be resumed; empty for any other."""
    if record.finished or record.is_running or not record.ending:
        return ""
    reason, checkpoint = record.ending.get("reason"), record.ending.get("checkpoint")
    text = f"Stopped early: {reason or record.ending.get('kind') or 'nobody said why'}"
    return f"{text}. Last checkpoint: step {checkpoint}" if checkpoint else text
