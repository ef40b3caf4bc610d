"""The tiny model that runs in tests train, its folder, and what tests make and read of runs."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from isobit.config.precision import PrecisionConfig
from isobit.config.recipes import RunConfig
from isobit.models.config import ModelConfig
from isobit.models.policy import random_policy
from isobit.models.saving import save_policy
from isobit.starter import starter_folder

TINY = ModelConfig("qwen3", 128, 128, 128, 1, 4, 2, 32, 256, 1e-6, 1e4, tied_embeddings=True)


def tiny_model(**changes: Any) -> ModelConfig:
    """``TINY`` with other fields."""
    return replace(TINY, **changes)


def save_tiny(folder: Path, config: ModelConfig = TINY) -> Path:
    """Random weights with the starter's tokenizer, as a Hugging Face folder."""
    policy = random_policy(config, PrecisionConfig(preset="fp32"), seed=0)
    save_policy(policy, folder, tokenizer_from=starter_folder())
    return folder


def with_sections(values: Mapping[str, Any], sections: Mapping[str, Any]) -> dict[str, Any]:
    """A recipe whose sections have other keys; anything that is no section is replaced."""
    found = dict(values)
    for name, value in sections.items():
        found[name] = {**found.get(name, {}), **value} if isinstance(value, dict) else value
    return found


def small_run(
    folder: Path,
    place: Path,
    /,
    reward: str = "isobit.starter.tasks:correct_answer",
    **sections: Any,
) -> RunConfig:
    """A run of a folder's model, in a place of its own: two steps of 2 x 3 samples on the shipped
    sums; sections given as keyword arguments replace keys of these.
    """
    config: dict[str, Any] = {
        "model": str(folder),
        "output": place,
        "precision": {"preset": "fp8"},
        "data": {
            "train": {"type": "jsonl", "path": "starter:train.jsonl", "limit": 16},
            "eval": {"held_out": {"type": "jsonl", "path": "starter:held_out.jsonl", "limit": 5}},
        },
        "reward": {"function": reward, "in_process": True},
        "rollout": {"max_new_tokens": 5},
        "training": {
            "steps": 2,
            "prompts_per_step": 2,
            "samples_per_prompt": 3,
            "learning_rate": 1e-3,
            # the tiny model earns nothing: what a step does is tested all the same
            "without_signal": "take",
        },
    }
    return RunConfig.model_validate(with_sections(config, sections))


def json_lines(path: Path) -> list[dict[str, Any]]:
    """The records of a JSONL file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
