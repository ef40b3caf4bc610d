"""Which charts the page has, in which order.  Each figure is defined in ``docs/metrics.md``.

A figure that no panel names is not left out: it gets a chart of its own among the others.

What a reader should know about a run before its charts: how it ended, if not by itself, and what
went wrong on the way without ending it.

The figures on top of the page.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from isobit.observe.report.chart import Chart, Curve, Panel, draw, duration_text, number_text
from isobit.observe.report.source import RunRecord

TRUNCATED = 0.05
"""Share of the last step's completions that the length limit may end without a word."""
LEVEL = 0.5
"""Share of level groups over all steps from which they are named."""


def notices(record: RunRecord) -> list[str]:
    """A sentence each, the gravest first."""
    return [*_differing_notice(record), *_counts(record), *_last_step(record), *record.problems]


def total(record: RunRecord, metric: str) -> float:
    """The sum of a figure over all steps."""
    return sum(row.get(metric) or 0.0 for row in record.figures.values())


def _differing_notice(record: RunRecord) -> Iterator[str]:
    differing = total(record, "log_prob_diff/tokens_differing")
    if differing and record.setting("precision", "exact"):
        yield (
            f"{differing:,.0f} log-probabilities differ between rollout and training, in a flow "
            "where none should: isobit verify --bisect names the place"
        )


def _counts(record: RunRecord) -> Iterator[str]:
    steps = [row for row in record.figures.values() if "updates/skipped" in row]
    without = sum(row.get("updates/taken") == 0 for row in steps)
    if failed := total(record, "reward/failed"):
        yield (
            f"{failed:,.0f} rewards failed, and their completions were left out; the console says "
            "of each step which error came first"
        )
    if skipped := total(record, "updates/skipped"):
        yield f"{skipped:,.0f} updates were skipped: loss or gradient norm was not finite"
    if without_signal := total(record, "updates/without_signal"):
        yield (
            f"{without_signal:,.0f} updates had nothing to learn from, since all rewards of each "
            f"prompt were equal; no weight changed in {without:,} of {len(steps):,} steps"
        )
    shares = [v for row in steps if (v := row.get("reward/level_share")) is not None]
    if shares and (mean := sum(shares) / len(shares)) > LEVEL:
        yield (
            f"{100 * mean:.0f}% of all groups were level: no two of their rewards differ, and "
            "nothing is learnt from them; the problems are too easy or too hard for this model"
        )


def _last_step(record: RunRecord) -> Iterator[str]:
    rows = [row for row in record.figures.values() if "response_length/truncated" in row]
    cut = (rows[-1].get("response_length/truncated") or 0.0) if rows else 0.0
    if cut > TRUNCATED:
        limit = record.setting("config", "rollout", "max_new_tokens")
        yield (
            f"{100 * cut:.0f}% of the last step's completions were cut off by the length limit"
            + (f" of {limit} tokens" if isinstance(limit, int) else "")
            + " (rollout.max_new_tokens)"
        )


MOST_OTHERS = 24
"""Charts of figures that no panel names."""


@dataclass(frozen=True, slots=True)
class Section:
    """Charts under a heading; ``note`` says what was left out."""

    title: str
    charts: tuple[Chart, ...]
    constants: tuple[Chart, ...] = ()
    """Of figures that never change: their one value is said instead of drawn."""
    note: str = ""
    folded: bool = False
    """Whether it is shown on demand only."""


_LOSS = Panel("Loss", "mean of the updates", (Curve("loss", "loss"),))

_RESULTS = (
    Panel(
        "Response length",
        "tokens",
        (
            Curve("response_length/mean", "mean"),
            Curve("response_length/max", "longest", take="max"),
        ),
    ),
    Panel(
        "Level groups",
        "of the step's groups",
        (Curve("reward/level_share", "share"),),
        "without two rewards that differ: nothing is learnt from them",
        percent=True,
    ),
    Panel(
        "Refills",
        "a step",
        (
            Curve("rollout/refills", "refills"),
            Curve("rollout/dropped_groups", "level groups replaced"),
        ),
    ),
)

