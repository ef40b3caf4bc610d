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

    ROWS/starts/SIZE.json.xz    how a start answers in several flows, without training: of each its
                                scores, and what ``isobit flows`` measures of its distributions
"""

import os
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median
from textwrap import wrap
from typing import Any, Literal

import torch

from experiments.proof import cost, figures, rows, runs
from experiments.proof.ladder import SIZES
from experiments.proof.rows import Repeats, Row
from experiments.proof.suite import LADDER, SITES, Changes, Run, arms_of
from isobit import load_config
from isobit.config.tables import PrecisionConfig
from isobit.observe.flow_choice import flow_name
from isobit.run.flows import compare_flows, read_flow

Stage = Literal["before", "after", "back"]
STAGES: Mapping[Stage, str] = {
    "before": "before training",
    "after": "after training",
    "back": "after training, answered in bf16",
}
BASE = "bf16"
PRETRAINED = "SmolLM2-135M"
CALIBRATED = "fp8", "int8"
"""Arms that the law is drawn for, each from its own difference on ``PRETRAINED``."""
EXPONENT = 0.4
POINT = 0.01
PARAMETERS = {PRETRAINED: SIZES["108m"].parameters} | {
    size: one.parameters for size, one in SIZES.items()
}
"""Of a size's layers; ``108m`` is the shape of ``PRETRAINED`` with other embeddings."""
ARMS = tuple(arms_of(LADDER + "27m"))


def _flow_of(said: str) -> PrecisionConfig:
    """A preset's name, or a table as TOML has it."""
    return read_flow(tomllib.loads(f"flow = {said}")["flow"] if said.startswith("{") else said)


FLOWS: Mapping[str, PrecisionConfig] = {
    arm: _flow_of(changes["precision"])
    for arm, changes in arms_of(LADDER + "27m").items()
    if "corrections" not in changes
}
"""Arms that are one function, with their precision."""
STARTS = "starts"
Starts = Mapping[str, Mapping[str, Any]]
"""Size -> what its file in ``STARTS`` holds."""


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
    jobs: tuple[int, ...]
    """How many runs shared the card; (1,) alone."""

    @property
    def both(self) -> float:
        return self.rollout + self.training


@dataclass(frozen=True, slots=True)
class Measured:
    """One arm at one size."""

    size: str
    arm: str
    seeds: int
    accuracies: Mapping[Stage, float]
    differences: Mapping[Stage, Difference]
    """To ``BASE``; of that arm none."""
    seconds: Seconds | None
    differing: str


def measured(found: Sequence[Row], costs: cost.Costs, starts: Starts) -> list[Measured]:
    """Of each size whatever is there, in the order of ``PARAMETERS`` and ``ARMS``."""
    return [
        _measured(size, arm, by_arm, costs.get(_task(size), {}), starts.get(size, {}))
        for size, by_arm in by_size(found).items()
        for arm in ARMS
        if by_arm.get(arm) or arm in starts.get(size, {}).get("flows", {})
    ]


def by_size(found: Iterable[Row]) -> dict[str, dict[str, list[Row]]]:
    """Size -> arm -> its rows.  ``fp8-linear`` of ``PRETRAINED`` is among the ``sites``."""
    sizes: dict[str, dict[str, list[Row]]] = {size: {} for size in PARAMETERS}
    tasks = {_task(size): size for size in PARAMETERS}
    for row in found:
        size = PRETRAINED if row["task"] == SITES else tasks.get(row["task"])
        if size is not None and row["arm"] in ARMS:
            sizes[size].setdefault(row["arm"], []).append(row)
    return sizes


def _task(size: str) -> str:
    return "multiply" if size == PRETRAINED else LADDER + size


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
        pair = torch.tensor([scores]) - torch.tensor([theirs])
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
    return Measured(size, arm, len(ours), accuracies, differences, seconds, figures.differing(ours))


def _differ(stage: Stage, found: Difference | None) -> dict[Stage, Difference]:
    return {} if found is None else {stage: found}


