"""What both kinds of run share: the shapes, the device, and who measured."""

from pathlib import Path
from typing import Any

import torch

from benchmarks.comparison.rows import RowWriter
from isobit.models.config import ModelConfig, model_shape
from isobit.util.machine import processor_name

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
    from benchmarks.comparison.card import measure_card, versions

    return RowWriter(out, kind, precision, shape, measure_card(), versions())


def peak_gib() -> float:
    """The most memory that torch held on the GPU."""
    return torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else 0.0
