"""Trainings under another default dtype of the process: ``python default_dtype_probe.py NAME
FOLDER`` prints the SHA-256 of what they leave, as a line of JSON.
"""

import json
import sys
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

torch.set_default_dtype(
    getattr(torch, sys.argv[1])
)  # before anything is imported that has constants

from isobit.config.recipes import RunConfig, SftConfig  # noqa: E402
from isobit.config.tables import PrecisionConfig  # noqa: E402
from isobit.models.folder import load_model  # noqa: E402
from isobit.proof.verify import VerifyOptions, verify_policy  # noqa: E402
from isobit.run.loop import train  # noqa: E402
from isobit.run.sft import sft  # noqa: E402
from isobit.store.manifest import arithmetic_sha256  # noqa: E402
from tests.run.test_moe import SHAPE  # noqa: E402

FOLDER = Path(sys.argv[2])
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
    "fp32": {"precision": "fp32"},
}


def main() -> None:
    found: dict[str, Any] = {"arithmetic": arithmetic_sha256()}
    for name, sections in RUNS.items():
        base = {
            **COMMON,
            "output": FOLDER / name,
            "data": {"train": ROWS},
            "reward": {"function": "isobit.starter.tasks:correct_answer", "in_process": True},
            "rollout": {"max_new_tokens": 6},
            "training": {**STEPS, "samples_per_prompt": 3},
        }
        train(RunConfig.model_validate({**base, **sections}))
        found[name] = digest(name, "completions.jsonl")
    mixture = {
        **COMMON,
        "output": FOLDER / "moe",
        "from_scratch": SHAPE,
        "precision": "fp8",
        "data": {"train": {**ROWS, "completion": "answer"}},
        "training": {**STEPS, "router_z": 0.01},
    }
    sft(SftConfig.model_validate(mixture))
    found["moe"] = digest("moe")
    policy = load_model("starter", PrecisionConfig(preset="fp8"), trainable=False).policy
    compared = verify_policy(policy, VerifyOptions(2, 2, 4)).comparison
    found["verify"] = [compared.tokens_differing, compared.tokens_compared > 0]
    assert torch.get_default_dtype() == getattr(torch, sys.argv[1]), "the caller's own"
    print(json.dumps(found))


def digest(name: str, *others: str) -> str:
    """Of the model and of ``others`` of a run's files."""
    files = ("model/model.safetensors", *others)
    return sha256(b"".join((FOLDER / name / file).read_bytes() for file in files)).hexdigest()


if __name__ == "__main__":
    main()
