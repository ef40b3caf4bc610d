"""Steps of reinforcement learning from random weights: engine and trainer share the device and the
weights, as in ``isobit train``.

The reward is the share of even token ids among those sampled: something that a policy without
knowledge can learn, and hardly two samples of a prompt have the same.
"""

from dataclasses import dataclass
from pathlib import Path
from random import Random
from statistics import fmean, pstdev
from time import perf_counter

from benchmarks.curves.setting import device, make_writer, peak_gib, shape_named
from isobit.algorithms.registry import build_algorithm
from isobit.config.algorithm import GrpoConfig
from isobit.config.tables import PrecisionConfig, RolloutConfig, TrainingConfig
from isobit.models.function import is_one_function
from isobit.models.policy import random_policy
from isobit.records.text import Completion, Group, Prompt, SamplingParams
from isobit.rollout.engine import Request, generate
from isobit.rollout.native import NativeEngine
from isobit.training.step import train_on_groups
from isobit.training.trainer import Trainer

SEED = 0
LEARNING_RATE = 1e-4
"""AdamW moves a master by that much at first and by about a quarter of it later on; E4M3 numbers of
N(0, 0.02) lie some 0.001 apart.
"""
PROMPT_TOKENS = (16, 96)
"""The fewest and the most."""


@dataclass(frozen=True, slots=True)
class Size:
    """Of a step, and how its training fits the memory."""

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


def run(shape: str, precision: str, steps: int, learning_rate: float | None, out: Path) -> None:
    """A row a step."""
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
        update={"steps": steps, "learning_rate": learning_rate or LEARNING_RATE}
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
    """The reward."""
    return fmean(token % 2 == 0 for token in completion.token_ids)
