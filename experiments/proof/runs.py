"""The arms of the proof as ordinary recipes of ``isobit train``, several side by side on one card.

    DIR/data            problems (``suite.write_problems``)
    DIR/start           the fine-tuned model that all arms begin with
    DIR/start-fp8       the same, fine-tuned in FP8, for ``from-fp8``
    DIR/outliers        the start's function, with activation outliers, for one setting under stress
    DIR/runs/NAME       one run, NAME = TASK-ARM-SEED: a directory of ``isobit train --resume``;
                        beside it its log, and how its model answers in another flow
    DIR/rows            what is kept of the finished runs; in ``repeats`` of those made again

A run is resumed from its last checkpoint until it is finished, so a sitting may end at any time.
All arms of a task and seed see the same prompts in the same order and sample with the same noise.

Models also answer held-out problems in another precision flow than their own, which separates what
is in the weights from the arithmetic of the answers.  A finished run answers in one
(``python -m experiments.proof.runs FOLDER RECIPE OUT [--KEY VALUE ...]``), the untrained start in
all of FLOWS, which keep one part of ``fp8`` in BF16 or have one part alone in FP8: a flow takes
seconds and shows what the rounding of the forward costs.
"""

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from statistics import fmean, median
from typing import Any

from experiments.proof import rows
from experiments.proof.rows import steps_of
from experiments.proof.suite import HYBRID, LADDERS, Changes, Run
from isobit import load_config
from isobit.commands.evaluate import evaluate_folder
from isobit.records.text import Group
from isobit.store.directory import write_json
from isobit.store.journals import whole_lines


def answering(folder: Path, recipe: Path, out: Path, words: Sequence[str]) -> list[str]:
    """What answers with the model in ``folder``, by the recipe with these keys changed."""
    return [sys.executable, "-m", __name__, *map(str, (folder, recipe, out)), *words]


def other_flow(arm: str) -> str:
    """Whether what was learnt in BF16 stands in FP8, and the other way round."""
    return "fp8" if arm == "bf16" else "bf16"


def answer(folder: Path, recipe: Path, words: Sequence[str]) -> dict[str, Any]:
    """``precision`` as resolved, and of each set by name its figures (``sets``) and the reward of
    each problem (``rewards``).
    """
    config = load_config(recipe, words)
    rewards = dict[str, list[float | None]]()

    def take(name: str, groups: Sequence[Group]) -> None:
        rewards[name] = [group.rewards[0] for group in groups]

    results = evaluate_folder(folder, config, take=take)
    return {
        "precision": config.precision.model_dump(mode="json"),
        "sets": {name: result.figures() for name, result in results.items()},
        "rewards": rewards,
    }


def main() -> None:
    folder, recipe, out = map(Path, sys.argv[1:4])
    write_json(out, answer(folder, recipe, sys.argv[4:]))


HERE = Path(__file__).parent
_GRACE_S = 60.0
"""Seconds that a run may take from SIGTERM to a written checkpoint."""


def training_command(run: Run, directory: Path, changes: Changes) -> list[str]:
    """``isobit train`` of a run, begun or resumed; ``changes`` come last."""
    words = words_of({**places_of(run, directory), **run.settings, **changes})
    recipe = str(recipe_of(run.problems))
    return [sys.executable, "-m", "isobit.cli.main", "train", recipe, "--resume", *words]


def answers_command(run: Run, directory: Path, changes: Changes) -> list[str]:
    """What answers with a run's last weights in another flow (``experiments.proof.runs``)."""
    flow = {"precision": other_flow(run.arm)}
    words = words_of({**places_of(run, directory), **run.shared, **changes, **flow})
    folder, out = directory / "runs" / run.name / "model", answers_path(run, directory)
    return answering(folder, recipe_of(run.problems), out, words)


def recipe_of(problems: str) -> Path:
    """The recipe of all runs that are trained on these problems."""
    return HERE / f"{problems}.toml"


def words_of(settings: Changes) -> list[str]:
    """Settings as words of the command line."""
    return [word for key, value in settings.items() for word in (f"--{key}", value)]


def parted(words: list[str]) -> tuple[list[str], list[str]]:
    """A command line: what is before ``--``, and what is behind it for ``isobit``."""
    cut = words.index("--") if "--" in words else len(words)
    return words[:cut], words[cut + 1 :]


def by_key(words: Sequence[str]) -> dict[str, str]:
    """``--KEY VALUE ...`` as settings."""
    return {
        key.removeprefix("--"): value for key, value in zip(words[::2], words[1::2], strict=True)
    }


def places_of(run: Run, directory: Path) -> dict[str, str]:
    """Of a run's model, output and data, and its seed: what its task and arm do not change."""
    data = directory / "data"
    return {
        "model": str(directory / run.start / "model"),
        "output": str(directory / "runs" / run.name),
        "seed": str(run.seed),
        "data.train.path": str(data / f"{run.problems}.train.jsonl"),
        "data.eval.held_out.path": str(data / f"{run.problems}.held_out.jsonl"),
    }


