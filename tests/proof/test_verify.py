"""The exactness check: 0 differences in every exact flow, whatever is planted, and differences
where there must be some.
"""

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from isobit.cli.main import main
from isobit.config.lora import KNOWN_TARGETS
from isobit.config.precision import PrecisionConfig, Preset
from isobit.models.config import Lora, ModelConfig
from isobit.models.policy import Policy, random_policy
from isobit.models.saving import save_policy
from isobit.proof.verify import VerifyOptions, VerifyResult, verify, verify_policy
from isobit.util.errors import ConfigError, NonFiniteError
from tests.forked import AVX2, ran
from tests.models.policies import delta_nets, disturbed
from tests.tiny import TINY

EXACT: tuple[Preset, ...] = ("fp32", "bf16", "fp8-linear", "fp8", "int8-linear", "int8")
SMALL = VerifyOptions(prompts=5, samples=2, max_new_tokens=6)


@pytest.fixture(scope="module")
def config() -> ModelConfig:
    """Qwen2-shaped, so that K has a bias to plant something in; one layer in FP8 linears."""
    return ModelConfig(
        "qwen2", 128, 128, 128, 2, 2, 1, 64, 256, 1e-6, 10000.0, tied_embeddings=False
    )


@pytest.fixture(scope="module")
def planted(config: ModelConfig) -> Callable[..., Policy]:
    """One layer, with outliers of 100 times the rest in four channels of the activations, and
    biases of up to 60 on K.
    """

    def make(preset: Preset) -> Policy:
        shape = replace(config, num_layers=1)
        policy = random_policy(shape, PrecisionConfig(preset=preset), seed=1)
        generator = torch.Generator().manual_seed(2)
        queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        with torch.no_grad():
            policy.masters["layers.0.input_norm.weight"][[3, 40, 77, 127]] = 100.0
            bias = policy.masters["layers.0.qkv_proj.bias"]
            bias[queries : queries + keys] = 120 * torch.rand(keys, generator=generator) - 60
        policy.publish()
        return policy

    return make


def is_proved(result: VerifyResult) -> bool:
    return result.exit_code == 0 and not result.missing and result.comparison.tokens_differing == 0


HEADS: dict[str, tuple[Preset, dict[str, Any]]] = {
    "a window in a tile, heads of 80": (
        "fp8",
        {"num_layers": 1, "sliding_window": 20, "head_dim": 80},
    ),
    "a window above a full layer": ("bf16", {"sliding_window": 100, "full_layers": 1}),
    "INT8, a window in a tile, heads of 80": (
        "int8",
        {"num_layers": 1, "sliding_window": 20, "head_dim": 80},
    ),
    "INT8, heads of 96, sizes without a factor of 2": (
        "int8",
        {"num_layers": 1, "hidden_size": 131, "intermediate_size": 77, "head_dim": 96},
    ),
    "heads of 256": ("fp8", {"num_layers": 1, "head_dim": 256, "family": "qwen3"}),
}


@pytest.mark.exhaustive
@pytest.mark.usefixtures("one_scenario")
@pytest.mark.parametrize(("preset", "changes"), HEADS.values(), ids=HEADS)
def test_windows_and_head_sizes_have_no_differences(
    preset: Preset, changes: dict[str, Any], config: ModelConfig
) -> None:
    policy = random_policy(replace(config, **changes), PrecisionConfig(preset=preset), seed=1)
    assert is_proved(verify_policy(policy, SMALL))


@pytest.mark.few(1)
@pytest.mark.parametrize("preset", EXACT)
def test_exact_flows_have_no_differences(preset: Preset, tiny_folder: Path) -> None:
    result = verify(tiny_folder, PrecisionConfig(preset=preset), SMALL)
    assert is_proved(result)
    tokens = sum(scenario.stats.generated_tokens for scenario in result.scenarios)
    assert result.comparison.tokens_compared == 5 * tokens > 0, (
        "every token is compared in each of five packings"
    )


@pytest.mark.exhaustive
@pytest.mark.parametrize("lora", [None, Lora(4, 8.0, KNOWN_TARGETS)], ids=["plain", "adapters"])
@pytest.mark.parametrize("preset", ["bf16", "fp8", "int8"])
def test_hybrids_have_no_differences(
    preset: Preset, lora: Lora | None, config: ModelConfig
) -> None:
    """Few pages come with few states, so that hardly any sequences would run side by side."""
    shape = replace(config, family="qwen3_5_text", **delta_nets("qwen3_5_text", 2))
    shape = replace(shape, lora=None if lora is None else lora.within(shape))
    policy = random_policy(shape, PrecisionConfig(preset=preset), 1)
    policy = policy if lora is None else disturbed(policy)
    assert is_proved(verify_policy(policy, SMALL))


