"""Which pairs of engine and trainer are one function."""

import pytest

from isobit.config.precision import PrecisionConfig, Preset
from isobit.models.config import ModelConfig
from isobit.models.function import LogProbFunction, function_of, is_one_function
from isobit.models.policy import Policy, random_policy

TINY = ModelConfig("qwen3", 64, 128, 128, 1, 4, 2, 32, 64, 1e-6, 1e4, tied_embeddings=True)


def make_policy(preset: Preset) -> Policy:
    return random_policy(TINY, PrecisionConfig(preset=preset), 0)


@pytest.mark.parametrize("preset", ["fp32", "bf16", "fp8-rollout", "fp8-linear", "fp8", "int8"])
def test_both_sides_of_one_policy_are_what_its_flow_says(preset: Preset) -> None:
    policy = make_policy(preset)
    one = is_one_function(function_of(policy, "rollout"), function_of(policy, "training"))
    assert one == policy.flow.exact == (preset != "fp8-rollout")


def test_other_tensors_other_kernels_or_other_formats_are_another_function() -> None:
    policy, twin, plain = make_policy("fp8"), make_policy("fp8"), make_policy("bf16")
    trained = function_of(policy, "training")
    assert not is_one_function(function_of(twin, "rollout"), trained)
    elsewhere = LogProbFunction(policy, policy.flow.rollout, "another engine")
    assert not is_one_function(elsewhere, trained)
    assert not is_one_function(LogProbFunction(policy, plain.flow.rollout, "spec"), trained)
