"""What a plan that does not fit is refused with: each way out that is offered works."""

import re
from dataclasses import replace
from typing import Any

import pytest

from isobit.config.lora import LORA_TARGETS
from isobit.config.precision import PrecisionConfig
from isobit.config.rollout import RolloutConfig
from isobit.config.training import TrainingConfig
from isobit.kernels.hopper import sizes
from isobit.memory.cards import GPUS
from isobit.memory.device import DevicePlanner
from isobit.models.config import Lora, ModelConfig
from isobit.models.decoder import decoder_shape
from isobit.models.shapes import model_shape
from isobit.precision.flow import build_flow
from isobit.util.errors import ConfigError
from tests.memory.test_device import GIB, H200, LLAMA_70B, QWEN3_8B, plan

LORA_70B = replace(LLAMA_70B, lora=Lora(32, 64.0, LORA_TARGETS), max_positions=131072)
LORA_8B = replace(QWEN3_8B, lora=Lora(32, 64.0, LORA_TARGETS))
LONG_8B = replace(QWEN3_8B, max_positions=131072)


@pytest.mark.few(4)
@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"tokens_per_microbatch": 16384}, r"135 GiB can be planned.*fits with .*'none'.* is \d,"),
        ({"tokens_per_microbatch": 16384}, "16,384 fit with training.recompute = 'mlp'"),
        ({"longest": 16384}, r"at most \d,\d+ fit, and a sequence, here of up to 16,384 tokens"),
        (
            {"moments": "fp32", "total": H200 + 3 * GIB},
            r"'fp32' at most [\d,]+ fit, .*; 4,096 fit with training.recompute = 'full'",
        ),
        (
            {"moments": "fp32", "total": 120 * GIB},
            "not one token fits beside weights and gradients; 4,096 fit with .*moments = 'bf16'",
        ),
        (
            {"moments": "fp32", "total": 103 * GIB},
            "4,096 fit with training.recompute = 'mlp' and training.moments = 'fp8'",
        ),
        (
            {"recompute": "full", "total": 102 * GIB},
            "'bf16' not one token fits .*; 4,096 fit with training.moments = 'fp8'",
        ),
        ({"tokens_per_microbatch": 200_000}, r"holds are \d+,\d+, with .*'full' and .*'fp8'"),
        ({"total": 80 * GIB}, "no setting makes this model's training fit"),
        ({"rollout": {"kv_memory_gib": 100}}, r"fits is [\d.]+ GiB; it fits with .*gib left out"),
        ({"rollout": {"kv_memory_gib": 70}}, r"; it fits with training.offload_moments = true; "),
        ({"rollout": {"kv_pages": 10**6}}, r"rollout.kv_pages that fits is [\d,]+ pages"),
    ],
)
def test_what_does_not_fit_is_refused_with_what_would(settings: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        plan(**settings)


def planner(shape: ModelConfig, total: int, processes: int = 1) -> DevicePlanner:
    flow = build_flow(PrecisionConfig.model_validate("fp8"), decoder_shape(shape))
    return DevicePlanner(shape, flow, sizes, total, processes=processes)


def refused(made: DevicePlanner, longest: int, rollout: Any = None, **training: Any) -> str:
    with pytest.raises(ConfigError) as error:
        made.plan(
            RolloutConfig.model_validate(rollout or {}),
            TrainingConfig.model_validate(training),
            longest,
        )
    return str(error.value)


def test_adapters_of_70b_on_eight_h100s() -> None:
    """Neither as many GPUs as there are, nor settings under which nothing could be drawn."""
    text = refused(planner(LORA_70B, GPUS["h100"].total, 8), 8201, tokens_per_microbatch=8192)
    assert "more GPUs do not help: each has all of published weights 68.5 GiB + " in text
    assert "cluster.processes" not in text
    assert "take sequences of no more" in text and "rollout.max_batched_tokens = " in text
    assert "8,201 fit on an H200 (139 GiB) with training.recompute = 'mlp'" in text
    assert re.search(r"\n  published weights +68\.5 GiB +68\.5 GiB\n", text)
    assert re.search(r"\n  together +82\.1 GiB +251 GiB$", text)


@pytest.mark.exhaustive
def test_engines_that_processes_share_are_a_way_out() -> None:
    """70B with all weights: whole matrices on each of 32 GPUs, or a part of them on each of 8."""
    made = planner(model_shape("llama-3.1-70b"), H200, 8)
    text = refused(made, 4096)
    assert "set cluster.processes = 32 and" in text and "no setting" not in text
    assert "4,096 fit with cluster.rollout_tp = 4 and training.recompute = 'full'" in text
    text = refused(replace(made, processes=4), 4096)
    assert "no setting makes this model's training fit on 4 GPUs" in text
    assert "4,096 fit with cluster.processes = 8 and cluster.rollout_tp = 4 and" in text
    for other in (
        replace(made, rollout_tp=2),
        replace(made, can_share=False),
        planner(LORA_70B, GPUS["h100"].total, 8),
    ):
        assert "cluster.rollout_tp" not in refused(other, 4096, tokens_per_microbatch=8192)
    moe = planner(model_shape("mixtral-8x7b"), 80 * GIB, 2)
    assert "cluster.rollout_tp" not in refused(moe, 4096)


CASES = {
    "8B": (planner(QWEN3_8B, H200), 4096, {"tokens_per_microbatch": 16384, "moments": "bf16"}, {}),
    "8B, a cache that is set": (
        planner(QWEN3_8B, H200),
        4096,
        {"tokens_per_microbatch": 16384, "moments": "bf16"},
        {"kv_memory_gib": 100},
    ),
    "8B, a cache alone": (planner(QWEN3_8B, H200), 4096, {"moments": "bf16"}, {"kv_pages": 10**6}),
    "8B, 128k": (planner(LONG_8B, H200), 131072, {}, {}),
    "8B, 128k, eight": (planner(LONG_8B, GPUS["h100"].total, 8), 131072, {}, {}),
    "8B, 24 GiB": (planner(QWEN3_8B, 24 * GIB), 2048, {}, {}),
    "8B, 9 GiB": (planner(LORA_8B, 9 * GIB), 2048, {}, {}),
    "adapters, 24 GiB": (planner(LORA_8B, 24 * GIB), 2048, {}, {}),
    "32B": (planner(model_shape("qwen3-32b"), H200), 4096, {}, {}),
    "32B, four": (planner(model_shape("qwen3-32b"), H200, 4), 4096, {}, {}),
    "70B, eight": (planner(model_shape("llama-3.1-70b"), H200, 8), 4096, {}, {}),
    "70B, adapters, eight": (planner(LORA_70B, GPUS["h100"].total, 8), 8201, {}, {}),
    "70B, adapters, its advice": (
        planner(LORA_70B, GPUS["h100"].total, 8),
        2057,
        {"recompute": "full", "moments": "fp8", "tokens_per_microbatch": 2304},
        {},
    ),
}


def offers(text: str) -> list[str]:
    """The clauses of a refusal that name a setting that would do."""
    first = text.splitlines()[0].split("; ")
    ways = r"(largest .* that fits|fit with|it fits|fit on an?|set cluster|the most that any)"
    return [clause for clause in first if re.search(ways, clause)]


@pytest.mark.few(1)
@pytest.mark.parametrize("case", CASES)
def test_each_way_out_works(case: str) -> None:
    made, longest, training, rollout = CASES[case]
    text = refused(made, longest, rollout, **training)
    assert text.count("\n") > 8, "the table of all parts"
    for clause in offers(text):
        planner, new = made, {"training": dict(training), "rollout": dict(rollout)}
        for table, key, value in re.findall(r"(training|rollout)\.(\w+) = ([\w']+)", clause):
            plain = True if value == "true" else value.strip("'")
            new[table][key] = int(value) if value.isdigit() else plain
        for key in re.findall(r"rollout\.(\w+) left out", clause):
            del new["rollout"][key]
        if found := re.search(r"fit on an? ([\w-]+)", clause):
            planner = replace(made, total=GPUS[found[1].lower()].total)
        if found := re.search(r"cluster\.processes = (\d+)", clause):
            planner = replace(made, processes=int(found[1]))
        if found := re.search(r"cluster\.rollout_tp = (\d+)", clause):
            planner = replace(planner, rollout_tp=int(found[1]))
        if found := re.search(r"any setting holds are ([\d,]+)", clause):
            new["training"]["tokens_per_microbatch"] = int(found[1].replace(",", ""))
        length = min(longest, new["training"].get("tokens_per_microbatch", longest))
        if found := re.search(r"largest training\.\w+ that .* is ([\d,]+)", clause):
            new["training"]["tokens_per_microbatch"] = int(found[1].replace(",", ""))
        if found := re.search(r"largest rollout\.(\w+) that fits is ([\d,.]+)", clause):
            new["rollout"][found[1]] = float(found[2].replace(",", ""))
        settings = TrainingConfig.model_validate(new["training"])
        planner.plan(RolloutConfig.model_validate(new["rollout"]), settings, length)


@pytest.mark.exhaustive
def test_a_way_out_is_looked_for_in_few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """All settings on all numbers of GPUs took 1,300 computations, and 43 s for 70B."""
    count = 0
    real = DevicePlanner.training_bytes

    def counted(self: DevicePlanner, *given: Any) -> dict[str, int]:
        nonlocal count
        count += 1
        return real(self, *given)

    monkeypatch.setattr(DevicePlanner, "training_bytes", counted)
    for case in ("32B", "70B, adapters, eight", "8B, 24 GiB"):
        made, longest, training, rollout = CASES[case]
        count = 0
        refused(made, longest, rollout, **training)
        assert count < 200, case


def test_where_no_setting_helps_that_is_said() -> None:
    text = refused(planner(model_shape("qwen3-0.6b"), 4 * GIB), 2048)
    assert "no setting makes this model's training fit on this GPU" in text
    assert "fit on an RTX3090 (22.5 GiB)" in text
    text = refused(planner(QWEN3_8B, GPUS["h200"].total // 12, 8), 2048)
    assert "8 GPUs" in text and "take a smaller model" not in text


def test_the_largest_cache_counts_what_sequences_carry() -> None:
    """As many pages as are advised fit, and not one more."""
    hybrid = replace(planner(model_shape("qwen3.5-9b"), H200), learns=False)
    config, longest = TrainingConfig(), 4096

    def planned(pages: int) -> int:
        return hybrid.plan(RolloutConfig(kv_pages=pages), config, longest).pages

    with pytest.raises(ConfigError) as refusal:
        planned(10**6)
    found = re.search(r"rollout.kv_pages that fits is ([\d,]+) pages", str(refusal.value))
    assert found is not None
    most = int(found[1].replace(",", ""))
    assert planned(most) == most
    with pytest.raises(ConfigError):
        planned(most + 1)
