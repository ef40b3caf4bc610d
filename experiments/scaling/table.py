"""A model on growing numbers of GPUs, and the tables of it.

efficiency   the samples a second and GPU, of those of the fewest GPUs that hold the model, with
             the same recomputation and as many places: what is lost to being many.  Weak: the
             same samples as steps of their own, each on as few GPUs, their mean.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from math import fsum
from statistics import mean
from typing import Any, Literal

from experiments.scaling.costs import Model
from experiments.scaling.rollout import GROUP, Group, draw_groups
from experiments.scaling.step import Layout, Setting, Step, room, simulate

GPUS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
WEAK_GROUPS, STRONG_GROUPS = 32, 256
Scaling = Literal["weak", "strong"]
Row = dict[str, Any]


def layouts(gpus: int) -> list[Layout]:
    """With one slot, and on several hosts with one a host too."""
    one = Layout(gpus)
    return [one] if one.hosts == 1 else [one, Layout(gpus, one.hosts)]


def fewest(model: Model) -> int:
    """The fewest GPUs that hold a run of the model."""
    counts = [gpus for gpus in GPUS if gpus % model.rollout_tp == 0]
    return next(gpus for gpus in counts if room(model, gpus, 1).fits)


def rows(
    model: Model, scaling: Scaling, gpus: Sequence[int], seeds: Sequence[int]
) -> Iterator[Row]:
    """A row for each layout; means of the seeds."""
    for layout in (layout for count in gpus for layout in layouts(count)):
        found = room(model, layout.gpus, layout.slots)
        row: Row = {
            "kind": "simulated",
            "shape": model.name,
            "mode": "fp8",
            "scaling": scaling,
            "gpus": layout.gpus,
            "slots": layout.slots,
            **({"rollout_tp": model.rollout_tp} if model.rollout_tp > 1 else {}),
            "peak_gib": found.training,
            "recompute": found.recompute,
            "places": found.places,
        }
        if not found.fits or found.recompute is None:
            yield row | {"fits": False}
            continue
        setting = Setting(found.recompute, found.places)
        draws = [draw_groups(_groups(scaling, layout.gpus), seed) for seed in seeds]
        steps = [simulate(model, layout, setting, groups) for groups in draws]
        alone = [_alone(model, scaling, layout, setting, groups) for groups in draws]
        yield row | {"fits": True} | _figures(steps, alone, layout)


def _groups(scaling: Scaling, gpus: int) -> int:
    return WEAK_GROUPS * gpus if scaling == "weak" else STRONG_GROUPS


def _alone(
    model: Model, scaling: Scaling, layout: Layout, setting: Setting, groups: tuple[Group, ...]
) -> float:
    """GPU seconds that the same samples take on the fewest GPUs."""
    few = Layout(min(fewest(model), layout.gpus))
    size = WEAK_GROUPS * few.gpus if scaling == "weak" else len(groups)
    parts = [groups[first : first + size] for first in range(0, len(groups), size)]
    return few.gpus * fsum(simulate(model, few, setting, part).phases.total for part in parts)


def _figures(steps: Sequence[Step], alone: Sequence[float], layout: Layout) -> Row:
    seconds = [step.phases.total for step in steps]
    samples = len(steps[0].rolled.done)
    phases = [asdict(step.phases) for step in steps]
    busiest = [max(step.sent, key=lambda one: one.nvlink + one.nic) for step in steps]
    return {
        "samples": samples,
        "step_s": mean(seconds),
        "samples_per_s": samples / mean(seconds),
        "efficiency": mean(
            one / (layout.gpus * step) for one, step in zip(alone, seconds, strict=True)
        ),
        "phases_s": {name: mean(one[name] for one in phases) for name in phases[0]},
        "microbatches": mean(step.microbatches for step in steps),
        "moves": mean(step.rolled.moves for step in steps),
        "nvlink_gb": mean(one.nvlink for one in busiest) / 1e9,
        "nic_gb": mean(one.nic for one in busiest) / 1e9,
    }


SHORT = (8, 16, 32, 64, 128, 256, 512)
TIMES = ("rollout", "compute", "exchange", "waiting", "other")
HEAD = ("GPUs", "slots", "GiB", "step s", *TIMES, "NVLink", "NIC")
"""Columns: peak memory, seconds of a step and of its parts, GB that one GPU sends by each way."""


def markdown(found: Sequence[Row]) -> str:
    """The table of one model and one kind of scaling: nothing recomputed unless a row names it."""
    rule = ["---:"] * len(HEAD)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (HEAD, rule, *map(_cells, found)))


def _cells(row: Row) -> list[str]:
    start = [str(row["gpus"]), str(row["slots"])]
    if not row["fits"]:
        return [*start, f"{row['peak_gib']:.0f}", "too large", *["-"] * (len(HEAD) - 4)]
    recompute = "" if row["recompute"] == "none" else f" (`{row['recompute']}`)"
    phases = row["phases_s"]
    times = [phases[name] for name in ("rollout", "compute", "exchange")]
    times.append(phases["uneven"] + phases["idle_last_round"])
    times.append(phases["gather"] + phases["optimiser"] + phases["other"])
    return [
        *start,
        f"{row['peak_gib']:.0f}{recompute}",
        f"**{row['step_s']:.1f}**",
        *(f"{seconds:.2f}" if seconds < 1 else f"{seconds:.1f}" for seconds in times),
        f"{row['nvlink_gb']:,.0f}",
        f"{row['nic_gb']:,.0f}",
    ]


def title(row: Row) -> str:
    each = f"{WEAK_GROUPS * GROUP} samples a GPU"
    samples = each if row["scaling"] == "weak" else f"{STRONG_GROUPS * GROUP:,} samples in all"
    return f"{_name(row)}, {row['scaling']} scaling, {samples}"


def _name(row: Row) -> str:
    ranks = row.get("rollout_tp", 1)
    return row["shape"] if ranks == 1 else f"{row['shape']} with `rollout_tp` {ranks}"


def overview(found: Sequence[Row]) -> str:
    """Seconds of a step and efficiency of each model from 8 GPUs on, with the slots that are
    faster; a dash where it does not fit.
    """
    head = ["GPUs", *map(str, SHORT)]
    lines = [head, ["---", *["---:"] * len(SHORT)]]
    for name in dict.fromkeys((_name(row), row["scaling"]) for row in found):
        of_it = [row for row in found if (_name(row), row["scaling"]) == name]
        lines.append([", ".join(name), *(_best(of_it, gpus) for gpus in SHORT)])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _best(found: Sequence[Row], gpus: int) -> str:
    fitting = [row for row in found if row["gpus"] == gpus and row["fits"]]
    if not fitting:
        return "-"
    best = min(fitting, key=lambda row: row["step_s"])
    return f"{best['step_s']:,.0f}, {best['efficiency']:.0%}"
