"""One reward model, its scores of held-out answers in three precisions, and how they agree."""

import json
from pathlib import Path
from random import Random
from typing import Any

import torch

from benchmarks.comparison.rows import RowWriter
from isobit.config.load import build
from isobit.config.recipes import SftConfig
from isobit.config.tables import PrecisionConfig
from isobit.data.examples import conversation_ids
from isobit.data.sources import Row
from isobit.models.frozen import load_reward_model
from isobit.observe.console import Console
from isobit.run.sft import sft
from isobit.starter.tasks import problems
from tools.starter.preferences import preference_pairs

TRAIN, HELD_OUT, BATCH = 6000, 900, 32
"""Pairs, and pairs a step."""
EXACT = "fp32"
SCORED_IN = ("bf16", "fp8")

Pairs = list[dict[str, str]]


def measure_agreement(trained_in: str, steps: int, seed: int, threads: int, out: Path) -> None:
    """Train a reward model where ``out`` does not have it yet, and write a row for each precision
    that it is held against FP32 in.
    """
    torch.set_num_threads(threads)
    run = out / f"run-{trained_in}-seed-{seed}"
    held_out = list(preference_pairs(problems(held_out=True)[:HELD_OUT], Random(seed)))  # noqa: S311
    if not (run / "summary.json").is_file():
        train(trained_in, steps, seed, threads, held_out, run)
    summary = json.loads((run / "summary.json").read_text(encoding="utf-8"))
    scores = {name: score(run / "model", name, held_out) for name in (EXACT, *SCORED_IN)}
    writer = RowWriter(
        out, "agreement", trained_in, "starter", {"name": "CPU"}, {"torch": torch.__version__}
    )
    for name in SCORED_IN:
        writer.write(
            seed=seed,
            steps=summary["steps"],
            scored_in=name,
            pairs=len(held_out),
            **compare(scores[name], scores[EXACT]),
            by_kind={
                kind: compare(scores[name][members], scores[EXACT][members])
                for kind, members in by_kind(held_out).items()
            },
        )


def train(trained_in: str, steps: int, seed: int, threads: int, held_out: Pairs, run: Path) -> None:
    """The run of ``isobit sft --objective preference``."""
    run.parent.mkdir(parents=True, exist_ok=True)
    pairs = list(preference_pairs(problems(held_out=False)[:TRAIN], Random(seed)))  # noqa: S311
    files = {}
    for name, rows in (("train", pairs), ("held_out", held_out)):
        files[name] = run.with_name(f"{run.name}-{name}.jsonl")
        files[name].write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    config: dict[str, Any] = {
        "objective": "preference",
        "output": run,
        "precision": trained_in,
        "seed": seed,
        "threads": threads,
        "data": {
            "train": {"type": "jsonl", "path": files["train"]},
            "eval": {"held_out": {"type": "jsonl", "path": files["held_out"]}},
        },
        "training": {
            "steps": steps,
            "prompts_per_step": BATCH,
            "learning_rate": 3e-4,
            "schedule": "cosine",
            "warmup_updates": min(10, steps),
        },
        "checkpoint": {"keep_last": 1},
    }
    sft(build(SftConfig, config, "benchmark"), Console(), resume=run.exists())


def score(folder: Path, precision: str, pairs: Pairs) -> torch.Tensor:
    """FP64 [pairs, 2]: of the chosen and of the rejected answer."""
    model = load_reward_model(folder, PrecisionConfig.model_validate(precision))
    answers = [
        (Row(pair["prompt"], {}, ""), pair[key]) for pair in pairs for key in ("chosen", "rejected")
    ]
    ids = conversation_ids(answers, model.tokenizer)
    return torch.tensor(model.score(ids, 4096), dtype=torch.float64).view(-1, 2)


def compare(scores: torch.Tensor, exact: torch.Tensor) -> dict[str, float]:
    """Scores [P, 2] beside those of FP32."""
    error = scores - exact
    order, exact_order = (x[:, 0] > x[:, 1] for x in (scores, exact))
    margin = (exact[:, 0] - exact[:, 1]).abs()
    reordered = margin[order != exact_order]
    return {
        "kendall_tau": kendall_tau(scores.flatten(), exact.flatten()),
        "pairs_ranked_as_in_fp32": float((order == exact_order).double().mean()),
        "rms_error_by_std": float(error.square().mean().sqrt() / exact.std()),
        "max_error_by_std": float(error.abs().max() / exact.std()),
        "score_std": float(exact.std()),
        "accuracy": float(order.double().mean()),
        "accuracy_fp32": float(exact_order.double().mean()),
        "median_margin": float(margin.median()),
        "median_margin_of_reordered": float(reordered.median()) if len(reordered) else 0.0,
        "largest_margin_of_reordered": float(reordered.max()) if len(reordered) else 0.0,
    }


def kendall_tau(a: torch.Tensor, b: torch.Tensor) -> float:
    """Tau-b of two columns [N]: (concordant - discordant) / sqrt(pairs not tied in a * in b)."""
    signs = [(x[:, None] - x[None, :]).sign() for x in (a, b)]
    together = float((signs[0] * signs[1]).sum())
    untied = [float(sign.abs().sum()) for sign in signs]
    return together / (untied[0] * untied[1]) ** 0.5


def by_kind(pairs: Pairs) -> dict[str, torch.Tensor]:
    """The indices of the pairs of each kind: two answers that differ in style are far apart, and
    their scores make the spread of all.
    """
    found: dict[str, list[int]] = {}
    for index, pair in enumerate(pairs):
        found.setdefault(pair["kind"], []).append(index)
    return {kind: torch.tensor(members) for kind, members in found.items()}