def _with_interval(difference: torch.Tensor) -> Difference:
    return Difference(float(difference.double().mean()), *figures.interval(difference))


def _before(
    ours: Sequence[Row], base: Sequence[Row], arm: str, start: Mapping[str, Any]
) -> tuple[list[float], list[float]]:
    """The start's rewards in an arm's flow and in ``BASE``, of the same problems: those of the
    runs, or else those that were answered without training.
    """
    if ours and base:
        return figures.before(ours[0]), figures.before(base[0])
    flows = start.get("flows", {})
    if arm in flows and BASE in flows:
        return flows[arm]["scores"], flows[BASE]["scores"]
    return (figures.before(ours[0]) if ours else []), []


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
    """Alone on a card where that was measured, else side by side."""
    if alone is not None:
        rollout, training = (cost.seconds(alone, phase) for phase in cost.PHASES)
        return Seconds(rollout, training, (1,))
    if not ours:
        return None
    rollout, training = (
        median(one for row in ours for one in row["steps"][f"time/{phase}_s"])
        for phase in cost.PHASES
    )
    return Seconds(rollout, training, tuple(sorted({row["jobs"] for row in ours})))


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
    """The table, the distributions of the starts, and what came out against what was hoped."""
    yield f"| size, arm | {' | '.join(COLUMNS)} |"
    yield f"|---|{'---:|' * len(COLUMNS)}"
    for one, cells in table(found):
        yield f"| {one.size}, `{one.arm}` | {' | '.join(cells)} |"
    yield ""
    yield from _distributions(starts)
    for arm in ARMS[1:]:
        yield from _verdict(arm, [one for one in found if one.arm == arm])


def _cells(one: Measured, found: Sequence[Measured]) -> Iterator[str]:
    yield str(one.seeds)
    for stage in STAGES:
        yield f"{one.accuracies[stage]:.1%}" if stage in one.accuracies else "-"
    for stage in STAGES:
        yield one.differences[stage].text if stage in one.differences else "-"
    for stage in ("before", "after"):
        expected = law(found, one.arm, stage, PARAMETERS[one.size])
        known = expected is not None and one.arm in CALIBRATED and one.size != PRETRAINED
        yield f"{100 * expected:+.1f}" if known and expected is not None else "-"
    beside = "" if one.seconds is None or one.seconds.jobs == (1,) else _beside(one.seconds)
    yield (
        "-"
        if one.seconds is None
        else f"{one.seconds.rollout:.2f} + {one.seconds.training:.2f}{beside}"
    )
    ratio = _ratio(one, found)
    yield "-" if ratio is None else f"{ratio:.2f}x"
    yield one.differing if one.seeds else "-"


def _beside(seconds: Seconds) -> str:
    return f" ({' or '.join(map(str, seconds.jobs))} at once)"


def _ratio(one: Measured, found: Sequence[Measured]) -> float | None:
    """Seconds of a step over those of ``BASE``, measured beside as many others."""
    for base in found:
        if (base.size, base.arm) == (one.size, BASE) and base.seconds and one.seconds:
            same = base.seconds.jobs == one.seconds.jobs and len(base.seconds.jobs) == 1
            return one.seconds.both / base.seconds.both if same else None
    return None


def _distributions(starts: Starts) -> Iterator[str]:
    if not starts:
        return
    flows = list(dict.fromkeys(name for one in starts.values() for name in one["flows"]))[1:]
    yield f"| the start's solutions | {' | '.join(f'`{flow}`' for flow in flows)} |"
    yield f"|---|{'---:|' * len(flows)}"
    for size in (size for size in PARAMETERS if size in starts):
        all_flows = starts[size]["flows"]
        base = all_flows[BASE]["closeness"]["perplexity"]
        cells = [
            f"{all_flows[flow]['closeness']['perplexity'] / base - 1:+.3%}, "
            f"{all_flows[flow]['closeness']['rms']:.4f}"
            for flow in flows
        ]
        yield f"| {size}: perplexity, rms (nats) | {' | '.join(cells)} |"
    yield ""


