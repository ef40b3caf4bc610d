"""What stands in a run's files, made up."""

import math
from typing import Any

SITES = [
    {"name": "embed_tokens", "kind": "embedding", "forward": "bf16"},
    *(
        {
            "name": f"layers.{layer}.{name}",
            "kind": kind,
            "forward": "e4m3",
            "scales": "power_of_two",
            "dgrad": grad,
            "wgrad": grad,
        }
        for layer in range(3)
        for name, kind, grad in (("qkv_proj", "linear", "e4m3"), ("attention", "attention", None))
    ),
    {"name": "lm_head", "kind": "head", "forward": "bf16"},
]

TRAINING = {"steps": 500, "prompts_per_step": 16, "samples_per_prompt": 16}


def manifest(**changes: Any) -> dict[str, Any]:
    """A manifest with the entries that the page reads."""
    return {
        "started": "2026-11-21T01:02:03+00:00",
        "versions": {"isobit": "0.1.0"},
        "device": {"type": "cpu"},
        "precision": {
            "preset": "fp8",
            "exact": True,
            "differing_sites": [],
            "rollout": SITES,
            "training": SITES,
        },
        "config": {"model": "starter", "training": TRAINING},
        **changes,
    }


def step_line(step: int) -> dict[str, Any]:
    """The figures of a training step."""
    return {
        "step": step,
        "reward/mean": 0.5 + 0.4 * math.tanh(step / 100),
        "reward/std": 0.4,
        "response_length/mean": 300.0 + step,
        "response_length/max": 512 + step % 7,
        "loss": math.sin(step),
        "entropy": 1.0 / step,
        "grad_norm": 1.0 + math.cos(step),
        "learning_rate": 1e-6,
        "ratio/mean": 1.0,
        "ratio/max": 1.0,
        "clip_fraction/low": 0.0,
        "clip_fraction/high": 0.01 * (step % 3),
        "log_prob_diff/mean": 0.0,
        "log_prob_diff/max": 0.0,
        "log_prob_diff/tokens_compared": 70_000,
        "log_prob_diff/tokens_differing": 0,
        "updates/taken": 1,
        "time/rollout_s": 30.0,
        "time/grading_s": 0.1,
        "time/training_s": 50.0,
        "tokens_per_s/rollout": 12_345.6,
        "tokens_per_s/training": 23_456.7 + step,
        "something/new": step / 7,
    }


def evaluation_line(step: int, accuracy: float) -> dict[str, Any]:
    """The figures of an evaluation of the set ``held_out``."""
    figures = {
        "accuracy": accuracy,
        "low": accuracy - 0.05,
        "high": accuracy + 0.05,
        "problems": 500,
    }
    return {
        "step": step,
        **{f"eval/held_out/{name}": value for name, value in figures.items()},
        "time/evaluation_s": 9.0,
    }


def completion_line(
    step: int, source: str = "train", tokens: int = 512, text: str = "word "
) -> dict[str, Any]:
    """A logged completion of ``tokens`` equal tokens."""
    return {
        "step": step,
        "source": source,
        "prompt_id": f"{source}/{step}",
        "prompt": "What is 6 x 7?",
        "completion": text * tokens,
        "reward": 1.0,
        "finish_reason": "stop",
        "tokens": tokens,
        "token_texts": [text] * tokens,
        "log_probs": [-0.25] * tokens,
    }
