"""What is kept of a finished run: a row, ``ROWS/TASK-ARM-SEED.json.xz``.

    task, arm, seed
    jobs            runs side by side while it ran, at most: times of rows with other jobs are no
                    comparison
    run             run.json: the recipe as resolved, digests of data and tokenizer, versions, GPU
    summary         summary.json
    start, final    SHA-256 of each file of the first and of the last weights
    completions     SHA-256 of rewards.jsonl, which has digests of all completions and their rewards
    steps           a column a figure that the table and the page use, and the times
    evaluations     step, seconds and mean length of each, and the reward of each held-out problem
    other_flow      how the last weights answer in another flow (``benchmarks.arms.answers``); rows
                    of the first sitting have none, nor those whose sitting ended before

The same content makes the same bytes, compressed: about 20 KB for 150 steps.  A run that was made
again lies in a folder below, ``ROWS/repeats`` (``benchmarks.arms.repeats``), under the same name.
"""

import json
import lzma
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

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
    """As a whole, or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(row, separators=(",", ":"), ensure_ascii=False)
    partial = path.with_suffix(".partial")
    partial.write_bytes(lzma.compress(text.encode(), preset=9 | lzma.PRESET_EXTREME))
    partial.rename(path)


def read_finished(directory: Path) -> list[Row]:
    """The rows of a folder, by name.  Raises ValueError for a file that cannot be read."""
    return [read_row(path) for path in sorted(directory.glob(f"*{SUFFIX}"))]


def name_of(row: Row) -> str:
    """Also of its file."""
    return f"{row['task']}-{row['arm']}-{row['seed']}"


def read_row(path: Path) -> Row:
    """Raises ValueError for a file that is none."""
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