@pytest.fixture(scope="module")
def two_functions(tiny_folder: Path) -> VerifyResult:
    torch.set_num_threads(1)
    return verify(tiny_folder, PrecisionConfig(preset="fp8-rollout"), SMALL)


@pytest.mark.exhaustive
def test_two_functions_show_their_differences(two_functions: VerifyResult) -> None:
    result = two_functions
    assert result.exit_code == 1
    assert all(scenario.comparison.tokens_differing for scenario in result.scenarios)
    assert result.comparison.max_abs_diff > 1e-5


@pytest.mark.exhaustive
@pytest.mark.usefixtures("one_scenario")
@pytest.mark.parametrize(
    ("preset", "threads"), [("bf16", 1), ("bf16", 2), ("fp8", 1), ("fp8", 4), ("int8", 2)]
)
def test_outliers_and_large_biases_on_k(
    preset: Preset, threads: int, planted: Callable[..., Policy]
) -> None:
    """Every operation of a layer, on any number of threads."""
    torch.set_num_threads(threads)
    assert is_proved(verify_policy(planted(preset), SMALL))


@pytest.mark.exhaustive
def test_avx2_kernels(tmp_path: Path) -> None:
    """Every operation of a layer, in a process of its own, since the instruction set is chosen at
    the first use.
    """
    policy = random_policy(replace(TINY, num_layers=1), PrecisionConfig(preset="fp32"), seed=0)
    save_policy(policy, tmp_path / "model")
    words = ["verify", str(tmp_path / "model"), "--threads", "2", "--json"]
    for name in ("prompts", "samples", "max_new_tokens"):
        words += [f"--{name.replace('_', '-')}", str(getattr(SMALL, name))]
    environ = os.environ | AVX2
    done = ran("tests.proof.test_verify:below_avx512", tmp_path, words, environ=environ)
    outputs = done.stdout.split(";")[:-1]
    assert done.returncode == 0 and len(outputs) == 2, done.stdout + done.stderr
    for output in outputs:
        written, _, exit_code = output.rpartition("code ")
        counts = json.loads(written)
        assert (exit_code, counts["tokens_differing"], counts["max_abs_diff"]) == ("0", 0, 0.0)
        assert counts["tokens_compared"] > 0


def below_avx512(words: list[str]) -> int:
    """For ``test_avx2_kernels``: verify in two flows."""
    assert torch.backends.cpu.get_cpu_capability() != "AVX512"
    for name in ("bf16", "fp8"):
        print("code", main([*words, "--precision", name]), end=";")
    return 0


def test_what_did_not_happen_is_not_proved(tiny_folder: Path) -> None:
    """One prompt below a page, one sample: no page to share, nothing to preempt."""
    result = verify(
        tiny_folder,
        PrecisionConfig(preset="bf16"),
        VerifyOptions(prompts=1, samples=1, max_new_tokens=4),
    )
    assert result.exit_code == 2
    assert "few pages: preemptions is 0" in result.missing
    assert result.comparison.tokens_compared > 0 == result.comparison.tokens_differing


def test_a_context_too_small_is_refused_with_the_numbers(tiny_folder: Path) -> None:
    with pytest.raises(
        ConfigError, match="max_new_tokens is 256, but the model's context holds 256"
    ):
        verify(tiny_folder, PrecisionConfig(preset="fp8"), VerifyOptions(max_new_tokens=256))


def test_weights_that_overflow_could_not_be_compared(config: ModelConfig) -> None:
    policy = random_policy(config, PrecisionConfig(preset="bf16"), seed=0)
    with torch.no_grad():
        policy.masters["lm_head.weight"].fill_(3e38)
    policy.publish()
    with pytest.raises(NonFiniteError):
        verify_policy(policy, SMALL)


@pytest.mark.exhaustive
def test_json_has_the_counts_over_everything_and_by_scenario(two_functions: VerifyResult) -> None:
    written = json.loads(json.dumps(two_functions.as_json()))
    for name in ("tokens_compared", "tokens_differing"):
        assert (
            written[name] == sum(scenario[name] for scenario in written["scenarios"].values()) > 0
        )
    assert written["max_abs_diff"] == max(
        scenario["max_abs_diff"] for scenario in written["scenarios"].values()
    )
    assert written["scenarios"]["few pages"]["engine"]["generated_tokens"] > 0
