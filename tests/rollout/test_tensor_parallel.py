"""Engines of ranks that share a policy give what one engine with the whole of it gives."""

from typing import Any

import pytest
import torch

from isobit.config.precision import PrecisionConfig, Preset
from isobit.config.rollout import RolloutConfig
from isobit.models.config import ModelConfig
from isobit.models.function import SampledPolicy
from isobit.models.policy import Policy, random_masters
from isobit.models.policy_share import PolicyShare
from isobit.records.text import Completion, Prompt, SamplingParams
from isobit.rollout.engine import generate
from isobit.rollout.graph_runner import GraphRunner
from isobit.rollout.native import NativeEngine
from isobit.rollout.requests import Request
from tests.ranks import in_ranks

MODEL = ModelConfig("qwen3", 300, 256, 512, 1, 8, 4, 64, 256, 1e-6, 1e4, tied_embeddings=False)


def masters():
    for name, values in random_masters(MODEL, seed=1):
        yield name, values.mul_(6) if values.ndim == 2 else values


def requests() -> list[Request]:
    """Some greedy, some with a filter; one prompt longer than two pages."""
    generator = torch.Generator().manual_seed(3)
    made: list[Request] = []
    for index, (length, samples, new) in enumerate(
        [(50, 2, 16), (60, 2, 7), (61, 1, 6), (140, 1, 4)]
    ):
        token_ids = tuple(torch.randint(0, 300, (length,), generator=generator).tolist())
        sampling = SamplingParams(new, float(index != 1), top_k=40 if index == 2 else 0)
        made.append(Request(Prompt(f"p/{index}", "", token_ids), 0, samples, sampling))
    return made


def completions(
    policy: SampledPolicy, make_runner: Any = None
) -> tuple[list[list[Completion]], int]:
    """In a cache with room for one sequence and a bit."""
    rollout = RolloutConfig(kv_pages=4, max_batched_tokens=37)
    engine = NativeEngine(policy, rollout, None, 0, make_runner)
    return generate(engine, requests()), engine.stats.preemptions


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("preset", "ranks"),
    [("fp8", 2), ("fp8", 4), ("fp8-linear", 2), ("int8", 4), ("bf16", 2), ("fp32", 2)],
)
def test_completions_are_those_of_one_rank(preset: Preset, ranks: int):
    precision = PrecisionConfig(preset=preset)
    expected, preemptions = completions(Policy(MODEL, precision, masters(), trainable=False))
    assert preemptions
    shared = in_ranks(
        ranks, lambda world: completions(PolicyShare(MODEL, precision, masters(), world))
    )
    assert shared == [(expected, preemptions)] * ranks


@pytest.mark.exhaustive
def test_so_are_those_of_captured_steps():
    def pipelined(world):
        share = PolicyShare(MODEL, PrecisionConfig(preset="fp8"), masters(), world)
        return completions(share, lambda policy, pages: GraphRunner(policy, pages, 8))

    expected, _ = completions(
        Policy(MODEL, PrecisionConfig(preset="fp8"), masters(), trainable=False)
    )
    for made, preemptions in in_ranks(2, pipelined):
        assert preemptions
        assert made == expected


def test_the_cache_has_as_many_pages_on_all_ranks_and_more_than_one_rank_had():
    def pages(world):
        share = PolicyShare(MODEL, PrecisionConfig(preset="fp8"), masters(), world)
        config = RolloutConfig(kv_memory_gib=0.001, max_sequences=64)
        return NativeEngine(share, config, None, seed=0).limits.num_pages

    (alone,) = in_ranks(1, pages)
    assert in_ranks(2, pages) == [2 * alone] * 2
