"""GPUs that share a policy sample with the bits of one: kernels on slices of weights, captured
gathers.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch

from isobit.config.precision import PrecisionConfig, Preset
from isobit.config.rollout import RolloutConfig
from isobit.models.config import ModelConfig
from isobit.models.function import SampledPolicy
from isobit.models.policy import Policy, random_masters
from isobit.models.policy_share import PolicyShare
from isobit.parallel.world import World
from isobit.proof.verify import VerifyOptions, verify_policy
from isobit.records.text import Completion, Prompt, SamplingParams
from isobit.rollout.engine import generate
from isobit.rollout.native import NativeEngine
from isobit.rollout.requests import Request
from isobit.rollout.runner import PolicyRunner
from tests.gpu.conftest import SHAPES
from tests.ranks import in_ranks
from tests.worlds import in_world

PRESETS: tuple[Preset, ...] = ("fp8", "fp8-linear", "int8", "bf16")
MODELS: dict[str, tuple[ModelConfig, int]] = {
    "qwen3": (SHAPES["qwen3"], 2),
    "biases": (replace(SHAPES["qwen3"], family="qwen2", num_kv_heads=4, tied_embeddings=True), 4),
    "starter": (SHAPES["starter"], 2),  # a share of heads is half a group of 128
    "smollm2": (SHAPES["smollm2"], 3),  # short and unequal shares
    "beyond": (replace(SHAPES["qwen3"], tokenizer_size=937), 2),  # rows that are no token
}


def make(
    name: str, preset: Preset, world: World | None, device: torch.device
) -> tuple[SampledPolicy, PrecisionConfig]:
    """A policy, or this rank's share of it."""
    config, precision = MODELS[name][0], PrecisionConfig(preset=preset)
    masters = random_masters(config, 0, device)
    if world is None:
        return Policy(config, precision, masters, device, trainable=False), precision
    return PolicyShare(config, precision, masters, world, device), precision


def drawn(policy: SampledPolicy, make_runner: Any = None) -> list[list[Completion]]:
    """Completions in too small a cache, some with a filter."""
    requests = []
    for number, (length, samples, new) in enumerate([(150, 3, 120), (3, 6, 200), (300, 2, 9)]):
        token_ids = tuple(number + 7 * i % 120 for i in range(length))
        sampling = SamplingParams(new, 1.0, top_k=20 if number == 1 else 0)
        requests.append(Request(Prompt(f"p/{number}", "", token_ids), 0, samples, sampling))
    rollout = RolloutConfig(kv_pages=5, max_sequences=8, max_batched_tokens=256)
    engine = NativeEngine(policy, rollout, None, 0, make_runner)
    groups = generate(engine, requests)
    assert engine.stats.preemptions
    return groups


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("name", list(MODELS))
def test_ranks_of_one_gpu_draw_what_the_whole_policy_draws(name: str, preset: Preset):
    device = torch.device("cuda")
    expected = drawn(make(name, preset, None, device)[0])

    def shared(world: World) -> list[list[Completion]]:
        return drawn(make(name, preset, world, device)[0], PolicyRunner)

    for found in in_ranks(MODELS[name][1], shared):
        assert found == expected


TWO_GPUS: tuple[tuple[str, Preset], ...] = (("qwen3", "fp8"), ("starter", "int8"))
"""Pairs: what a rank computes is shown for every model and flow on one GPU."""


def draw_shares(world: World, _: None) -> list[dict[str, Any]]:
    """On each of two GPUs, by captured steps: whether completions are those of one GPU; and of the
    first pair what differs from the training forward.
    """
    device, made = world.own_device(torch.device("cuda")), []
    for name, preset in TWO_GPUS:
        whole, share = (make(name, preset, part, device)[0] for part in (None, world))
        made.append({"case": f"{name} {preset}", "same": drawn(share) == drawn(whole)})
        if len(made) == 1:
            assert isinstance(whole, Policy)
            assert isinstance(share, PolicyShare)
            options = VerifyOptions(prompts=6, samples=2, max_new_tokens=24)
            result = verify_policy(whole, options, shared=share).comparison
            made[0] |= {"compared": result.tokens_compared, "differing": result.tokens_differing}
    return made


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_draw_what_one_draws():
    for cases in in_world(2, "tests.gpu.test_tensor_parallel:draw_shares", gpus=True):
        assert all(case["same"] for case in cases), cases
        assert cases[0]["compared"] > 500, cases
        assert cases[0]["differing"] == 0, cases
