"""Whether a model of a real shape learns on a GPU: supervised on text in two flows, and by
reinforcement learning with nothing differing.

    python -m experiments.learning text DIR          # needs reasoning-gym, no GPU
    python -m experiments.learning sft --precision fp8 --text DIR [--seed 0] --out RESULTS
    python -m experiments.learning rl --shape qwen3-0.6b --steps 20 --out RESULTS
    python -m experiments.learning table RESULTS

``text`` writes DIR/train.jsonl and DIR/held_out.jsonl.  Weights are random at the start.  ``--shape
tiny`` runs everything on a CPU in a minute, for a look at the machinery.

The supervised text is problems of reasoning-gym with their answers.  Its tokens are bytes, which
need no tokenizer's files: byte b is token b + 2, after a token that starts the sequence and before
one that ends it; question and answer are both learnt, by the trainer and objective of ``isobit
sft``.  The reward of ``rl`` is the share of even token ids among those sampled: a policy without
knowledge can learn it, and hardly two samples of a prompt have the same.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from random import Random
from statistics import fmean, pstdev
from time import perf_counter
from typing import Any

import torch

from benchmarks.common import RowWriter, run_command
from isobit.algorithms.registry import build_algorithm
from isobit.config.algorithm import GrpoConfig
from isobit.config.precision import PrecisionConfig
from isobit.config.rollout import RolloutConfig
from isobit.config.training import TrainingConfig
from isobit.models.config import ModelConfig
from isobit.models.function import is_one_function
from isobit.models.policy import random_policy
from isobit.models.shapes import model_shape
from isobit.records.text import Completion, Group, Prompt, SamplingParams
from isobit.rollout.engine import generate
from isobit.rollout.native import NativeEngine
from isobit.rollout.requests import Request
from isobit.training.step import train_on_groups
from isobit.training.supervised import SupervisedObjective, mean_loss, pack_pairs
from isobit.training.trainer import Trainer
from isobit.util.machine import processor_name


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    commands = parser.add_subparsers(required=True)
    command = commands.add_parser("text")
    command.add_argument("directory", type=Path)
    command.set_defaults(run=text)
    for name, run, steps in (("sft", sft, 200), ("rl", rl, 20)):
        command = commands.add_parser(name)
        command.add_argument("--precision", choices=("bf16", "fp8-linear", "fp8"), default="fp8")
        command.add_argument("--shape", default="qwen3-0.6b")
        command.add_argument("--steps", type=int, default=steps)
        command.add_argument("--learning-rate", type=float)
        command.add_argument("--out", type=Path, required=True)
        command.set_defaults(run=run)
        if name == "sft":
            command.add_argument("--text", type=Path, required=True)
            command.add_argument(
                "--seed", type=int, default=0, help="of the weights and of the order of the text"
            )
    command = commands.add_parser("table")
    command.add_argument("directory", type=Path)
    command.set_defaults(run=table)
    return parser


# What a command needs is imported when it runs: reasoning-gym is not everywhere, and a table needs
# no GPU.


def text(arguments: argparse.Namespace) -> None:
    write_text(arguments.directory)


def sft(arguments: argparse.Namespace) -> None:
    fine_tune(
        arguments.shape,
        arguments.precision,
        arguments.steps,
        arguments.learning_rate,
        arguments.seed,
        arguments.text,
        arguments.out,
    )


def rl(arguments: argparse.Namespace) -> None:
    reinforce(
        arguments.shape,
        arguments.precision,
        arguments.steps,
        arguments.learning_rate,
        arguments.out,
    )


def table(arguments: argparse.Namespace) -> None:
    from experiments.curves import run_table

    run_table(arguments.directory)


TINY = ModelConfig("qwen3", 384, 128, 384, 2, 2, 2, 64, 2048, 1e-6, 1e4, tied_embeddings=True)


def shape_named(name: str) -> ModelConfig:
    """A shape of ``isobit.models.config``, or ``tiny``.  Raises ConfigError for others."""
    return TINY if name == "tiny" else model_shape(name)


def device() -> torch.device:
    """The GPU, where there is one; asked in the way that leaves CUDA untouched, since
    ``measure_card`` forks.
    """
    return torch.device("cuda" if torch.cuda.device_count() else "cpu")


def make_writer(out: Path, kind: str, precision: str, shape: str) -> RowWriter:
    """Rows that name the card, or the processor in its place."""
    if device().type == "cpu":
        card: dict[str, Any] = {"name": processor_name(), "uuid": None}
        return RowWriter(out, kind, precision, shape, card, {"torch": torch.__version__})
    from benchmarks.common import measure_card, versions

    return RowWriter(out, kind, precision, shape, measure_card(), versions())


def peak_gib() -> float:
    """The most memory that torch held on the GPU."""
    return torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else 0.0


TASKS = (
    "chain_sum",
    "basic_arithmetic",
    "spell_backward",
    "letter_counting",
    "number_sorting",
    "gcd",
    "caesar_cipher",
    "leg_counting",
    "family_relationships",
)
TRAINING_ROWS, HELD_OUT_ROWS = 1100, 40
"""Rows of each task."""
START, END, _FIRST_BYTE = 0, 1, 2


Pair = tuple[Sequence[int], Sequence[int]]
"""Tokens of the prompt, and tokens that are learnt."""


def write_text(directory: Path) -> None:
    """Both files, the tasks in turns."""
    from isobit.data.tasks import create_task

    directory.mkdir(parents=True, exist_ok=True)
    size = TRAINING_ROWS + HELD_OUT_ROWS
    tasks = [create_task(name, size, seed=0, options={}) for name in TASKS]
    for name, rows in (("train", range(TRAINING_ROWS)), ("held_out", range(TRAINING_ROWS, size))):
        entries = [task[row] for row in rows for task in tasks]
        lines = [
            json.dumps({"prompt": entry["question"], "completion": entry["answer"]})
            for entry in entries
        ]
        path = directory / f"{name}.jsonl"
        path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
        print(f"{path}: {len(lines):,} rows, {path.stat().st_size:,} bytes")


def read_pairs(path: Path) -> list[Pair]:
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [
        (
            (START,),
            [
                *(byte + _FIRST_BYTE for byte in f"{row['prompt']}\n{row['completion']}".encode()),
                END,
            ],
        )
        for row in rows
    ]


def batches(pairs: Sequence[Pair], tokens: int, seed: int) -> Iterator[list[Pair]]:
    """Without end: as many pairs a batch as ``tokens`` hold, in a new order in each pass over all
    of them.
    """
    random, batch, room = Random(seed), list[Pair](), tokens  # noqa: S311 (draws an order, keeps no secret)
    while True:
        for given, learnt in random.sample(pairs, len(pairs)):
            length = len(given) + len(learnt)
            if length > room:
                yield batch
                batch, room = [], tokens
            batch.append((given, learnt))
            room -= length


TOKENS = {"tiny": 2048}
TOKENS_OF_A_STEP = 16384
LEARNING_RATE = 3e-4
WARM_UP = 20


def fine_tune(
    shape: str,
    precision: str,
    steps: int,
    learning_rate: float | None,
    seed: int,
    text: Path,
    out: Path,
) -> None:
    """A row a step, and one at the end with the loss of the held-out rows.

    Flows with one seed see the same batches and start from the same weights; another seed draws
    others.
    """
    writer = make_writer(out, "sft", precision, shape)
    tokens = TOKENS.get(shape, TOKENS_OF_A_STEP)
    config = TrainingConfig(
        steps=steps,
        tokens_per_microbatch=tokens,
        learning_rate=learning_rate or LEARNING_RATE,
        schedule="cosine",
        warmup_updates=min(WARM_UP, steps - 1),
    )
    trainer = make_trainer(shape, precision, config, seed)
    for step, pairs in enumerate(steps_of(text, config, seed), 1):
        started_at = perf_counter()
        update = trainer.update(pack_pairs(pairs, tokens), SupervisedObjective())
        writer.write(
            seed=seed,
            step=step,
            loss=update.metrics["loss"],
            tokens=update.tokens,
            grad_norm=update.metrics["grad_norm"],
            learning_rate=update.metrics["learning_rate"],
            weight_bytes_changed=update.metrics["weight_bytes_changed"],
            skipped=update.skipped,
            seconds=perf_counter() - started_at,
        )
    writer.write(
        seed=seed, step=steps, held_out_loss=held_out_loss(trainer, text), peak_gib=peak_gib()
    )


def make_trainer(shape: str, precision: str, config: TrainingConfig, seed: int) -> Trainer:
    """A trainer of a policy with random weights."""
    policy = random_policy(
        shape_named(shape), PrecisionConfig.model_validate(precision), seed, device()
    )
    return Trainer(policy, config, config.steps, seed)


def steps_of(text: Path, config: TrainingConfig, seed: int) -> Iterator[list[Pair]]:
    """What each step learns: as many pairs as a micro-batch holds."""
    return islice(
        batches(read_pairs(text / "train.jsonl"), config.tokens_per_microbatch, seed), config.steps
    )


def held_out_loss(trainer: Trainer, text: Path) -> float:
    """Nats a token of the text that is not learnt."""
    return mean_loss(
        trainer,
        pack_pairs(read_pairs(text / "held_out.jsonl"), trainer.config.tokens_per_microbatch),
    )


SEED = 0
RL_LEARNING_RATE = 1e-4
"""AdamW moves a master by that much at first and by about a quarter of it later on; E4M3 numbers of
N(0, 0.02) lie some 0.001 apart.
"""
PROMPT_TOKENS = (16, 96)
"""The fewest and the most tokens of a prompt."""


@dataclass(frozen=True, slots=True)
class Size:
    """The size of a step, and settings that make its training fit."""

    prompts: int
    samples: int
    new_tokens: int
    kv_memory_gib: float
    release: bool
    """Give the cache's memory back while the trainer works; the next rollout captures its graphs
    again.
    """
    training: TrainingConfig


SIZES = {
    "tiny": Size(4, 4, 24, 0.1, True, TrainingConfig(tokens_per_microbatch=1024)),
    "qwen3-0.6b": Size(16, 8, 256, 8.0, False, TrainingConfig(tokens_per_microbatch=16384)),
    "qwen3-8b": Size(
        8,
        4,
        128,
        2.0,
        True,
        TrainingConfig(tokens_per_microbatch=8192, moments="bf16", recompute="full"),
    ),
}


def reinforce(
    shape: str, precision: str, steps: int, learning_rate: float | None, out: Path
) -> None:
    writer, size = make_writer(out, "rl", precision, shape), SIZES[shape]
    policy = random_policy(
        shape_named(shape), PrecisionConfig.model_validate(precision), SEED, device()
    )
    sequences = size.prompts * size.samples
    rollout = RolloutConfig(
        max_new_tokens=size.new_tokens, max_sequences=sequences, kv_memory_gib=size.kv_memory_gib
    )
    engine = NativeEngine(policy, rollout, None, SEED)
    config = size.training.model_copy(
        update={"steps": steps, "learning_rate": learning_rate or RL_LEARNING_RATE}
    )
    trainer, algorithm = Trainer(policy, config, steps, SEED), build_algorithm(GrpoConfig())
    for step in range(1, steps + 1):
        started_at = perf_counter()
        requests = [
            Request(prompt, 0, size.samples, SamplingParams(size.new_tokens))
            for prompt in prompts(step, size, shape)
        ]
        completions = generate(engine, requests)
        if size.release:
            engine.release()
        generated_at = perf_counter()
        groups = [
            Group(request.prompt, 0, answers, [even_share(answer) for answer in answers])
            for request, answers in zip(requests, completions, strict=True)
        ]
        exact = is_one_function(engine.function, trainer.function)
        trained = train_on_groups(trainer, groups, algorithm, exact)
        rewards = [reward for group in groups for reward in group.rewards if reward is not None]
        (update,) = trained.updates
        writer.write(
            step=step,
            reward_mean=fmean(rewards),
            reward_std=pstdev(rewards),
            tokens_compared=trained.comparison.tokens_compared,
            tokens_differing=trained.comparison.tokens_differing,
            weight_bytes_changed=update.metrics["weight_bytes_changed"],
            grad_norm=update.metrics["grad_norm"],
            loss=update.metrics["loss"],
            skipped=update.skipped,
            rollout_seconds=generated_at - started_at,
            training_seconds=perf_counter() - generated_at,
            peak_gib=peak_gib(),
        )


def prompts(step: int, size: Size, shape: str) -> list[Prompt]:
    """Random tokens of uneven numbers, others in each step."""
    random, vocabulary = Random(f"{SEED}/{step}"), shape_named(shape).vocab_size  # noqa: S311 (no secret)
    lengths = [random.randint(*PROMPT_TOKENS) for _ in range(size.prompts)]
    return [
        Prompt(f"{step}/{i}", "", tuple(random.randrange(vocabulary) for _ in range(n)))
        for i, n in enumerate(lengths)
    ]


def even_share(completion: Completion) -> float:
    return fmean(token % 2 == 0 for token in completion.token_ids)


if __name__ == "__main__":
    sys.exit(run_command(make_parser()))
