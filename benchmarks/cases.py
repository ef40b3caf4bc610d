"""The workloads that Isobit and its peers are measured on: random tokens, and lengths that are
fixed in advance, so that every engine does the same work.

    RolloutCase    prompts that all arrive at once and all get the same number of new tokens
    PassCase       a micro-batch of sequences of one length, end to end, and its model FLOPs;
                   written PRECISION:LENGTHxSEQUENCES:RECOMPUTE, for example ``fp8:4096x2:none``
    StepCase       a step of reinforcement learning: prompts, samples of each, and new tokens
"""

import argparse
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from random import Random
from typing import cast, get_args

import torch

from isobit.config.precision import PrecisionConfig
from isobit.config.training import Recompute
from isobit.models.config import ModelConfig
from isobit.models.decoder import master_shapes
from isobit.models.shapes import model_shape
from isobit.records.batch import PackedBatch
from isobit.records.text import Prompt, SamplingParams
from isobit.rollout.requests import Request
from isobit.util.errors import ConfigError


@dataclass(frozen=True, slots=True)
class RolloutCase:
    """``requests`` prompts of ``prompt_tokens`` tokens, and exactly ``new_tokens`` generated for
    each.
    """

    requests: int
    prompt_tokens: int
    new_tokens: int
    spread: float = 0.0
    """Of the logarithms of the lengths: then ``new_tokens`` is the longest, and the median a tenth
    of it.
    """

    @property
    def counted_tokens(self) -> int:
        """The tokens of "tokens per second": generated ones, or those of the prompts where only one
        is generated for each.
        """
        if self.new_tokens == 1:
            return self.requests * self.prompt_tokens
        return sum(self.lengths(self.new_tokens))

    def lengths(self, most: int) -> list[int]:
        """New tokens of each request, the same for every engine, and at most so many."""
        if not self.spread:
            return [min(most, self.new_tokens)] * self.requests
        chance = Random(0)  # noqa: S311 (no secret)
        median = self.new_tokens / 10
        drawn = (median * chance.lognormvariate(0, self.spread) for _ in range(self.requests - 1))
        every = [self.new_tokens, *(max(1, min(self.new_tokens, round(n))) for n in drawn)]
        return [min(most, n) for n in every]


ROLLOUT_CASES = {
    "prefill": RolloutCase(128, 2048, 1),
    "short": RolloutCase(256, 512, 1024),
    "long": RolloutCase(256, 512, 3584),
    "context": RolloutCase(16, 30720, 2048),
    "ragged": RolloutCase(256, 512, 7680, spread=1.1),
}
MODES = (
    "bf16", "fp8-linear", "fp8", "fp8-int8-attention", "int8-linear", "int8", "int8-head",
    "int8-forward",
)  # fmt: skip
"""Presets, and flows with options: ``fp8`` with attention in INT8; ``int8`` with lm_head, and with
DGrad in FP8 and WGrad in BF16, as rows of ``int8`` before 2026-11-28 have it.
"""
INT8_ATTENTION = ("fp8-int8-attention", "int8", "int8-head", "int8-forward")
"""Modes whose attention and KV cache are in INT8."""
MAX_SEQUENCES = 256
WARM_UP_TOKENS = 16
"""New tokens of the rollout before the timed one.  Prompts are read in up to eight forwards of
16,384 tokens, so with 16 new tokens all of them are decoded together at the end, as in the timed
run, and every batch size on the way is captured.
"""


def precision_of(mode: str) -> PrecisionConfig:
    """One of ``MODES``."""
    with_options = {
        "fp8-int8-attention": {"preset": "fp8", "attention": "int8"},
        "int8-head": {"preset": "int8", "head": "int8"},
        "int8-forward": {"preset": "int8", "dgrad": "fp8", "wgrad": "bf16"},
    }
    return PrecisionConfig.model_validate(with_options.get(mode, mode))