def _verdict(arm: str, ours: Sequence[Measured]) -> Iterator[str]:
    """At which sizes the interval of the difference is inside one point, outside, or neither."""
    for stage in ("before", "after"):
        places: dict[str, list[str]] = {"within one point": [], "not": [], "undecided": []}
        for one in ours:
            found = one.differences.get(stage)
            if found is not None and found.low is not None and found.high is not None:
                within = found.low >= -POINT and found.high <= POINT
                outside = found.high < -POINT or found.low > POINT
                word = "within one point" if within else "not" if outside else "undecided"
                places[word].append(one.size)
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
    ours = [one for one in found if one.differences and one.arm in FLOWS]
    if not any(one.size != PRETRAINED and "after" in one.differences for one in ours):
        raise ValueError(
            "no two arms of the ladder are finished: there is nothing to say of sizes; "
            "run ladder-SIZE in bf16 and in another arm"
        )
    used = [row for row in all_rows if row["task"] in {_task(one.size) for one in ours}]
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
                    flow_name(FLOWS[one.arm]): {"seeds": one.seeds}
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


def answer_start(directory: Path, size: str, changes: Changes) -> Path:
    """Answer and score the held-out problems with an untrained start in ``BASE`` and those of
    ``FLOWS`` that its row lacks, in this process; -> DIR/rows/starts/SIZE.json.xz.  ``size`` is one
    of ``PARAMETERS``.  Raises ValueError as ``with_flows`` does.
    """
    run = Run(_task(size), BASE, 0)
    words = runs.words_of({**runs.places_of(run, directory), **run.shared, **changes})
    folder = directory / run.start / "model"
    out = directory / "rows" / STARTS / f"{size}{rows.SUFFIX}"
    kept = rows.read_row(out) if out.is_file() else None
    lacking = [arm for arm in FLOWS if kept is None or arm not in kept["flows"]]
    if kept is not None and not lacking:
        return out
    config = load_config(runs.recipe_of(run.problems), words)
    others = [FLOWS[arm] for arm in lacking if arm != BASE]
    found = compare_flows(folder, config, others, answers="completion")
    names = {flow_name(precision): arm for arm, precision in FLOWS.items()}
    row = {
        "start": rows.weights_sha256(folder),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "problems": found.problems,
        "tokens": found.tokens,
        "flows": {
            names[one.name]: {
                "accuracy": None if one.result is None else one.result.accuracy,
                "scores": list(one.scores),
                "closeness": None if one.closeness is None else asdict(one.closeness),
                "generated_tokens_per_s": one.generated_per_s,
            }
            for one in found.flows
            if one.problem is None
        },
    }
    rows.write_row(out, row if kept is None else with_flows(kept, row))
    return out


def with_flows(kept: Mapping[str, Any], found: Mapping[str, Any]) -> dict[str, Any]:
    """A start's row with the flows of another that it lacks.  Raises ValueError unless both are of
    the same weights and ``BASE`` answered alike in both.
    """
    if kept["start"] != found["start"]:
        raise ValueError(
            f"the row is of a start whose SHA-256 is {kept['start']}, this start's is "
            f"{found['start']}: make the start of that row again, or move the row away"
        )
    if kept["flows"][BASE]["scores"] != found["flows"][BASE]["scores"]:
        raise ValueError(
            f"{BASE} answers otherwise than in the row, from the same weights: flows that were "
            "measured apart cannot be compared; move the row away and measure all of them"
        )
    flows = {**found["flows"], **kept["flows"]}
    return {**kept, "flows": {arm: flows[arm] for arm in FLOWS if arm in flows}}


def read_starts(folder: Path) -> Starts:
    """Of the sizes that were answered without training.  Raises ValueError for a file that cannot
    be read.
    """
    found = folder / STARTS
    return {
        size: rows.read_row(path)
        for size in PARAMETERS
        if (path := found / f"{size}{rows.SUFFIX}").is_file()
    }
