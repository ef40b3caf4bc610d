"""What is kept of a finished run: a row, ``ROWS/TASK-ARM-SEED.json.xz``.

    task, arm, seed
    jobs            runs side by side while it ran, on average; times of rows with other jobs do not
                    compare
    run             run.json: the resolved recipe, digests of data and tokenizer, versions, GPU
    summary         summary.json
    start, final    SHA-256 of each file of the first and of the last weights
    completions     SHA-256 of rewards.jsonl, which has digests of all completions and their rewards
    steps           a column for each figure that the table and the page use, and the times
    evaluations     step, seconds and mean length of each, and the reward of each held-out problem
    other_flow      how the last weights answer in another flow, where that was measured

The same content makes the same bytes, about 20 KB for 150 steps.

Settings are the dotted names and values of a row (``config.training.steps``,
``start.model.safetensors``), without paths, the seed, and memory, on which no bit depends.  An arm
may change settings of the recipe; whatever else differs between the rows of a task is reported.

A run that was made again on another day or card lies in ``ROWS/repeats``, under the same name, or
as ``TASK-ARM-SEED.jsonl.xz``, the metrics of a run that was lost before its row.  It is compared
with the first: completions and rewards, the figures of every step but times, held-out rewards, and
final weights must be the same bytes.
"""

import json
import lzma
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from experiments.proof.suite import write_whole
from isobit.observe.report.settings import flatten
from isobit.util.files import file_sha256

Row = Mapping[str, Any]
SUFFIX = ".json.xz"
REPEATS = "repeats"
FIGURES = (
    "reward/mean",
    "response_length/mean",
    "entropy",
    "grad_norm",
    "log_prob_diff/mean",
    "log_prob_diff/tokens_compared",
    "log_prob_diff/tokens_differing",
    "mismatch/mult_prob_error",
    "time/rollout_s",
    "time/grading_s",
    "time/training_s",
)
"""Of each step, as in metrics.jsonl; None where a step has none."""


def row_of(output: Path) -> dict[str, Any]:
    """What a finished run's directory says.  Raises FileNotFoundError where it has no weights."""
    run = json.loads((output / "run.json").read_text(encoding="utf-8"))
    metrics = _lines(output / "metrics.jsonl")
    return {
        "run": run,
        "summary": json.loads((output / "summary.json").read_text(encoding="utf-8")),
        "start": weights_sha256(Path(run["model"]["folder"])),
        "final": weights_sha256(output / "model"),
        "completions": file_sha256(output / "rewards.jsonl"),
        "steps": columns_of(metrics),
        "evaluations": _evaluations(output, metrics),
    }


def weights_sha256(folder: Path) -> dict[str, str]:
    """File -> SHA-256.  Raises FileNotFoundError for a folder without weights."""
    found = {path.name: file_sha256(path) for path in sorted(folder.glob("*.safetensors"))}
    if not found:
        raise FileNotFoundError(f"{folder} has no *.safetensors; a row names the weights' digests")
    return found


def held_out(rewards: Path) -> list[list[float | None]]:
    """The rewards of all held-out problems, in their order, of each evaluation of a run; None where
    the reward failed.
    """
    return [
        [one for (one,) in line["rewards"]]
        for line in _lines(rewards)
        if line["prompts"][0][0].startswith("held_out/")
    ]


def write_row(path: Path, row: Row) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(row, separators=(",", ":"), ensure_ascii=False)
    write_whole(path, lzma.compress(text.encode(), preset=9 | lzma.PRESET_EXTREME))


def read_finished(directory: Path) -> list[Row]:
    """The rows of a folder, by name.  Raises ValueError for a file that cannot be read."""
    return [read_row(path) for path in sorted(directory.glob(f"*{SUFFIX}"))]


def name_of(row: Row) -> str:
    return f"{row['task']}-{row['arm']}-{row['seed']}"


