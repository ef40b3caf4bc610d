"""A run's bytes do not depend on the number of its processes: completions, checkpoint files with
masters and moments, the model folder, and every figure but those of the machine.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from isobit.config.precision import PrecisionConfig
from isobit.config.recipes import RunConfig
from isobit.models.config import Experts, ModelConfig
from isobit.models.policy import random_policy
from isobit.models.saving import save_policy
from isobit.parallel.world import ALONE, World
from isobit.run.loop import train
from isobit.starter import starter_folder
from tests.worlds import in_world

STEPS = 4
SHAPE: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 32,
    "max_positions": 256,
    "rms_epsilon": 1e-6,
    "rope_theta": 10000.0,
}
MODELS = {
    "dense": ModelConfig(family="qwen3", tied_embeddings=True, **SHAPE),
    "mixture": ModelConfig(
        family="qwen3_moe", tied_embeddings=False, experts=Experts(4, 2, 128, True), **SHAPE
    ),
}
REWARD = """
def reward(prompt, completion):
    return float(completion.token_ids[0] % 3 + len(completion.token_ids) % 2)
"""
OF_THE_MACHINE = ("time/", "tokens_per_s/", "memory/", "rollout/", "waiting/")
"""Figures of how fast, and by which ways, the same was computed."""


def write_model(folder: Path, name: str) -> None:
    policy = random_policy(MODELS[name], PrecisionConfig(preset="fp32"), seed=0)
    save_policy(policy, folder / name, tokenizer_from=starter_folder())
    (folder / "reward.py").write_text(REWARD, encoding="utf-8")


def run(world: World, case: dict[str, Any]) -> None:
    """The run of a case, in its folder; on every rank."""
    folder = Path(case["folder"])
    config = RunConfig.model_validate(
        {
            "model": str(folder / case["model"]),
            "output": folder / case["output"],
            "precision": case.get("precision", "fp8"),
            "threads": 1,
            "seed": 5,
            "reward": {"function": f"{folder / 'reward.py'}:reward", "in_process": True},
            "data": {
                "train": {"type": "jsonl", "path": "starter:train.jsonl", "limit": 20},
                "eval": {
                    "held_out": {"type": "jsonl", "path": "starter:held_out.jsonl", "limit": 5}
                },
            },
            "rollout": {"max_new_tokens": 6, "max_sequences": 8},
            "training": {
                "steps": STEPS,
                "prompts_per_step": 3,
                "samples_per_prompt": 4,
                "tokens_per_microbatch": 96,
                "learning_rate": 1e-2,
                "moments": case["moments"],
            },
            "evaluation": {"every": 2},
            "checkpoint": {"every": 2, "keep_last": 2},
            **case.get("settings", {}),
        }
    )
    train(config, resume=case.get("resume", False), world=world)


def left_by(output: Path) -> dict[str, str]:
    """A digest of everything that a run left, by file and, of the figures, by step and name."""
    found = {
        str(path.relative_to(output)): hashlib.sha256(path.read_bytes()).hexdigest()
        for folder in ("checkpoints", "model")
        for path in sorted((output / folder).rglob("*"))
        if path.is_file() and path.name not in ("state.json", "manifest.json")
    }
    for name in ("completions.jsonl", "rewards.jsonl", "digests.jsonl"):
        found[name] = hashlib.sha256((output / name).read_bytes()).hexdigest()
    for line in (output / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        figures = json.loads(line)
        for name, value in figures.items():
            if not name.startswith(OF_THE_MACHINE):
                found[f"{figures['step']} {name}"] = repr(value)
    return found


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("size", "model", "moments", "precision"),
    [
        (2, "dense", "fp32", "fp8"),
        (3, "mixture", "fp8", "fp8"),
        (4, "dense", "bf16", "bf16"),
        (2, "mixture", "bf16", "int8"),
    ],
)
def test_the_bytes_of_a_run_do_not_depend_on_its_processes(
    size: int, model: str, moments: str, precision: str, tmp_path: Path
) -> None:
    write_model(tmp_path, model)
    case = {"folder": str(tmp_path), "model": model, "moments": moments, "precision": precision}
    run(ALONE, {**case, "output": "one"})
    in_world(size, "tests.run.test_ranks:run", {**case, "output": "several"})
    expected, found = left_by(tmp_path / "one"), left_by(tmp_path / "several")
    assert found.keys() == expected.keys()
    assert [name for name in expected if found[name] != expected[name]] == []
    last = (tmp_path / "several" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()[-2]
    waiting = {name: value for name, value in json.loads(last).items() if "waiting" in name}
    assert 0 < waiting["waiting/min_s"] <= waiting["waiting/mean_s"] <= waiting["waiting/max_s"]
    assert waiting["waiting/min_rank"] in range(size)
    assert sum(name.startswith("checkpoints") for name in expected) == 4, "two, of two files each"
