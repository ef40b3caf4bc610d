"""What is computed: sequences of one length, laid end to end, and the FLOPs that a model's shape
makes of them.

A case is written PRECISION:LENGTHxSEQUENCES:RECOMPUTE, for example ``fp8:4096x2:none``: two
sequences of 4,096 tokens a micro-batch.
"""

import argparse
import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import cast, get_args

import torch

from isobit.config.tables import Recompute
from isobit.models.config import ModelConfig, model_shape
from isobit.models.decoder import master_shapes
from isobit.util.errors import ConfigError

MODES = ("bf16", "fp8-linear", "fp8")
_PATTERN = re.compile(r"([a-z0-9-]+):(\d+)x(\d+):([a-z]+)")


@dataclass(frozen=True, slots=True)
class Case:
    """A micro-batch."""

    mode: str
    length: int
    sequences: int
    recompute: Recompute
    shape: str = "qwen3-8b"

    @property
    def tokens(self) -> int:
        """Of all sequences."""
        return self.length * self.sequences

    @property
    def config(self) -> ModelConfig:
        """The model."""
        return model_shape(self.shape)

    @property
    def fields(self) -> dict[str, object]:
        """Its part of a row."""
        return {"length": self.length, "sequences": self.sequences, "recompute": self.recompute}

    def token_ids(self) -> torch.Tensor:
        """Random tokens, int64 [sequences, length], the same on every side."""
        generator = torch.Generator().manual_seed(0)
        return torch.randint(
            self.config.vocab_size, (self.sequences, self.length), generator=generator
        )

    def weights(self) -> torch.Tensor:
        """What each predicted token's log-probability counts in the loss, FP32 [sequences, length -
        1].
        """
        generator = torch.Generator().manual_seed(1)
        return torch.randn((self.sequences, self.length - 1), generator=generator) / self.tokens


def parse_case(text: str) -> Case:
    """For argparse."""
    found = _PATTERN.fullmatch(text)
    if not (
        found
        and found[1] in MODES
        and found[4] in get_args(Recompute)
        and int(found[2]) > 1
        and int(found[3]) > 0
    ):
        raise argparse.ArgumentTypeError(
            f"{text!r} is no case: write PRECISION:LENGTHxSEQUENCES:RECOMPUTE, as in "
            "fp8:4096x2:none, with a precision of "
            f"{', '.join(MODES)} and recompute of {', '.join(get_args(Recompute))}"
        )
    return Case(found[1], int(found[2]), int(found[3]), cast(Recompute, found[4]))


def check_peer(cases: Sequence[Case]) -> None:
    """Raise ConfigError for a case that transformers does not compute."""
    for case in cases:
        if case.mode != "bf16" or case.recompute == "mlp":
            name = f"{case.mode}:{case.length}x{case.sequences}:{case.recompute}"
            raise ConfigError(f"{name}: transformers trains in bf16, and recomputes none or full")


def flops(case: Case) -> float:
    """Of forward and backward, recomputation not counted: 6 a parameter and token, of experts those
    that a token goes to; and the products of attention over L / 2 keys.
    """
    config = case.config
    experts = config.experts
    share = 1.0 if experts is None else experts.top_k / experts.count
    parameters = sum(
        prod(shape) * (share if ".experts." in name else 1)
        for name, shape in master_shapes(config).items()
        if name != "embed_tokens.weight"
    )
    if config.tied_embeddings:
        parameters += config.vocab_size * config.hidden_size
    attention = 3 * 4 * (case.length / 2) * config.num_heads * config.head_dim * config.num_layers
    return case.tokens * (6 * parameters + attention)
