"""What 8 bits cost at each size: the runs of the ladder (``experiments.proof.ladder``) beside those
of SmolLM2-135M on ``multiply``, at three moments.

    before    the start answers in an arm's flow
    after     the trained weights answer in their own flow
    back      the trained weights answer in bf16

A difference is that of the held-out rewards to those of ``bf16``, for ``after`` and ``back`` to its
answers after training, paired by seed and problem, with the interval of
``experiments.proof.figures``.  All seeds have one start, so ``before`` counts its problems once.

The law: the loss of perplexity by E4M3 falls as N^-0.4 (fitted to the table of arXiv 2510.25602).
With differences that fall likewise, an arm's at N parameters are

    d(N) = d(N0) (N0 / N)^0.4       N0, d(N0): SmolLM2-135M's on multiply, as measured

where N counts the matrices of the layers, which are what is in 8 bits.
"""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median
from textwrap import wrap
from typing import Any, Literal

import torch

from experiments.proof import cost, figures, rows
from experiments.proof.ladder import BASE, FLOWS, PARAMETERS, PRETRAINED, Starts, task_of
from experiments.proof.rows import Repeats, Row
from experiments.proof.suite import LADDER, SITES, arms_of

Stage = Literal["before", "after", "back"]
STAGES: Mapping[Stage, str] = {
    "before": "before training",
    "after": "after training",
    "back": "after training, answered in bf16",
}
CALIBRATED = "fp8", "int8"
"""Arms that the law is drawn for, each from its own difference on ``PRETRAINED``."""
EXPONENT = 0.4
LAST = 25
"""Steps whose rewards are compared."""
POINT = 0.01
ARMS = tuple(arms_of(LADDER + "27m"))
DEFAULT = "int8-backward"
"""The arm of what ``int8`` is by default, whose forward is that of the arm ``int8``."""


@dataclass(frozen=True, slots=True)
class Difference:
    """A mean of rewards and its 95% interval, which is None where problems are not known."""

    mean: float
    low: float | None = None
    high: float | None = None

    @property
    def text(self) -> str:
        """In points."""
        said = f"{100 * self.mean:+.1f}"
        if self.low is None or self.high is None:
            return said
        return f"{said} [{100 * self.low:+.1f}, {100 * self.high:+.1f}]"


@dataclass(frozen=True, slots=True)
class Seconds:
    """Medians of a step."""

    rollout: float
    training: float
    jobs: int
    """How many runs shared the card."""
    by_cost: bool
    """Whether ``cost`` measured it, or the runs themselves."""

    @property
    def both(self) -> float:
        return self.rollout + self.training

    @property
    def text(self) -> str:
        beside = "" if self.jobs == 1 else f" ({self.jobs} at once)"
        return f"{self.rollout:.2f} + {self.training:.2f}{beside}"


@dataclass(frozen=True, slots=True)
class Measured:
    """One arm at one size."""

    size: str
    arm: str
    seeds: int
    asked: int
    """Problems of ``before``."""
    accuracies: Mapping[Stage, float]
    differences: Mapping[Stage, Difference]
    """To ``BASE``; of that arm none."""
    seconds: Seconds | None
    differing: str


def measured(found: Sequence[Row], costs: cost.Costs, starts: Starts) -> list[Measured]:
    """Of each size whatever is there, in the order of ``PARAMETERS`` and ``ARMS``."""
    return [
        _measured(size, arm, by_arm, costs.get(task_of(size), {}), starts.get(size, {}))
        for size, by_arm in by_size(found).items()
        for arm in ARMS
        if by_arm.get(arm) or arm in starts.get(size, {}).get("flows", {})
    ]


def by_size(found: Iterable[Row]) -> dict[str, dict[str, list[Row]]]:
    """Size -> arm -> its rows.  ``fp8-linear`` of ``PRETRAINED`` is among the ``sites``."""
    sizes: dict[str, dict[str, list[Row]]] = {size: {} for size in PARAMETERS}
    tasks = {task_of(size): size for size in PARAMETERS}
    for row in found:
        size = PRETRAINED if row["task"] == SITES else tasks.get(row["task"])
        if size is not None and row["arm"] in ARMS:
            sizes[size].setdefault(row["arm"], []).append(row)
    return sizes


