"""The check of ``verify --shape``, on a shape small enough for a CPU."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from isobit.config.precision import PrecisionConfig, Preset
from isobit.kernels.spec import head
from isobit.models.config import ModelConfig
from isobit.models.policy import random_masters
from isobit.proof import full_size
from isobit.proof.full_size import FullSizeOptions, ragged_workload, verify_shape, with_outliers
from isobit.proof.verify import VerifyResult
from isobit.util.errors import ConfigError
from tests.models.policies import delta_nets, small_experts

SHAPES = {
    "qwen3": ModelConfig(
        "qwen3", 128, 128, 128, 2, 4, 2, 32, 1024, 1e-6, 10000.0, tied_embeddings=True
    ),
    "qwen2": ModelConfig(
        "qwen2", 128, 128, 128, 2, 4, 2, 32, 1024, 1e-6, 10000.0, tied_embeddings=True
    ),
}
SHAPES["qwen3_next"], SHAPES["gpt_oss"] = (
    replace(
        SHAPES["qwen3"], family=family, experts=small_experts(family, 4, 64),
        **delta_nets(family, 2),
    )
    for family in ("qwen3_next", "gpt_oss")
)  # fmt: skip
OPTIONS = FullSizeOptions(prompts=8, samples=3, max_new_tokens=24, longest=500, outliers=True)


@pytest.fixture(autouse=True)
def small_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(full_size, "model_shape", SHAPES.__getitem__)
    monkeypatch.setattr(full_size, "_MAX_BATCHED_TOKENS", 200)


def check(shape: str, preset: Preset = "fp8") -> VerifyResult:
    return verify_shape(shape, PrecisionConfig(preset=preset), "cpu", OPTIONS)


@pytest.mark.exhaustive
@pytest.mark.parametrize("shape", SHAPES)
def test_nothing_differs_and_everything_happened(shape: str) -> None:
    result = check(shape)
    assert result.exit_code == 0 and result.missing == ()
    assert result.comparison.tokens_compared > 2 * 8 * 3 * 12
    assert result.scenarios[0].stats.preemptions > 0


@pytest.mark.exhaustive
def test_a_fault_is_found(monkeypatch: pytest.MonkeyPatch, in_rollout: Callable[[], bool]) -> None:
    exact = head.log_softmax
    monkeypatch.setattr(
        head,
        "log_softmax",
        lambda logits, temperatures: exact(logits, temperatures) + 1e-6 * in_rollout(),
    )
    assert check("qwen3").exit_code == 1


def test_lengths_are_spread_over_the_orders_of_magnitude() -> None:
    workload = ragged_workload(1000, FullSizeOptions(), page_tokens=128)
    lengths = [len(prompt.token_ids) for prompt in workload.prompts]
    assert workload.longest == 8192 and max(lengths) == 8192 - 1100
    assert sum(n < 100 for n in lengths) > 16 and sum(n > 1000 for n in lengths) > 8
    assert sum(workload.max_new_tokens) * workload.samples > 200_000


def test_outliers_and_biases_of_k_are_planted() -> None:
    config = SHAPES["qwen2"]
    plain = dict(random_masters(config, 0))
    planted = dict(with_outliers(random_masters(config, 0), config))
    name = "layers.0.qkv_proj"
    assert torch.equal(planted[f"{name}.weight"][:, 101], 30 * plain[f"{name}.weight"][:, 101])
    bias = planted[f"{name}.bias"]
    assert bias[128:192].abs().max() == 30 and not bias[:128].any() and not bias[192:].any()
    for shape, other in ("qwen3_next", "dt_bias"), ("gpt_oss", "router.bias"):  # which are not K's
        config = SHAPES[shape]
        bias = dict(with_outliers(random_masters(config, 0), config))[f"layers.0.{other}"]
        assert bias[0] == 10 and bias[1] < 10


def test_no_room_for_prompts_is_refused() -> None:
    with pytest.raises(ConfigError, match="leave no room for prompts"):
        verify_shape(
            "qwen3",
            PrecisionConfig(preset="fp8"),
            "cpu",
            FullSizeOptions(max_new_tokens=600, longest=500),
        )