def make_requests(
    prompts: Sequence[Iterable[int]],
    new_tokens: int | Sequence[int],
    samples: int = 1,
    visit: int = 0,
) -> list[Request]:
    """Requests of so many new tokens, of all or of each, at temperature 1 over the full
    vocabulary.
    """
    every = [new_tokens] * len(prompts) if isinstance(new_tokens, int) else new_tokens
    return [
        Request(Prompt(f"bench/{i}", "", tuple(ids)), visit, samples, SamplingParams(n, 1.0))
        for i, (ids, n) in enumerate(zip(prompts, every, strict=True))
    ]


def rollout_prompts(case: RolloutCase, vocab_size: int, seed: int = 0) -> list[list[int]]:
    """The same token ids for every engine."""
    random = Random(seed)  # noqa: S311 (no secret)
    return [random.choices(range(vocab_size), k=case.prompt_tokens) for _ in range(case.requests)]


_PATTERN = re.compile(r"([a-z0-9-]+):(\d+)x(\d+):([a-z]+)")


@dataclass(frozen=True, slots=True)
class PassCase:
    mode: str
    length: int
    sequences: int
    recompute: Recompute
    shape: str = "qwen3-8b"

    def __str__(self) -> str:
        """As rows of several ranks have it: ``Case(mode='fp8', ..)``."""
        return repr(self).removeprefix("Pass")

    @property
    def tokens(self) -> int:
        return self.length * self.sequences

    @property
    def config(self) -> ModelConfig:
        return model_shape(self.shape)

    @property
    def fields(self) -> dict[str, object]:
        return {"length": self.length, "sequences": self.sequences, "recompute": self.recompute}

    def token_ids(self) -> torch.Tensor:
        """Random tokens, int64 [sequences, length], the same on every side."""
        generator = torch.Generator().manual_seed(0)
        return torch.randint(
            self.config.vocab_size, (self.sequences, self.length), generator=generator
        )

    def batches(self, microbatches: int) -> list[PackedBatch]:
        """So many micro-batches of ``token_ids``, packed for fine-tuning."""
        from isobit.training.supervised import pack_pairs

        rows = self.token_ids().tolist() * microbatches
        batches = pack_pairs([((first,), rest) for first, *rest in rows], self.tokens)
        assert len(batches) == microbatches
        return batches

    def weights(self) -> torch.Tensor:
        """What each predicted token's log-probability counts in the loss, FP32 [sequences, length -
        1].
        """
        generator = torch.Generator().manual_seed(1)
        return torch.randn((self.sequences, self.length - 1), generator=generator) / self.tokens


def parse_case(text: str) -> PassCase:
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
    return PassCase(found[1], int(found[2]), int(found[3]), cast(Recompute, found[4]))


def check_peer(cases: Sequence[PassCase]) -> None:
    """Raise ConfigError for a case that transformers does not compute."""
    for case in cases:
        if case.mode != "bf16" or case.recompute == "mlp":
            name = f"{case.mode}:{case.length}x{case.sequences}:{case.recompute}"
            raise ConfigError(f"{name}: transformers trains in bf16, and recomputes none or full")


def flops(case: PassCase) -> float:
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
    layers = config.num_layers - len(config.delta_layers)  # the rule's own are not counted
    attention = 3 * 4 * (case.length / 2) * config.num_heads * config.head_dim * layers
    return case.tokens * (6 * parameters + attention)


@dataclass(frozen=True, slots=True)
class StepCase:
    """``prompts`` of ``prompt_tokens`` tokens, ``samples`` completions of ``new_tokens`` tokens for
    each.
    """

    prompts: int
    samples: int
    prompt_tokens: int
    new_tokens: int

    @property
    def sequences(self) -> int:
        return self.prompts * self.samples

    @property
    def length(self) -> int:
        return self.prompt_tokens + self.new_tokens

    def random_prompts(self, vocab_size: int) -> list[list[int]]:
        """The same token ids for every engine."""
        random = Random(0)  # noqa: S311 (no secret)
        return [
            random.choices(range(vocab_size), k=self.prompt_tokens) for _ in range(self.prompts)
        ]


STEP_CASES = {"2k": StepCase(32, 8, 256, 2048), "8k": StepCase(8, 8, 256, 8192)}
