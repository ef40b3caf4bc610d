"""Runs of a small model on the card, each in a process of its own."""

import gc
from pathlib import Path
from typing import Any

import tomli_w
import torch

from isobit.config.precision import PrecisionConfig
from isobit.models.config import ModelConfig
from isobit.models.policy import random_policy
from isobit.models.saving import save_policy
from isobit.starter import starter_folder
from tests.tiny import with_sections

SMALL = ModelConfig("qwen3", 1000, 512, 768, 2, 8, 2, 128, 1024, 1e-6, 1e6, tied_embeddings=True)


def write_recipe(
    folder: Path, reward: str, config: ModelConfig = SMALL, **sections: dict[str, Any]
) -> Path:
    """The recipe of steps of 4 x 4 samples, several micro-batches each, beside its random model and
    the text of its reward function; ``sections`` replace keys of these.
    """
    policy = random_policy(config, PrecisionConfig(preset="fp8"), 0, "cuda")
    save_policy(policy, folder / "model", tokenizer_from=starter_folder())
    del policy
    gc.collect()
    torch.cuda.empty_cache()  # the runs are processes of their own
    (folder / "reward.py").write_text(reward, encoding="utf-8")
    content = {
        "model": str(folder / "model"),
        "output": str(folder / "run"),
        "precision": {"preset": "fp8"},
        "device": "cuda",
        "data": {"train": {"type": "jsonl", "path": "starter:train.jsonl", "limit": 32}},
        "reward": {"function": f"{folder / 'reward.py'}:reward", "in_process": True},
        "rollout": {"max_new_tokens": 64, "kv_memory_gib": 2.0},
        "training": {
            "prompts_per_step": 4,
            "samples_per_prompt": 4,
            "tokens_per_microbatch": 256,
            "learning_rate": 1e-4,
        },
        "checkpoint": {"every": 2},
    }
    path = folder / "recipe.toml"
    path.write_text(tomli_w.dumps(with_sections(content, sections)), encoding="utf-8")
    return path
