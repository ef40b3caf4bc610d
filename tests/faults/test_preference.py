"""A run that makes a reward model is killed (kill -9), and goes on to the bytes of a run that
nothing happened to.
"""

import json
import signal
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
import tomli_w

from isobit.cli.main import main
from isobit.config.recipes import SftConfig
from isobit.run.sft import sft
from isobit.starter.tasks import guess, problems, question, worked_out
from tests.forked import command

Outcome = Callable[[Path], dict[str, Any]]


def write_pairs(path: Path, held_out: bool, count: int) -> str:
    random = Random(count)
    rows = (
        {"prompt": question(p), "chosen": worked_out(p), "rejected": guess(p, random)}
        for p in problems(held_out)[:count]
    )
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def kill_at(recipe: Path, output: Path, line: str) -> None:
    """Start the run, and kill its process as soon as it has printed that."""
    printed = output.with_suffix(".log")
    printed.touch()
    process = command(["sft", str(recipe), "--resume"], printed)
    while line not in printed.read_text():
        assert process.is_alive(), printed.read_text()
        time.sleep(0.0005)
    process.kill()
    process.join()
    assert process.exitcode == -signal.SIGKILL


def finished(output: Path, outcome: Outcome) -> dict[str, Any]:
    (output / "rewards.jsonl").touch()  # for ``outcome``: nothing is graded here
    return outcome(output)


@pytest.mark.exhaustive
def test_killed_and_resumed_it_leaves_the_same_files(
    place: Path, outcome: Outcome, tmp_path: Path
) -> None:
    config = {
        "objective": "preference",
        "model": str(place / "model"),
        "threads": 1,
        "data": {
            "train": {"type": "jsonl", "path": write_pairs(tmp_path / "a.jsonl", False, 30)},
            "eval": {
                "held_out": {"type": "jsonl", "path": write_pairs(tmp_path / "b.jsonl", True, 6)}
            },
        },
        "training": {"steps": 26, "prompts_per_step": 4, "learning_rate": 1e-3},
        "evaluation": {"every": 8},
        "checkpoint": {"every": 7},
    }
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    sft(SftConfig.model_validate(config | {"output": whole}))
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(tomli_w.dumps(config | {"output": str(broken)}), encoding="utf-8")
    kill_at(recipe, broken, "step 11/26")
    kill_at(recipe, broken, "step 20/26")
    assert main(["sft", str(broken), "--resume"]) == 0
    assert finished(broken, outcome) == finished(whole, outcome)