def run_all(
    runs: Sequence[Run],
    directory: Path,
    cards: Sequence[str],
    jobs: int,
    seconds: float,
    changes: Changes,
    begin_within: float = math.inf,
) -> bool:
    """Go on with the runs, ``jobs`` at a time on each of the cards (``CUDA_VISIBLE_DEVICES``), for
    so many seconds; then those that run are told to write a checkpoint.  True where all are
    finished; a run that fails is said, and left.  None is begun after ``begin_within`` seconds.
    """
    (directory / "runs").mkdir(parents=True, exist_ok=True)
    left = [run for run in runs if not is_made(run, directory)]
    live: list[Live] = []
    free = list(cards) * jobs
    are_kept = True
    started_at = time.monotonic()

    def are_over(limit: float) -> bool:
        return time.monotonic() >= started_at + limit

    while (live or (left and not are_over(begin_within))) and not are_over(seconds):
        while left and free and not are_over(begin_within):
            live.append(_start(left.pop(0), directory, changes, free.pop(0)))
        time.sleep(1.0)
        for one in [one for one in live if one.process.poll() is not None]:
            live.remove(one)
            is_kept = keep_if_finished(one, directory, jobs)
            if is_kept and not one.answers:
                live.append(_start(one.run, directory, changes, one.card, answers=True))
                continue
            free.append(one.card)
            are_kept &= is_kept
    _stop(live)
    return are_kept and not (left or live)


@dataclass(frozen=True)
class Live:
    run: Run
    card: str
    process: subprocess.Popen[bytes]
    answers: bool
    """Whether the run is trained and now answers in another flow."""


def _start(
    run: Run, directory: Path, changes: Changes, card: str, *, answers: bool = False
) -> Live:
    command = answers_command if answers else training_command
    print(f"{run.name} {'answers' if answers else 'begins or goes on'}, on card {card}", flush=True)
    process = on_card(card, command(run, directory, changes), log_path(run, directory))
    return Live(run, card, process, answers)