_LEARNING = (
    Panel(
        "Entropy",
        "nats",
        (Curve("entropy", "mean"),),
        "of the sampling distribution, over response tokens",
    ),
    Panel("Gradient norm", "before clipping", (Curve("grad_norm", "mean"),)),
    Panel("Learning rate", "mean of the updates", (Curve("learning_rate", "learning rate"),)),
    Panel(
        "Clip fraction",
        "of response tokens",
        (
            Curve("clip_fraction/low", "lower clip"),
            Curve("clip_fraction/high", "upper clip"),
            Curve("clip_fraction/dual", "dual clip"),
            Curve("value/clip_fraction", "of the value"),
        ),
        percent=True,
    ),
    Panel(
        "Ratio",
        "new over old probability",
        (
            Curve("ratio/mean", "mean"),
            Curve("ratio/max", "largest", take="max"),
            Curve("ratio/min", "smallest"),
        ),
    ),
    Panel(
        "Balance of the experts",
        "loss",
        (Curve("router/balance", "balance"),),
        "1 where all experts are chosen equally often",
    ),
    Panel(
        "Busiest expert",
        "share of a layer's choices",
        (Curve("router/busiest", "busiest", take="max"),),
    ),
    Panel("Idle experts", "experts", (Curve("router/idle", "idle", take="max"),)),
    Panel(
        "KL to the reference",
        "nats a token",
        (Curve("kl/k3", "k3"), Curve("kl/k1", "k1")),
        "two estimates of the same divergence",
    ),
    Panel("Value loss", "mean of the updates", (Curve("value/loss", "loss"),)),
    Panel(
        "Explained variance",
        "share",
        (Curve("value/explained_variance", "explained"),),
        "of the returns, by the value head; 1 is all of it",
    ),
)

_EXACTNESS = (
    Panel(
        "Differing tokens",
        "tokens a step",
        (Curve("log_prob_diff/tokens_differing", "differing", take="max"),),
        "log-probabilities whose bits differ in rollout and training",
    ),
    Panel(
        "Differing routings",
        "tokens a step",
        (Curve("routing_diff/tokens_differing", "differing", take="max"),),
        "tokens whose experts differ in rollout and training",
    ),
    Panel(
        "Mean difference",
        "nats",
        (Curve("log_prob_diff/mean", "mean"),),
        "of log-probabilities, absolute, over the tokens compared",
    ),
    Panel(
        "Largest difference",
        "nats",
        (
            Curve("log_prob_diff/max", "largest", take="max"),
            Curve("log_prob_diff/p99", "99th percentile"),
        ),
        "of log-probabilities, absolute",
    ),
    Panel(
        "Divergence",
        "nats a token",
        (Curve("mismatch/k3", "k3"), Curve("mismatch/k1", "k1")),
        "of training from rollout, two estimates",
    ),
    Panel(
        "Probability error",
        "factor",
        (Curve("mismatch/mult_prob_error", "mean"),),
        "mean of exp(absolute difference); 1 where rollout and training are one function",
    ),
    Panel(
        "Effective sample size",
        "of the tokens",
        (
            Curve("mismatch/effective_sample_size", "of the ratios"),
            Curve("correction/effective_sample_size", "of the corrections' weights"),
        ),
        percent=True,
    ),
    Panel("Correction", "mean weight", (Curve("correction/mean", "mean"),)),
    Panel(
        "Rejected",
        "of response tokens",
        (Curve("correction/rejected", "weight 0"),),
        "by the corrections",
        percent=True,
    ),
)

_REPLAY = (
    Panel(
        "Staleness",
        "updates",
        (Curve("staleness/mean", "mean"),),
        "since the weights that drew a response token, fresh ones included",
    ),
    Panel("Replayed", "completions a step", (Curve("replay/samples", "replayed"),)),
    Panel("Replay buffer", "completions", (Curve("replay/size", "held"),)),
)

_SPEED = (
    Panel(
        "Time a step",
        "seconds",
        (
            Curve("time/rollout_s", "rollout", take="per step"),
            Curve("time/training_s", "training", take="per step"),
            Curve("time/grading_s", "grading", take="per step"),
            Curve("time/evaluation_s", "evaluation", take="per step"),
        ),
        stacked=True,
    ),
    Panel(
        "Throughput",
        "tokens a second",
        (Curve("tokens_per_s/rollout", "rollout"), Curve("tokens_per_s/training", "training")),
    ),
)


