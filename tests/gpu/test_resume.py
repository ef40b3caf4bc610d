"""A run on the GPU that is killed, between updates and while it writes a checkpoint, resumes to the
bytes of one that never was.

Reinforcement learning, and fine-tuning whose evaluations take turns with it and send the moments to
the host.  A small model by default; ``ISOBIT_GPU_SHAPE=qwen3-0.6b pytest tests/gpu/test_resume.py
-s -k fp32`` takes that shape (25 GB of disk, some minutes).
"""

import json
import os
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from isobit.models.shapes import model_shape
from isobit.starter.tasks import problems, question, worked_out
from isobit.store.checkpoint import MASTERS, OPTIMISER, read_checkpoint
from tests.gpu.small_runs import SMALL, write_recipe

SHAPE = os.environ.get("ISOBIT_GPU_SHAPE")
REWARD = '''"""Rewards with spread, and kills of the process that grades, so the trainer has to.
Each kills where a file of its name lies here.

between    at the fifth reward of step 3
writing    while the checkpoint of step 4 is written, with its masters whole and its moments begun
"""
import itertools, os, signal
from pathlib import Path

from isobit.store import checkpoint

calls, write_slices = itertools.count(), checkpoint.write_slices

def kill(name):
    wanted = Path(__file__).with_name(name)
    if wanted.exists():
        wanted.unlink()
        os.kill(os.getpid(), signal.SIGKILL)

def reward(prompt, completion):
    if next(calls) == 2 * 16 + 5:
        kill("between")
    return sum(token % 3 == 0 for token in completion.token_ids) / max(len(completion.token_ids), 1)

class Killing(dict):
    def __getitem__(self, name):
        if list(self)[3] == name:
            kill("writing")
        return super().__getitem__(name)

def write(path, plan, slices, beat):
    begun = path.parent.name == ".step_000004.partial" and path.name == checkpoint.OPTIMISER
    return write_slices(path, plan, Killing(slices) if begun else slices, beat)

checkpoint.write_slices = write
'''


@pytest.fixture(params=["fp32", "fp8"])
def recipe(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Four steps of 4 x 4 samples, several micro-batches each, a checkpoint after steps 2 and 4."""
    return write_recipe(
        tmp_path,
        REWARD,
        model_shape(SHAPE) if SHAPE else SMALL,
        training={"steps": 4, "moments": request.param},
        checkpoint={"keep_last": 1},
    )


@pytest.fixture
def tuning(recipe: Path) -> Path:
    """Four steps of 4 examples, evaluated before and after every 2 on 16 graded completions: the
    kill comes in the third evaluation.
    """
    content = tomllib.loads(recipe.read_text(encoding="utf-8"))
    rows = [
        {"prompt": question(p), "completion": worked_out(p), "answer": str(sum(p))}
        for p in problems(held_out=False)[:32]
    ]
    for name, part in (("train", rows[:16]), ("held_out", rows[16:])):
        recipe.with_name(f"{name}.jsonl").write_text(
            "".join(json.dumps(row) + "\n" for row in part), encoding="utf-8"
        )
    content["data"] = {
        "train": {"type": "jsonl", "path": str(recipe.with_name("train.jsonl"))},
        "eval": {"held_out": {"type": "jsonl", "path": str(recipe.with_name("held_out.jsonl"))}},
    }
    content["training"] = {
        "steps": 4,
        "prompts_per_step": 4,
        "tokens_per_microbatch": 256,
        "learning_rate": 1e-4,
        "moments": content["training"]["moments"],
        "offload_moments": True,
    }
    content["evaluation"] = {"every": 2, "temperature": 1.0}
    path = recipe.with_name("tuning.toml")
    path.write_text(tomli_w.dumps(content), encoding="utf-8")
    return path


class Attempt:
    """One process of ``isobit COMMAND --resume``."""

    def __init__(self, recipe: Path, output: Path, command: str = "train") -> None:
        self._log, self._output = output.with_suffix(".log"), output
        arguments = [
            sys.executable,
            "-m",
            "isobit.cli.main",
            command,
            str(recipe),
            "--resume",
            "--output",
            str(output),
        ]
        self._started_at = time.monotonic()
        with self._log.open("a") as file:
            self._process = subprocess.Popen(arguments, stdout=file, stderr=subprocess.STDOUT)

    def wait(self) -> int:
        code = self._process.wait()
        print(f"{self._output.name}: code {code} after {time.monotonic() - self._started_at:.0f} s")
        return code

    def finish(self) -> None:
        assert self.wait() == 0, self._log.read_text()


def folders(output: Path) -> list[str]:
    """Its checkpoints, and what a kill left of one."""
    return sorted(path.name for path in (output / "checkpoints").iterdir())


def outcome(output: Path, *more: str) -> dict[str, Any]:
    """What the run leaves, times, rates and peaks of memory aside; large files by their SHA-256,
    which ``read_checkpoint`` has checked.  ``more`` are files that not every kind of run has.
    """
    files = read_checkpoint(output / "checkpoints" / "step_000004").manifest["files"]
    metrics = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    other = ("time/", "tokens_per_s/", "memory/")
    return {
        **{name: files[name]["sha256"] for name in (MASTERS, OPTIMISER)},
        **{
            name: (output / name).read_bytes()
            for name in ("completions.jsonl", "rewards.jsonl", "model/model.safetensors", *more)
        },
        "metrics": [
            {name: value for name, value in line.items() if not name.startswith(other)}
            for line in metrics
        ],
    }


@pytest.mark.timeout(600)
def test_a_killed_run_resumes_to_the_same_bytes(recipe: Path) -> None:
    Attempt(recipe, recipe.with_name("whole")).finish()
    expected = outcome(recipe.with_name("whole"), "digests.jsonl")
    for line in expected["metrics"]:
        assert line["updates/taken"] == 1 and line["reward/std"] > 0
        assert line["log_prob_diff/tokens_compared"] > 0 == line["log_prob_diff/tokens_differing"]

    killed = recipe.with_name("killed")
    recipe.with_name("between").touch()
    assert Attempt(recipe, killed).wait() == -signal.SIGKILL
    assert folders(killed) == ["step_000002"]
    recipe.with_name("writing").touch()
    assert Attempt(recipe, killed).wait() == -signal.SIGKILL
    assert folders(killed) == [".step_000004.partial", "step_000002"]
    Attempt(recipe, killed).finish()
    assert folders(killed) == ["step_000004"]
    assert outcome(killed, "digests.jsonl") == expected


@pytest.mark.timeout(600)
def test_killed_fine_tuning_resumes_to_the_same_bytes(tuning: Path) -> None:
    Attempt(tuning, tuning.with_name("whole"), "sft").finish()
    expected = outcome(tuning.with_name("whole"))
    assert len(expected["rewards.jsonl"].splitlines()) == 3  # evaluations

    killed = tuning.with_name("killed")
    tuning.with_name("between").touch()
    assert Attempt(tuning, killed, "sft").wait() == -signal.SIGKILL
    assert folders(killed) == ["step_000002"]
    tuning.with_name("writing").touch()
    assert Attempt(tuning, killed, "sft").wait() == -signal.SIGKILL
    assert folders(killed) == [".step_000004.partial", "step_000002"]
    Attempt(tuning, killed, "sft").finish()
    assert outcome(killed) == expected
