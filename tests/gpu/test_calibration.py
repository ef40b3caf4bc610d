"""A calibrated clip on a GPU: the shadow is BF16's own policy, takes what was planned while it is
there, leaves nothing behind, and two runs set the same bounds.
"""

from collections.abc import Callable

import pytest
import torch

from isobit.algorithms.family import Grpo
from isobit.algorithms.policy_gradient import ClipBounds
from isobit.config.algorithm import GrpoConfig, StepConfig
from isobit.config.rollout import RolloutConfig
from isobit.config.training import TrainingConfig
from isobit.memory.activations import FrozenModel
from isobit.models.decoder import decoder_shape
from isobit.models.policy import Policy
from isobit.precision.flow import build_flow
from isobit.records.text import Group, Prompt, SamplingParams
from isobit.rollout.engine import generate
from isobit.rollout.native import NativeEngine
from isobit.rollout.requests import Request
from isobit.training.advantage_estimator import AdvantageEstimator
from isobit.training.calibration import SHADOW, Calibration, shadow_of
from isobit.training.step import Learner
from isobit.training.trainer import Trainer

MakePolicy = Callable[..., Policy]
CONFIGURED = ClipBounds(0.01, 0.01)
PROMPTS, SAMPLES, TOKENS = 6, 4, 60


def graded(policy: Policy) -> list[Group]:
    """Completions whose reward is the share of even tokens."""
    engine = NativeEngine(policy, RolloutConfig(max_sequences=16, kv_pages=256), None, seed=0)
    prompts = [Prompt(f"p{i}", "", tuple(range(7 * i + 1, 7 * i + 30))) for i in range(PROMPTS)]
    requests = [Request(prompt, 0, SAMPLES, SamplingParams(TOKENS)) for prompt in prompts]
    groups = [
        Group(
            request.prompt,
            0,
            samples,
            [sum(token % 2 for token in one.token_ids) / TOKENS for one in samples],
        )
        for request, samples in zip(requests, generate(engine, requests), strict=True)
    ]
    engine.release()
    return groups


def calibrated(policy: Policy) -> Calibration:
    """After a step of two updates in which the bounds were set."""
    config = GrpoConfig(clip_low=0.01, clip_high=0.01, calibrate_every=1)
    settings = TrainingConfig(learning_rate=1e-3, updates_per_batch=2, tokens_per_microbatch=700)
    trainer, algorithm = Trainer(policy, settings, total_updates=2), Grpo(config)
    calibration = Calibration(trainer, algorithm)
    judge = AdvantageEstimator(trainer, algorithm, StepConfig(), exact=True, max_new_tokens=TOKENS)
    metrics = Learner(judge, None, calibration).learn(graded(policy), 1)
    assert calibration.bounds is not None
    assert metrics.metrics["clip/high"] == calibration.bounds.clip_high
    assert metrics.comparison.tokens_differing == 0
    return calibration


@pytest.mark.parametrize("preset", ["fp8", "int8"])
def test_the_shadow_is_the_policy_of_bf16(shape: str, preset: str, make_policy: MakePolicy) -> None:
    shadow = shadow_of(make_policy(shape, preset))
    assert shadow.is_equal_to(make_policy(shape, "bf16"))
    flow = build_flow(SHADOW, decoder_shape(shadow.config))
    planned = FrozenModel("BF16 shadow", shadow.config, flow, "algorithm", lasting=False)
    assert planned.weight_bytes(shadow.backend.sizes) == shadow.num_bytes


@pytest.mark.parametrize("preset", ["fp8", "int8"])
def test_two_runs_set_the_same_bounds(preset: str, make_policy: MakePolicy) -> None:
    first, second = (calibrated(make_policy("qwen3", preset)).bounds for _ in range(2))
    assert first == second != CONFIGURED


def test_nothing_of_the_shadow_stays(make_policy: MakePolicy) -> None:
    policy = make_policy("qwen3", "fp8")
    calibration = Calibration(Trainer(policy, TrainingConfig(), 2), Grpo(GrpoConfig()))
    sequences = [one.sequence for group in graded(policy) for one in group.completions]
    calibration._by_shadow(sequences)  # workspaces of libraries stay
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    calibration._by_shadow(sequences)
    assert torch.cuda.memory_allocated() == before
    assert torch.cuda.max_memory_allocated() > before + shadow_of(policy).num_bytes