def on_card(card: str, command: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
    """A command that sees one card; what it says is added to the log."""
    with log.open("ab") as said:
        return subprocess.Popen(  # noqa: S603 (this file)
            command,
            stdout=said,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONUNBUFFERED": "1", "CUDA_VISIBLE_DEVICES": card},
        )


def keep_if_finished(ended: Live, directory: Path, jobs: int) -> bool:
    """Whether it ended well and its row, or its answers, could be kept; what is wrong is said."""
    if ended.process.returncode != 0:
        print(f"{ended.run.name} failed: see {log_path(ended.run, directory)}", flush=True)
        return False
    try:
        if ended.answers:
            keep_answers(ended.run, directory)
        else:
            keep(ended.run, directory, jobs)
    except (OSError, ValueError) as error:  # the others go on
        print(f"{ended.run.name} is finished, but no row could be made of it: {error}", flush=True)
        return False
    return True


def _stop(live: Sequence[Live]) -> None:
    for one in live:
        one.process.send_signal(signal.SIGTERM)
    for one in live:
        try:
            one.process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            one.process.kill()
            print(f"{one.run.name} wrote no checkpoint in {_GRACE_S:.0f} s", flush=True)


def log_path(run: Run, directory: Path) -> Path:
    """The log of a run and of its answers in another flow."""
    return directory / "runs" / f"{run.name}.log"


def answers_path(run: Run, directory: Path) -> Path:
    """Where the figures of a run's answers in another flow are."""
    return directory / "runs" / f"{run.name}.answers.json"


def row_path(run: Run, directory: Path) -> Path:
    """The row of a finished run."""
    folder = directory / "rows" / (rows.REPEATS if run.again else "")
    return folder / f"{run.row_name}{rows.SUFFIX}"


def is_made(run: Run, directory: Path) -> bool:
    """Whether its row stands and, where the run was made here, has its answers in another flow."""
    was_here = (directory / "runs" / run.name).exists()
    answered = answers_path(run, directory).exists() or not was_here
    return row_path(run, directory).exists() and answered


def keep(run: Run, directory: Path, jobs: int) -> None:
    """Write a trained run's row (``experiments.proof.rows``), without its answers in another flow:
    a sitting may end before they are there.
    """
    who = {"task": run.task, "arm": run.arm, "seed": run.seed, "jobs": jobs}
    found = rows.row_of(directory / "runs" / run.name)
    rows.write_row(row_path(run, directory), {**who, **found})


def keep_answers(run: Run, directory: Path) -> None:
    """Add to the row how the run's last weights answer in another flow.  Checkpoints of the ladder,
    of which a disk holds few, are removed then.
    """
    row = rows.read_row(row_path(run, directory))
    other = json.loads(answers_path(run, directory).read_text(encoding="utf-8"))
    rows.write_row(row_path(run, directory), {**row, "other_flow": other})
    if run.task in (*LADDERS, HYBRID):
        shutil.rmtree(directory / "runs" / run.name / "checkpoints", ignore_errors=True)


_TEN = 10


def look(directory: Path) -> Iterator[str]:
    """Of each run in DIR/runs: steps, held-out accuracy by step, the mean reward of each ten steps,
    seconds a step, and how many log-probabilities differ.
    """
    for path in sorted((directory / "runs").glob("*/metrics.jsonl")):
        yield f"{path.parent.name}: {_described(list(map(json.loads, whole_lines(path, 0))))}"


def _described(lines: list[dict[str, Any]]) -> str:
    steps = steps_of(lines)
    accuracy = "eval/held_out/accuracy"
    held_out = [f"{line['step']}: {line[accuracy]:.1%}" for line in lines if accuracy in line]
    if not steps:
        return f"no step yet; held out {', '.join(held_out) or 'not measured'}"
    rewards = [line["reward/mean"] for line in steps]
    tens = [f"{fmean(rewards[at : at + _TEN]):.3f}" for at in range(0, len(rewards), _TEN)]
    seconds = [median(line[f"time/{name}_s"] for line in steps) for name in ("rollout", "training")]
    differing, compared = (
        sum(line.get(f"log_prob_diff/tokens_{name}") or 0 for line in steps)
        for name in ("differing", "compared")
    )
    return (
        f"{len(steps)} steps; held out {', '.join(held_out)}; reward {' '.join(tens)}; "
        f"rollout {seconds[0]:.2f} s, training {seconds[1]:.2f} s; "
        f"{differing:,.0f} of {compared:,.0f} differ"
    )


_LINEARS = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")


def _in_bf16(preset: str, *modules: str) -> str:
    return f'{{preset = "{preset}", modules_bf16 = {json.dumps(modules)}}}'


FLOWS: dict[str, str] = {
    "bf16": "bf16",
    "fp8": "fp8",
    "fp8-linear": "fp8-linear",
    "int8": '{preset = "int8", dgrad = "fp8", wgrad = "bf16"}',
    "int8, its head too": '{preset = "int8", head = "int8"}',
    "fp8, scales in FP32": '{preset = "fp8", scales = "fp32"}',
    "fp8 without its first 3 layers": '{preset = "fp8", first_layers_bf16 = 3}',
    "fp8 without its last 3 layers": '{preset = "fp8", last_layers_bf16 = 3}',
    **{f"fp8 without {name}": _in_bf16("fp8", name) for name in _LINEARS},
    "attention and KV cache alone": _in_bf16("fp8", *_LINEARS),
    **{
        f"{name} alone": _in_bf16("fp8-linear", *(one for one in _LINEARS if one != name))
        for name in _LINEARS
    },
}
"""Name -> ``precision``."""
_SETS = {"gsm": "gsm", "multiply": "held_out"}
"""Task -> the name of its evaluation set here; the recipe's own is that of ``multiply``."""
Answered = Mapping[str, Mapping[str, Any]]
"""Name of a flow -> what ``experiments.proof.runs`` wrote."""


def answer_all(
    directory: Path, cards: Sequence[str], jobs: int, changes: Mapping[str, str]
) -> Answered:
    """Both tasks in every flow that has no answers yet, ``jobs`` at a time on each card; raises
    RuntimeError where one failed, when all have ended.
    """
    (directory / "flows").mkdir(exist_ok=True)
    free = SimpleQueue[str]()
    for card in list(cards) * jobs:
        free.put(card)

    def answer(place: int, precision: str) -> Path:
        out = directory / "flows" / f"{place}.json"
        if not out.exists():
            card = free.get()
            try:
                _run(directory, out, {**changes, "precision": precision}, card)
            finally:
                free.put(card)
        return out

    with ThreadPoolExecutor(len(cards) * jobs) as pool:
        outs = list(pool.map(answer, range(len(FLOWS)), FLOWS.values()))
    if missing := [name for name, out in zip(FLOWS, outs, strict=True) if not out.exists()]:
        raise RuntimeError(f"no answers in {', '.join(missing)}: see {directory / 'flows'}/*.log")
    found = [json.loads(out.read_text(encoding="utf-8")) for out in outs]
    return dict(zip(FLOWS, found, strict=True))


def _run(directory: Path, out: Path, changes: Mapping[str, str], card: str) -> None:
    given = {
        **places_of(Run("multiply", "bf16", 0), directory),
        "output": str(out.with_suffix("")),
        "data.eval.gsm.type": "jsonl",
        "data.eval.gsm.path": str(directory / "data" / "gsm.held_out.jsonl"),
    }
    words = words_of({**given, **changes})
    command = answering(Path(given["model"]), recipe_of("multiply"), out, words)
    on_card(card, command, out.with_suffix(".log")).wait()


def markdown(found: Answered) -> list[str]:
    lines = [f"| the start answers in | {' | '.join(f'`{task}`' for task in _SETS)} |"]
    lines.append(f"|---|{'---:|' * len(_SETS)}")
    for flow, one in found.items():
        accuracies = " | ".join(f"{one['sets'][name]['accuracy']:.1%}" for name in _SETS.values())
        lines.append(f"| {flow} | {accuracies} |")
    return lines


if __name__ == "__main__":
    main()