def evaluation_sets(names: Sequence[str], figure: str = "accuracy") -> list[str]:
    """The evaluation sets that have ``figure`` among the names of figures."""
    pattern = re.compile(rf"eval/(?P<name>.+)/{figure}", re.DOTALL)
    return [found["name"] for name in names if (found := pattern.fullmatch(name))]


def build_sections(record: RunRecord) -> list[Section]:
    """The sections that have anything to show."""
    panels = panels_of(record)
    sections = [section_of(title, _draw(record, chosen)) for title, chosen in panels.items()]
    found = [*sections, _others(record, panels)]
    return [section for section in found if section.charts or section.constants]


def panels_of(record: RunRecord) -> dict[str, Sequence[Panel]]:
    """Which charts the figures of a run may have, by the titles of their sections."""
    evaluation = [_evaluation_panel(record, name) for name in evaluation_sets(record.names)]
    losses = [
        Panel(f"{name} loss", "nats a token", (Curve(f"eval/{name}/loss", "loss"),))
        for name in evaluation_sets(record.names, "loss")
    ]
    learns_by_reward = "reward/mean" in record.names
    first = () if learns_by_reward else (_LOSS,)
    last = (_LOSS,) if learns_by_reward else ()
    return {
        "Results": (*first, *losses, *evaluation, *_reward_panels(record), *_RESULTS),
        "Rollout against training": _EXACTNESS if _compares(record) else (),
        "Learning": (*_LEARNING, *last),
        "Speed": _SPEED,
        "Replay": _REPLAY if "replay/size" in record.names else (),
    }


def _compares(record: RunRecord) -> bool:
    """Whether any log-probability was compared: the figures of none are zeros that say nothing."""
    rows = record.figures.values()
    return any(row.get("log_prob_diff/tokens_compared") or "mismatch/k1" in row for row in rows)


def section_of(
    title: str, charts: Sequence[Chart], note: str = "", folded: bool = False
) -> Section:
    """Charts under a heading; of those that never change, the values."""
    moving = tuple(chart for chart in charts if not chart.constant)
    constants = tuple(chart for chart in charts if chart.constant)
    return Section(title, moving, constants, note, folded)


def _draw(record: RunRecord, panels: Sequence[Panel]) -> tuple[Chart, ...]:
    return tuple(chart for panel in panels if (chart := draw(panel, record.figures)) is not None)


def _evaluation_panel(record: RunRecord, name: str) -> Panel:
    prefix = f"eval/{name}"
    pass_at = [
        figure
        for figure in record.names
        if figure.startswith(f"{prefix}/pass@") and not figure.endswith("@1")
    ]
    accuracy = Curve(f"{prefix}/accuracy", "accuracy", between=(f"{prefix}/low", f"{prefix}/high"))
    others = [Curve(figure, figure.rpartition("/")[2]) for figure in pass_at[-2:]]
    values = [
        value for row in record.figures.values() if (value := row.get(accuracy.metric)) is not None
    ]
    percent = all(0.0 <= value <= 1.0 for value in values)
    return Panel(
        f"{name}",
        "accuracy" if percent else "mean reward",
        (accuracy, *others),
        "bars: 95% interval over problems",
        percent,
    )


def _reward_panels(record: RunRecord) -> list[Panel]:
    """The reward, and one for each of several."""
    completions = 1
    for key in ("prompts_per_step", "samples_per_prompt"):
        number = record.setting("config", "training", key)
        completions *= number if isinstance(number, int) and number > 0 else 0
    error = completions**-0.5 if completions else None
    note = "band: one standard error of the step's mean" if error else ""
    spread = "reward/{}std" if error else None
    pattern = re.compile(r"reward/(?P<name>[^/]+)/mean")
    names = [found["name"] for name in record.names if (found := pattern.fullmatch(name))]

    def panel(title: str, name: str, notes: Sequence[str]) -> Panel:
        band = spread.format(name) if spread else None
        curve = Curve(f"reward/{name}mean", "mean", spread=band, spread_factor=error or 1.0)
        return Panel(title, "mean", (curve,), "; ".join(one for one in notes if one))

    parts = [panel(f"Reward {name}", f"{name}/", ("before its weight", note)) for name in names]
    return [panel("Reward", "", (note,)), *parts]