def _measured(
    size: str,
    arm: str,
    by_arm: Mapping[str, Sequence[Row]],
    costs: Mapping[str, cost.Cost],
    start: Mapping[str, Any],
) -> Measured:
    ours, base = by_arm.get(arm, ()), by_arm.get(BASE, ())
    accuracies: dict[Stage, float] = {}
    differences: dict[Stage, Difference] = {}
    scores, theirs = _before(ours, base, arm, start)
    if scores:
        accuracies["before"] = fmean(scores)
    if scores and theirs and arm != BASE:
        both = min(len(scores), len(theirs))
        pair = torch.tensor([scores[:both]]) - torch.tensor([theirs[:both]])
        differences["before"] = _with_interval(pair)
    if ours:
        accuracies["after"] = fmean(fmean(figures.after(row)) for row in ours)
    if arm == BASE and ours:
        accuracies["back"] = accuracies["after"]
    elif others := [row for row in ours if "other_flow" in row]:
        accuracies["back"] = fmean(map(_accuracy_back, others))
        differences |= _differ("back", _back(others, base))
    if arm != BASE:
        pair = figures.paired(ours, base)
        differences |= _differ("after", None if pair is None else _with_interval(pair))
    seconds = _seconds(costs.get(arm), ours)
    asked = len(scores)
    return Measured(
        size, arm, len(ours), asked, accuracies, differences, seconds, figures.differing(ours)
    )


def _differ(stage: Stage, found: Difference | None) -> dict[Stage, Difference]:
    return {} if found is None else {stage: found}


def _with_interval(difference: torch.Tensor) -> Difference:
    return Difference(float(difference.double().mean()), *figures.interval(difference))


def _before(
    ours: Sequence[Row], base: Sequence[Row], arm: str, start: Mapping[str, Any]
) -> tuple[list[float], list[float]]:
    """The start's rewards in an arm's flow and in ``BASE``, of the same problems as far as both
    go: those that were answered without training, or else those of the runs, which are the first
    of them.
    """
    flows = start.get("flows", {})
    if arm in flows and BASE in flows:
        return flows[arm]["scores"], flows[BASE]["scores"]
    known = [figures.before(rows[0]) if rows else [] for rows in (ours, base)]
    return known[0], known[1]


def _accuracy_back(row: Row) -> float:
    return row["other_flow"]["sets"]["held_out"]["accuracy"]


def _back(ours: Sequence[Row], base: Sequence[Row]) -> Difference | None:
    """Rows of earlier sittings have the accuracy alone, and so no interval."""
    by_seed = {row["seed"]: figures.after(row) for row in base}
    pairs = [(row, by_seed[row["seed"]]) for row in ours if row["seed"] in by_seed]
    if not pairs:
        return None
    if all("rewards" in row["other_flow"] for row, _ in pairs):
        found = [
            torch.tensor(row["other_flow"]["rewards"]["held_out"]) - torch.tensor(theirs)
            for row, theirs in pairs
        ]
        return _with_interval(torch.stack(found))
    return Difference(fmean(_accuracy_back(row) - fmean(theirs) for row, theirs in pairs))


def _seconds(alone: cost.Cost | None, ours: Sequence[Row]) -> Seconds | None:
    """Alone on a card where that was measured, else of the runs that had the fewest beside them."""
    if alone is not None:
        rollout, training = (cost.seconds(alone, phase) for phase in cost.PHASES)
        return Seconds(rollout, training, 1, by_cost=True)
    if not ours:
        return None
    fewest = min(row["jobs"] for row in ours)
    rollout, training = (
        median(
            one for row in ours if row["jobs"] == fewest for one in row["steps"][f"time/{phase}_s"]
        )
        for phase in cost.PHASES
    )
    return Seconds(rollout, training, fewest, by_cost=False)


def law(found: Sequence[Measured], arm: str, stage: Stage, parameters: float) -> float | None:
    """The difference that is predicted at so many parameters; None where the arm was not measured
    on ``PRETRAINED``.
    """
    for one in found:
        if (one.size, one.arm) == (PRETRAINED, arm) and stage in one.differences:
            ratio = PARAMETERS[PRETRAINED] / parameters
            return one.differences[stage].mean * ratio**EXPONENT
    return None


# What is printed and kept.


COLUMNS = (
    "seeds",
    *("before", "after", "back in bf16"),
    *("before - bf16", "after - bf16", "back - bf16"),
    *("law: before", "law: after"),
    *("rollout + training, s a step", "of bf16", "differing"),
)


def table(found: Sequence[Measured]) -> Iterator[tuple[Measured, tuple[str, ...]]]:
    """Each arm of each size with a cell for each of ``COLUMNS``; differences in points."""
    for one in found:
        yield one, tuple(_cells(one, found))


