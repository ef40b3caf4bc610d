"""A reward model of a real model's shape with random weights, scoring sequences of one length."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from math import prod
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch

from benchmarks.comparison.rows import RowWriter
from isobit.config.tables import PrecisionConfig
from isobit.data.tokenizer import load_tokenizer
from isobit.models.config import ModelConfig, model_shape
from isobit.models.decoder import master_shapes
from isobit.models.frozen import FrozenPolicy, RewardModel
from isobit.models.policy import random_masters
from isobit.starter import starter_folder

REPEATS = 3
ALONE = 4
"""Sequences that are scored once more by themselves: their scores must be the same bits."""
TINY = ModelConfig("qwen3", 256, 128, 256, 2, 4, 2, 32, 4096, 1e-6, 1e6, tied_embeddings=False)


@dataclass(frozen=True, slots=True)
class Work:
    """What is scored."""

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
    """Write one row."""
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
    """What a row says of the device and of the versions on it."""
    if device == "cpu":
        return {"name": "CPU"}, {"torch": torch.__version__}
    from benchmarks.comparison.card import measure_card
    from benchmarks.comparison.native import native_versions

    return measure_card(), native_versions()


class _Memory:
    """What torch holds of a card; nothing is counted on a CPU."""

    def __init__(self, device: str) -> None:
        self._is_card = device == "cuda"
        if self._is_card:
            from benchmarks.comparison.device import allocate_in_pages

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
