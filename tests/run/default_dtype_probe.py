"""Trainings under another default dtype of the process: ``python default_dtype_probe.py NAME
FOLDER`` prints the SHA-256 of what they leave, as a line of JSON.
"""

import json
import sys
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

if __name__ == "__main__":  # before anything is imported that has constants
    torch.set_default_dtype(getattr(torch, sys.argv[1]))

from isobit.config.recipes import RunConfig, SftConfig
from isobit.run.loop import train
from isobit.run.sft import sft
from isobit.store.class_of_bits import arithmetic_sha256
from tests.run.test_moe import SHAPE

ROWS = {"type": "jsonl", "path": "starter:train.jsonl", "limit": 8}
COMMON = {"model": "starter", "threads": 1, "device": "cpu"}
STEPS = {"steps": 2, "prompts_per_step": 2, "learning_rate": 1e-3}
RUNS = {
    "grpo": {
        "algorithm": {"name": "grpo", "kl_coefficient": 0.1},
        "precision": "fp8",
    },
    "ppo": {
        "algorithm": {"name": "ppo"},
        "precision": "bf16",
        "rollout": {"max_new_tokens": 6, "top_p": 0.9, "temperature": 0.8},
        "training": {**STEPS, "samples_per_prompt": 3, "moments": "fp8", "updates_per_batch": 2},
    },
}


def found_in(folder: Path) -> dict[str, Any]:
    """Runs under ``folder``, by the default dtype of this process."""
    found: dict[str, Any] = {"arithmetic": arithmetic_sha256()}
    for name, sections in RUNS.items():
        base = {
            **COMMON,
            "output": folder / name,
            "data": {"train": ROWS},
            "reward": {"function": "isobit.starter.tasks:correct_answer", "in_process": True},
            "rollout": {"max_new_tokens": 6},
            "training": {**STEPS, "samples_per_prompt": 3},
        }
        summary = train(RunConfig.model_validate({**base, **sections}))
        found[f"{name}, differing"] = summary.tokens_differing
        found[name] = digest(folder / name, "completions.jsonl")
    mixture = {
        **COMMON,
        "output": folder / "moe",
        "from_scratch": SHAPE,
        "precision": "fp8",
        "data": {"train": {**ROWS, "completion": "answer"}},
        "training": {**STEPS, "router_z": 0.01},
    }
    sft(SftConfig.model_validate(mixture))
    found["moe"] = digest(folder / "moe")
    return found


def digest(run: Path, *others: str) -> str:
    """Of the model and of ``others`` of a run's files."""
    files = ("model/model.safetensors", *others)
    return sha256(b"".join((run / file).read_bytes() for file in files)).hexdigest()


if __name__ == "__main__":
    left = found_in(Path(sys.argv[2]))
    assert torch.get_default_dtype() == getattr(torch, sys.argv[1]), "the caller's own"
    print(json.dumps(left))