def markdown(found: Sequence[Measured], starts: Starts) -> Iterator[str]:
    """The table, and the distributions of the starts."""
    yield f"| size, arm | {' | '.join(COLUMNS)} |"
    yield f"|---|{'---:|' * len(COLUMNS)}"
    for one, cells in table(found):
        yield f"| {one.size}, `{one.arm}` | {' | '.join(cells)} |"
    yield ""
    yield from _distributions(starts)


def _cells(one: Measured, found: Sequence[Measured]) -> Iterator[str]:
    yield str(one.seeds)
    for stage in STAGES:
        of = f" of {one.asked:,}" if stage == "before" else ""
        yield f"{one.accuracies[stage]:.1%}{of}" if stage in one.accuracies else "-"
    for stage in STAGES:
        yield one.differences[stage].text if stage in one.differences else "-"
    for stage in ("before", "after"):
        expected = law(found, one.arm, stage, PARAMETERS[one.size])
        known = expected is not None and one.arm in CALIBRATED and one.size != PRETRAINED
        yield f"{100 * expected:+.1f}" if known and expected is not None else "-"
    yield "-" if one.seconds is None else one.seconds.text
    ratio = _ratio(one, found)
    yield "-" if ratio is None else f"{ratio:.2f}x"
    yield one.differing if one.seeds else "-"


def _ratio(one: Measured, found: Sequence[Measured]) -> float | None:
    """Seconds of a step over those of ``BASE``, measured alike and beside as many others."""
    for base in found:
        if (base.size, base.arm) == (one.size, BASE) and base.seconds and one.seconds:
            ours, theirs = one.seconds, base.seconds
            same = (ours.jobs, ours.by_cost) == (theirs.jobs, theirs.by_cost)
            return ours.both / theirs.both if same else None
    return None


def _distributions(starts: Starts) -> Iterator[str]:
    if not starts:
        return
    flows = list(dict.fromkeys(name for one in starts.values() for name in one["flows"]))[1:]
    yield f"| the start's solutions | {' | '.join(f'`{flow}`' for flow in flows)} |"
    yield f"|---|{'---:|' * len(flows)}"
    for size in (size for size in PARAMETERS if size in starts):
        measured_flows = starts[size]["flows"]
        cells: list[str] = []
        for one in map(measured_flows.get, flows):
            if one is None:
                cells.append("-")
                continue
            loss = one["closeness"]["perplexity"] / one["perplexity_of_base"] - 1
            cells.append(f"{loss:+.3%}, {one['closeness']['rms']:.4f}")
        yield f"| {size}: perplexity, rms (nats) | {' | '.join(cells)} |"
    yield ""


def rewards(all_rows: Iterable[Row], again: Repeats) -> Iterator[str]:
    """A table of the rewards while training: of each arm and size, over the last ``LAST``
    steps that its runs and those of ``BASE`` have in common, minus ``BASE``, paired by seed and
    step (the same prompts).  Each arm samples in its own flow.  Runs that were lost before their
    end count up to there.
    """
    steps = {name: columns["reward/mean"] for name, columns in again.lost.items()}
    steps |= {rows.name_of(row): row["steps"]["reward/mean"] for row in all_rows}
    yield f"| reward while training, minus `{BASE}` | {' | '.join(f'`{a}`' for a in ARMS[1:])} |"
    yield f"|---|{'---:|' * len(ARMS[1:])}"
    for size in PARAMETERS:
        cells = [_rewards_of(task_of(size), arm, steps) for arm in ARMS[1:]]
        if any(cell != "-" for cell in cells):
            yield f"| {size} | {' | '.join(cells)} |"
    yield ""


def _rewards_of(task: str, arm: str, steps: Mapping[str, Sequence[float]]) -> str:
    parted = [name.rpartition("-") for name in sorted(steps)]
    seeds = [seed for ours, _, seed in parted if ours == f"{task}-{arm}"]
    pairs = [
        (steps[f"{task}-{arm}-{seed}"], base)
        for seed in seeds
        if (base := steps.get(f"{task}-{BASE}-{seed}"))
    ]
    if not pairs:
        return "-"
    end = min(len(one) for pair in pairs for one in pair)
    last = torch.tensor([[one[max(end - LAST, 0) : end] for one in pair] for pair in pairs])
    found = _with_interval(last[:, 0] - last[:, 1])
    return f"{found.text}, {_seeds(len(pairs))}, to step {end}"


def _seeds(count: int) -> str:
    return f"{count} seed" + "s" * (count != 1)


def verdicts(found: Sequence[Measured]) -> Iterator[str]:
    """What came out against what was hoped."""
    for arm in ARMS[1:]:
        yield from _verdict(arm, [one for one in found if one.arm == arm])