def _others(record: RunRecord, panels: dict[str, Sequence[Panel]]) -> Section:
    """A chart for every figure that has none yet."""
    shown = {
        name
        for chosen in panels.values()
        for panel in chosen
        for curve in panel.curves
        for name in _figures_of(curve)
    }
    names = [name for name in record.names if name not in shown]
    charts = _draw(
        record,
        [Panel(name, "", (Curve(name, name.rpartition("/")[2]),)) for name in names[:MOST_OTHERS]],
    )
    left_out = len(names) - MOST_OTHERS
    note = f"{left_out} more figures are in metrics.jsonl only" if left_out > 0 else ""
    return section_of("Other figures", charts, note, folded=True)


def _figures_of(curve: Curve) -> list[str]:
    return [
        name for name in (curve.metric, curve.spread, *(curve.between or ())) if name is not None
    ]


_MOST_SETS = 3


@dataclass(frozen=True, slots=True)
class Tile:
    """A figure on top of the page."""

    label: str
    value: str
    detail: str


def tiles_of(record: RunRecord) -> list[Tile]:
    """Losses first where examples are learnt, then what evaluations found, then the rest."""
    losses = evaluation_sets(record.names, "loss")[:_MOST_SETS]
    return [
        *(_change(record, f"eval/{name}/loss", f"{name} loss") for name in losses),
        *(_accuracy(record, name) for name in evaluation_sets(record.names)[:_MOST_SETS]),
        *_differing(record, "log_prob_diff", "log-probabilities"),
        *_differing(record, "routing_diff", "routings"),
        *_last(record),
        *_time(record),
    ]


def _change(record: RunRecord, metric: str, label: str) -> Tile:
    values = [value for row in record.figures.values() if (value := row.get(metric)) is not None]
    if not values:
        return Tile(label, number_text(None), "no evaluation has a figure")
    before = "measured once" if len(values) == 1 else f"from {number_text(values[0])}"
    return Tile(label, number_text(values[-1]), before)


def _accuracy(record: RunRecord, name: str) -> Tile:
    rows = [row for row in record.figures.values() if row.get(f"eval/{name}/accuracy") is not None]
    if not rows:
        return Tile(f"{name} accuracy", number_text(None), "no evaluation has a figure")
    first, last = rows[0], rows[-1]
    accuracy = [row[f"eval/{name}/accuracy"] or 0.0 for row in (first, last)]
    percent = all(0.0 <= value <= 1.0 for value in accuracy)
    low, high = (last.get(f"eval/{name}/{side}") for side in ("low", "high"))
    problems = last.get(f"eval/{name}/problems")
    parts = [
        "" if len(rows) == 1 else f"from {number_text(accuracy[0], percent)}",
        f"95% interval {number_text(low, percent)} to {number_text(high, percent)}"
        if low is not None and high is not None
        else "",
        "" if problems is None else f"{number_text(problems)} problems",
    ]
    return Tile(
        f"{name} accuracy" if percent else f"{name} mean reward",
        number_text(accuracy[1], percent),
        "; ".join(part for part in parts if part),
    )


def _differing(record: RunRecord, kind: str, noun: str) -> Iterator[Tile]:
    compared = total(record, f"{kind}/tokens_compared")
    differing = total(record, f"{kind}/tokens_differing")
    if compared:
        yield Tile(
            f"{noun} that differ",
            "0" if not differing else f"{100 * differing / compared:.3g}%",
            f"{differing:,.0f} of {compared:,.0f} in rollout and training",
        )


def _last(record: RunRecord) -> Iterator[Tile]:
    """The first and the last step's reward, or loss where there is none."""
    for metric, label in (("reward/mean", "training reward"), ("loss", "training loss")):
        values = [v for row in record.figures.values() if (v := row.get(metric)) is not None]
        if values:
            detail = f"mean of the last step; {number_text(values[0])} in the first"
            yield Tile(label, number_text(values[-1]), detail)
            return


def _time(record: RunRecord) -> Iterator[Tile]:
    phases = {
        name: total(record, f"time/{name}_s")
        for name in ("rollout", "training", "grading", "evaluation")
    }
    if sum(phases.values()):
        parts = [
            f"{name} {duration_text(spent)}" for name, spent in phases.items() if spent >= 0.05
        ]
        yield Tile("time", duration_text(sum(phases.values())), ", ".join(parts))
