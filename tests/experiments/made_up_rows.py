"""Rows of runs that never were, to try the table and the page: drawn from a seeded generator, with
``made-up`` for a machine.  They are no results, and nothing writes them into the repository.
"""

import math
import random
from hashlib import sha256
from typing import Any

from experiments.proof.suite import ARMS

STEPS, EVERY, PROBLEMS = 150, 25, 500


def made_up_row(
    task: str, arm: str, seed: int, steps: int = STEPS, problems: int = PROBLEMS
) -> dict[str, Any]:
    """Of a run that learns; the rollout arms differ from training, the others do not."""
    draw = random.Random(f"{task} {arm} {seed}")
    hard = [random.Random(f"{task} {place}").random() for place in range(problems)]
    lines = [_step(step, arm, draw) for step in range(1, steps + 1)]
    return {
        "task": task,
        "arm": arm,
        "seed": seed,
        "jobs": 4,
        "run": _manifest(arm, seed, steps),
        "summary": {"steps": steps},
        "start": {"model.safetensors": _sha256("start")},
        "final": {"model.safetensors": _sha256(f"{task} {arm} {seed}")},
        "completions": _sha256(f"completions {task} {arm} {seed}"),
        "steps": {name: [line[name] for line in lines] for name in lines[0]},
        "evaluations": [
            {
                "step": step,
                "seconds": 3.0,
                "response_length": 120.0,
                "rewards": [
                    float(one + draw.gauss(0, 0.15) < 0.3 + 0.3 * _learnt(step, draw))
                    for one in hard
                ],
            }
            for step in range(0, steps + 1, EVERY)
        ],
    }


def _step(step: int, arm: str, draw: random.Random) -> dict[str, Any]:
    compared = draw.randrange(70_000, 90_000)
    differs = arm.startswith("fp8-rollout")
    size = (0.012 + 4e-5 * step) * (1 + draw.gauss(0, 0.04)) if differs else 0.0
    return {
        "step": step,
        "reward/mean": 0.3 + 0.3 * _learnt(step, draw),
        "response_length/mean": 130 - 0.1 * step + draw.gauss(0, 4),
        "entropy": 0.35 * math.exp(-step / 120) + draw.gauss(0, 0.006),
        "grad_norm": 0.4 + 0.1 * abs(draw.gauss(0, 1)),
        "log_prob_diff/mean": size,
        "log_prob_diff/tokens_compared": compared,
        "log_prob_diff/tokens_differing": int(0.91 * compared) if differs else 0,
        "mismatch/mult_prob_error": math.exp(size),
        "time/rollout_s": 4 + draw.gauss(0, 0.2),
        "time/grading_s": 0.1,
        "time/training_s": 3 + draw.gauss(0, 0.1),
    }


def _learnt(step: int, draw: random.Random) -> float:
    return 1 - math.exp(-step / 60) + draw.gauss(0, 0.05)


def _manifest(arm: str, seed: int, steps: int) -> dict[str, Any]:
    recipe: dict[str, Any] = {"training": {"steps": steps, "learning_rate": 3e-6}}
    return {
        "started": "2026-11-23T00:00:00+00:00",
        "versions": {"torch": "made-up"},
        "device": {"type": "cuda", "model": "made-up"},
        "bits": {"kernels": _sha256("kernels")},
        "model": {"folder": "start/model"},
        "inputs": {"data.train.content": _sha256("data")},
        "config": {
            **recipe,
            "seed": seed,
            "output": f"{arm}-{seed}",
            "arm": dict(ARMS.get(arm, {})),
        },
    }


def _sha256(text: str) -> str:
    return sha256(text.encode()).hexdigest()