def read_row(path: Path) -> Row:
    """Raises ValueError for a file that is not a row."""
    try:
        return json.loads(lzma.decompress(path.read_bytes()))
    except (lzma.LZMAError, ValueError) as error:
        raise ValueError(
            f"{path} is no row ({error}): rows are JSON in xz; copy it again, or delete it"
        ) from error


def steps_of(lines: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl that are a step's, not an evaluation's."""
    return [line for line in lines if "reward/mean" in line]


def columns_of(lines: Iterable[dict[str, Any]]) -> dict[str, list[Any]]:
    """``steps`` of a row, from metrics.jsonl."""
    steps = steps_of(lines)
    return {name: [line.get(name) for line in steps] for name in ("step", *FIGURES)}


def _evaluations(output: Path, metrics: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Both files have a line an evaluation, in one order."""
    figures = [line for line in metrics if "eval/held_out/accuracy" in line]
    return [
        {
            "step": line["step"],
            "seconds": line["time/evaluation_s"],
            "response_length": line["eval/held_out/response_length"],
            "rewards": rewards,
        }
        for line, rewards in zip(figures, held_out(output / "rewards.jsonl"), strict=True)
    ]


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


_PARTS = ("config", "inputs", "device", "versions", "bits")
_OWN = ("config.seed", "config.model", "config.output", "config.rollout.kv_memory_gib")

_REWARD = "config.reward.function"
_REWARD_BEFORE = "benchmarks.arms.reward:correct"
_REWARD_NOW = "experiments.proof.reward:correct"
"""The same function by its present name: rows made before November 25 have the other."""
_SHA256 = re.compile("[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class Settings:
    shared: dict[str, str]
    by_arm: dict[str, dict[str, str]]
    """Name -> arm -> value; empty where the arm has no such key."""
    mixed: dict[str, tuple[str, ...]]
    """The values of what differs without an arm's doing."""


def settings_of(rows: Sequence[Row]) -> Settings:
    """The settings of rows of one task; what differs between rows of one arm is ``mixed``."""
    found = [(row["arm"], flat(row)) for row in rows]
    names = dict.fromkeys(name for _, one in found for name in one)
    shared: dict[str, str] = {}
    by_arm: dict[str, dict[str, str]] = {}
    mixed: dict[str, tuple[str, ...]] = {}
    for name in names:
        values = [(arm, one.get(name, "")) for arm, one in found]
        different = tuple(dict.fromkeys(value for _, value in values))
        if len(different) == 1:
            shared[name] = different[0]
        elif len(dict.fromkeys(values)) == len({arm for arm, _ in values}) and _may(name):
            by_arm[name] = dict(values)
        else:
            mixed[name] = different
    return Settings(shared, by_arm, mixed)


def flat(row: Row) -> dict[str, str]:
    parts = {part: row["run"].get(part, {}) for part in _PARTS}
    found = dict(flatten({**parts, "start": row["start"]}))
    if found.get(_REWARD) == _REWARD_BEFORE:
        found[_REWARD] = _REWARD_NOW
    return {
        name: value
        for name, value in found.items()
        if name not in _OWN and not (name.startswith("config.data.") and name.endswith(".path"))
    }


def setting_notes(rows: Sequence[Row]) -> list[str]:
    """Notes on settings that are not the same in all rows."""
    mixed = settings_of(rows).mixed
    texts = [f"{name} ({', '.join(map(_short, mixed[name]))})" for name in mixed]
    return [f"Not the same in all rows: {'; '.join(texts)}."] if texts else []


def _short(value: str) -> str:
    """The first digits of a SHA-256."""
    return value[:8] if _SHA256.fullmatch(value) else value or "none"


def _may(name: str) -> bool:
    """An arm changes the recipe; data, machine and start are the same for all."""
    return name.startswith("config.")


LOST = ".jsonl.xz"

_MAY_DIFFER = ("device.", "versions.", "bits.")
"""Settings that differ on another machine."""
_REPEATED: dict[str, Callable[[Row], Any]] = {
    "settings": lambda row: {
        name: value for name, value in flat(row).items() if not name.startswith(_MAY_DIFFER)
    },
    "completions and rewards": lambda row: row["completions"],
    "figures of the steps": lambda row: _but_times(row["steps"]),
    "held-out rewards": lambda row: [(one["step"], one["rewards"]) for one in row["evaluations"]],
    "final weights": lambda row: row["final"],
}


@dataclass(frozen=True, slots=True)
class Repeats:
    """What is kept of runs that were made twice, beside the rows."""

    rows: Sequence[Row] = ()
    lost: Mapping[str, Mapping[str, list[Any]]] = field(default_factory=dict)
    """A run's name -> ``steps`` as in a row, up to where the run was lost."""


def read_repeats(directory: Path) -> Repeats:
    """Whatever lies in ``repeats``, at any depth.  Raises ValueError for what cannot be read."""
    found = directory / REPEATS
    return Repeats(
        [read_row(path) for path in sorted(found.rglob(f"*{SUFFIX}"))],
        {
            path.name.removesuffix(LOST): columns_of(_metric_lines(path))
            for path in sorted(found.rglob(f"*{LOST}"))
        },
    )


def differing_parts(first: Row, second: Row) -> list[str]:
    """The names of the parts that differ."""
    return [name for name, part in _REPEATED.items() if part(first) != part(second)]


def repeat_notes(rows: Iterable[Row], again: Repeats) -> Iterator[str]:
    """How many of the repeats of these rows have the same bytes, where there are any."""
    first = {name_of(row): row for row in rows}
    yield from _of_rows(first, again.rows)
    yield from _of_lost(first, again.lost)


def _of_rows(first: Mapping[str, Row], again: Iterable[Row]) -> Iterator[str]:
    pairs = [(first[name_of(row)], row) for row in again if name_of(row) in first]
    found = [(one, two, differing_parts(one, two)) for one, two in pairs]
    if not found:
        return
    same = [one for one, _, parts in found if not parts]
    yield (
        f"Repeated on another day or card: {len(same)} of {len(found)} the same bytes "
        "(completions, rewards, figures of every step, final weights)."
    )
    for one, two, parts in found:
        if parts:
            where = f"{_where(one)}; again: {_where(two)}"
            yield f"{name_of(two)} ({where}) has other: {', '.join(parts)}."


def _of_lost(
    first: Mapping[str, Row], lost: Mapping[str, Mapping[str, list[Any]]]
) -> Iterator[str]:
    found = {name: steps for name, steps in lost.items() if name in first}
    if not found:
        return
    other = [
        name for name, steps in found.items() if _beginning(first[name], steps) != _but_times(steps)
    ]
    steps = sum(len(found[name]["step"]) for name in found if name not in other)
    yield (
        f"Made once more and lost before its row: {len(found) - len(other)} of {len(found)} with "
        f"the same figures in every step ({steps:,} steps)."
    )
    for name in other:
        yield f"{name} has other figures of the steps than the run that was lost."


def _beginning(row: Row, steps: Mapping[str, list[Any]]) -> dict[str, list[Any]]:
    """The figures of as many first steps of the row."""
    count = len(steps["step"])
    return {name: column[:count] for name, column in _but_times(row["steps"]).items()}


def _but_times(steps: Mapping[str, list[Any]]) -> dict[str, list[Any]]:
    return {name: column for name, column in steps.items() if not name.startswith("time/")}


def _metric_lines(path: Path) -> list[dict[str, Any]]:
    try:
        return [json.loads(line) for line in lzma.decompress(path.read_bytes()).splitlines()]
    except (lzma.LZMAError, ValueError) as error:
        raise ValueError(f"{path} is no metrics.jsonl in xz ({error}): copy it again") from error


def _where(row: Row) -> str:
    """The day and the machine of a row."""
    device = row["run"]["device"]
    return f"{row['run']['started'][:10]}, {device.get('model') or device['type']}"
