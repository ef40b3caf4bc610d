"""Reward models in INT8, FP8 and BF16: the agreement of their scores with FP32, and their speed.

    python -m benchmarks.reward_model agreement [--trained-in int8,fp8,bf16] [--steps 600] --out DIR
    python -m benchmarks.reward_model speed --precision int8|fp8|bf16 [--shape qwen3-8b]
        [--sequences 256] [--length 2048] [--tokens 16384] --out DIR

agreement   on a CPU, in minutes: a reward model is trained from the starter on pairs of right and
            wrong sums (``tools.starter.preferences``), and scores the answers of held-out pairs in
            FP32, BF16, FP8 and INT8.  Rank agreement is Kendall's tau-b over all answers, and the
            share of pairs that are ranked as in FP32; the error is the root mean square of score -
            FP32's over the standard deviation of FP32's scores.
speed       on a card: random weights of a real model's shape score sequences of random tokens;
            seconds from the ids on the host to the scores on the host, the median of three.
            ``--device cpu --shape tiny`` tries the command out.
"""

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from math import prod
from pathlib import Path
from random import Random
from statistics import median
from time import perf_counter
from typing import Any

import torch

from benchmarks.common import Commands, RowWriter, names_of, run_command
from isobit.config.load import build
from isobit.config.precision import PrecisionConfig
from isobit.config.recipes import SftConfig
from isobit.data.examples import conversation_ids
from isobit.data.sources import Row
from isobit.data.tokenizer import load_tokenizer
from isobit.models.config import ModelConfig
from isobit.models.decoder import master_shapes
from isobit.models.frozen import FrozenPolicy, RewardModel, load_reward_model
from isobit.models.policy import random_masters
from isobit.models.shapes import model_shape
from isobit.observe.console import Console
from isobit.run.sft import sft
from isobit.starter import starter_folder
from isobit.starter.tasks import problems
from tools.starter.preferences import preference_pairs

PRECISIONS = ("fp32", "bf16", "fp8", "int8")


def make_commands() -> Commands:
    commands = Commands(__doc__)
    command = commands.add("agreement", agreement, shape=False)
    precisions = names_of(PRECISIONS, "precisions")
    command.add_argument("--trained-in", type=precisions, default=["int8", "fp8", "bf16"])
    command.add_argument("--steps", type=int, default=600)
    command.add_argument("--seed", type=int, default=0)
    command.add_argument("--threads", type=int, default=2)
    command = commands.add("speed", speed)
    command.add_argument("--precision", choices=("bf16", "fp8", "int8"), required=True)
    command.add_argument("--sequences", type=int, default=256)
    command.add_argument("--length", type=int, default=2048)
    command.add_argument("--tokens", type=int, default=16384, help="of a forward")
    command.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    return commands


def agreement(arguments: argparse.Namespace) -> None:
    for trained_in in arguments.trained_in:
        measure_agreement(
            trained_in, arguments.steps, arguments.seed, arguments.threads, arguments.out
        )


def speed(arguments: argparse.Namespace) -> None:
    sizes = arguments.sequences, arguments.length, arguments.tokens
    work = Work(arguments.precision, arguments.shape, *sizes)
    measure_speed(work, arguments.device, arguments.out)


TRAIN, HELD_OUT, BATCH = 6000, 900, 32
"""Pairs to train on, held-out pairs, and pairs of a step."""
EXACT = "fp32"
SCORED_IN = ("bf16", "fp8", "int8")

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
        ours, exact = scores[name], scores[EXACT]
        kinds = {
            kind: compare(ours[members], exact[members])
            for kind, members in by_kind(held_out).items()
        }
        setting = {"seed": seed, "steps": summary["steps"], "scored_in": name}
        writer.write(**setting, pairs=len(held_out), **compare(ours, exact), by_kind=kinds)


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