def _verdict(arm: str, ours: Sequence[Measured]) -> Iterator[str]:
    """At which sizes the interval of the difference is inside one point, outside, or neither; that
    of one seed knows nothing of others.
    """
    for stage in ("before", "after"):
        places: dict[str, list[str]] = {"within one point": [], "not": [], "undecided": []}
        for one in ours:
            found = one.differences.get(stage)
            if found is not None and found.low is not None and found.high is not None:
                within = found.low >= -POINT and found.high <= POINT
                outside = found.high < -POINT or found.low > POINT
                word = "within one point" if within else "not" if outside else "undecided"
                alone = one.seeds == 1 and stage == "after"
                places[word].append(f"{one.size} ({_seeds(1)})" if alone else one.size)
        said = [f"{word} at {', '.join(sizes)}" for word, sizes in places.items() if sizes]
        if said:
            yield f"- `{arm}`, {STAGES[stage]}: {'; '.join(said)}."


def notes(all_rows: Iterable[Row], again: Repeats) -> Iterator[str]:
    """How many log-probabilities of the ladder's exact arms differ, how many of its runs that were
    made again have the same bytes, and what differs between the rows of a size without an arm's
    doing.
    """
    ladder = [row for row in all_rows if row["task"].startswith(LADDER)]
    if exact := [row for row in ladder if row["arm"] in FLOWS]:
        names = ", ".join(f"`{arm}`" for arm in FLOWS if any(row["arm"] == arm for row in exact))
        yield f"- Differing log-probabilities of the ladder in {names}: {figures.differing(exact)}."
    yield from (f"- {note}" for note in rows.repeat_notes(ladder, again))
    for task, ours in figures.by_task(ladder).items():
        yield from (f"- `{task}`: {note}" for note in rows.setting_notes(ours))


def advice(found: Sequence[Measured], all_rows: Sequence[Row]) -> dict[str, Any]:
    """What ``isobit flows`` says of sizes (``isobit.observe.flow_choice``).  Raises ValueError
    where no arm of the ladder has a difference after training: then it says nothing.
    """
    names = {arm: flow.name for arm, flow in FLOWS.items()} | {DEFAULT: "int8"}
    ours = [one for one in found if one.differences and one.arm in names]
    if not any(one.size != PRETRAINED and "after" in one.differences for one in ours):
        raise ValueError(
            "no two arms of the ladder are finished: there is nothing to say of sizes; "
            "run ladder-SIZE in bf16 and in another arm"
        )
    used = [row for row in all_rows if row["task"] in {task_of(one.size) for one in ours}]
    cards = sorted({row["run"]["device"].get("model") or "cpu" for row in used})
    days = sorted({row["run"]["started"][:10] for row in used})
    steps = sorted({len(row["steps"]["step"]) for row in used})
    return {
        "task": "multiply: products of a 6- and a 5-digit number, worked out in 900 tokens",
        "steps": steps,
        "cards": cards,
        "days": [days[0], days[-1]],
        "sizes": [
            {
                "name": size,
                "layer_parameters": PARAMETERS[size],
                "flows": {
                    names[one.arm]: {"seeds": one.seeds}
                    | {s: asdict(d) for s, d in one.differences.items() if s != "back"}
                    for one in ours
                    if one.size == size
                },
            }
            for size in dict.fromkeys(one.size for one in ours)
        ],
    }


BEGIN, END = "<!-- sizes -->", "<!-- end of sizes -->"
"""Around the table of a page."""


def page_lines(lines: Sequence[str], picture: Path | None, page: Path) -> str:
    """What belongs into a page, prose in lines of 100 columns: the picture by its place from there,
    and the table.
    """
    wrapped = [part for line in lines for part in _wrapped(line)]
    if picture is None:
        return "\n".join(wrapped)
    place = os.path.relpath(picture, page.parent)
    return "\n".join((f"![Points minus bf16 against parameters]({place})", "", *wrapped))


def _wrapped(line: str) -> list[str]:
    if not line.startswith("- "):
        return [line]
    return wrap(line, 100, subsequent_indent="  ", break_on_hyphens=False, break_long_words=False)


def with_block(page: str, block: str) -> str:
    """The page with this text between its marks.  Raises ValueError for one without marks."""
    before, begins, rest = page.partition(BEGIN)
    _, ends, after = rest.partition(END)
    if not (begins and ends):
        raise ValueError(f"the page has no block {BEGIN} .. {END}, where the table belongs")
    return f"{before}{BEGIN}\n\n{block}\n\n{END}{after}"
