"""``experiments.family``: a suite goes on where it was cut off, and the table's arithmetic."""

import json
from pathlib import Path
from typing import Any

from experiments import family


def row(suite: str, name: str, seed: int) -> dict[str, Any]:
    return {
        "suite": suite,
        "name": name,
        "seed": seed,
        "before": 0.5,
        "after": 0.9 + 0.01 * seed,
        "tokens_compared": 100,
        "tokens_differing": seed,
        "train_seconds": 10.0,
        "figures": {"grad_norm": 1.25 + seed},
        "last": {"reward/mean": 0.5 + 0.125 * seed},
    }


def test_differences_are_paired_by_seed(tmp_path: Path) -> None:
    gains = {"bf16": {0: 0.0, 1: 0.1, 2: 0.2}, "fp8": {0: -0.02, 1: 0.1, 3: 0.4}}
    for name, by_seed in gains.items():
        for seed, gain in by_seed.items():
            file = tmp_path / f"{name}-{seed}.json"
            file.write_text(json.dumps(row("sites", name, seed) | {"after": 0.5 + gain}))
    lines = [line for line in family.table(tmp_path) if line.startswith(("| sites ", "| fp8 "))]
    minus = "minus bf16, points | minus fp8, points"
    more = "reward, last | gradient norm | differing | seconds"
    accuracy = "50.0% | 48.0%, 60.0%, 90.0% | 66.0% | -1.0 ± 1.0 | -"
    assert lines == [
        f"| sites | before | after, by seed | mean | {minus} | {more} |",
        f"| fp8 | {accuracy} | 0.667 | 2.58 | 4 of 300 | 10 |",
    ]


def test_means_are_over_the_steps_that_have_a_figure() -> None:
    steps = [{"step": 1, "loss": 1.0, "kl/k3": None}, {"step": 2, "loss": 3.0, "kl/k3": 0.5}]
    assert family._means(steps) == {"loss": 2.0, "kl/k3": 0.5}
    assert json.loads(json.dumps(family._means([]))) == {}