REPEATS = 3
ALONE = 4
"""Sequences that are scored once more by themselves: their scores must be the same bits."""
TINY = ModelConfig("qwen3", 256, 128, 256, 2, 4, 2, 32, 4096, 1e-6, 1e6, tied_embeddings=False)


@dataclass(frozen=True, slots=True)
class Work:
    precision: str
    shape: str
    sequences: int
    length: int
    tokens_per_batch: int

    @property
    def config(self) -> ModelConfig:
        """The decoder with a score head in the place of lm_head."""
        found = TINY if self.shape == "tiny" else model_shape(self.shape)
        return replace(found, score_head=True)

    @property
    def flops(self) -> float:
        """Of the forward: 2 a parameter of the layers and token, and attention over L / 2 keys."""
        config = self.config
        parameters = sum(
            prod(shape) for name, shape in master_shapes(config).items() if "embed" not in name
        )
        keys = 4 * (self.length / 2) * config.num_heads * config.head_dim * config.num_layers
        return self.sequences * self.length * (2 * parameters + keys)


def measure_speed(work: Work, device: str, out: Path) -> None:
    card, versions = describe_device(device)  # before this process touches the card
    memory = _Memory(device)
    model = make_model(work, device)
    standing = memory.held_gib()
    generator = torch.Generator().manual_seed(0)
    shape = (work.sequences, work.length)
    ids = torch.randint(work.config.vocab_size, shape, generator=generator).tolist()
    model.score(ids[: max(1, work.tokens_per_batch // work.length)], work.tokens_per_batch)
    memory.reset_peak()
    seconds, scores = [], []
    for _ in range(REPEATS):
        began = perf_counter()
        scores = model.score(ids, work.tokens_per_batch)
        seconds.append(perf_counter() - began)
    alone = [model.score([one], work.tokens_per_batch)[0] for one in ids[:ALONE]]
    assert torch.isfinite(torch.tensor(scores)).all()
    middle = median(seconds)
    fields = {k: v for k, v in asdict(work).items() if k not in ("precision", "shape")}
    RowWriter(out, "reward-model", work.precision, work.shape, card, versions).write(
        **fields,
        seconds=middle,
        all_seconds=seconds,
        tokens_per_s=work.sequences * work.length / middle,
        tflop_per_s=work.flops / middle / 1e12,
        weights_gib=standing,
        peak_gib=memory.peak_gib(),
        scores_that_differ_alone=sum(a != b for a, b in zip(alone, scores, strict=False)),
    )


def make_model(work: Work, device: str) -> RewardModel:
    """Random weights, made on the device; the tokenizer is not asked for anything."""
    precision = PrecisionConfig.model_validate(work.precision)
    masters = random_masters(work.config, seed=0, device=device)
    policy = FrozenPolicy.publish(work.config, precision, masters, device)
    return RewardModel(policy, load_tokenizer(starter_folder()))


def describe_device(device: str) -> tuple[dict[str, Any], dict[str, str]]:
    """The device, and the versions of what computes on it."""
    if device == "cpu":
        return {"name": "CPU"}, {"torch": torch.__version__}
    from benchmarks.common import measure_card
    from benchmarks.rollout_engines import native_versions

    return measure_card(), native_versions()


class _Memory:
    """What torch holds of a card; nothing is counted on a CPU."""

    def __init__(self, device: str) -> None:
        self._is_card = device == "cuda"
        if self._is_card:
            from benchmarks.common import allocate_in_pages

            allocate_in_pages()

    def held_gib(self) -> float | None:
        return self._gib(torch.cuda.memory_allocated)

    def peak_gib(self) -> float | None:
        return self._gib(torch.cuda.max_memory_allocated)

    def reset_peak(self) -> None:
        if self._is_card:
            torch.cuda.reset_peak_memory_stats()

    def _gib(self, read: Callable[[], int]) -> float | None:
        return read() / 2**30 if self._is_card else None


if __name__ == "__main__":
    sys.exit(run_command(make_commands().parser))
