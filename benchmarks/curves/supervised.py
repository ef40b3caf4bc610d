"""Supervised steps from random weights: the trainer and the objective of ``isobit sft``, a packed
micro-batch a step.
"""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from time import perf_counter

from benchmarks.curves.setting import device, make_writer, peak_gib, shape_named
from benchmarks.curves.text import Pair, batches, read_pairs
from isobit.config.tables import PrecisionConfig, TrainingConfig
from isobit.models.policy import random_policy
from isobit.training.supervised import SupervisedObjective, mean_loss, pack_pairs
from isobit.training.trainer import Trainer

TOKENS = {"tiny": 2048}
TOKENS_OF_A_STEP = 16384
LEARNING_RATE = 3e-4
WARM_UP = 20


def run(
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
    """Of a policy with random weights."""
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
