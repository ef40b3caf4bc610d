"""Plans with models that only score, against the tensors of real ones."""

from collections.abc import Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any

import pytest
import torch

from isobit.config.lora import KNOWN_TARGETS
from isobit.config.model_shape import Family
from isobit.config.precision import PrecisionConfig, Preset
from isobit.config.rollout import RolloutConfig
from isobit.config.training import Recompute, TrainingConfig
from isobit.kernels.hopper import sizes as hopper_sizes
from isobit.kernels.spec import sizes as spec_sizes
from isobit.memory.activations import FrozenModel, page_locked, saved_bytes
from isobit.memory.cache_size import RESERVE
from isobit.memory.device import DevicePlan, DevicePlanner
from isobit.memory.host import MemoryEstimate, estimate_memory
from isobit.models.config import Experts, Lora, ModelConfig
from isobit.models.decoder import decoder_shape
from isobit.models.frozen import FrozenPolicy
from isobit.models.packed_pass import PackedPass
from isobit.models.policy import random_masters, random_policy
from isobit.models.scorer import Scorer
from isobit.models.shapes import model_shape
from isobit.precision.flow import build_flow
from isobit.util.errors import ConfigError
from tests.memory import meta_memory
from tests.models.policies import delta_nets, published_tensors, small_experts, storage_bytes

GIB = 1 << 30
H200 = int(139.2 * GIB)
QWEN3_8B, SMALL = model_shape("qwen3-8b"), model_shape("qwen3-0.6b")
TIED = ModelConfig("qwen3", 256, 128, 384, 2, 4, 2, 32, 256, 1e-6, 1e4, tied_embeddings=True)
SHAPES = {
    "tied": TIED,
    "untied": replace(TIED, tied_embeddings=False),
    "qwen2": replace(TIED, family="qwen2", hidden_size=160, num_layers=3),
    "zero-centred norms": replace(TIED, family="gemma3_text"),
    "delta rules": replace(TIED, family="qwen3_5_text", **delta_nets("qwen3_5_text", 2)),
    "shared expert": replace(
        TIED,
        family="qwen3_next",
        experts=small_experts("qwen3_next", 4, 96),
        **delta_nets("qwen3_next", 2),
    ),
    "reward model": replace(TIED, score_head=True),
    "experts with biases": replace(TIED, family="gpt_oss", experts=Experts(4, 2, 96, True)),
}
PRESETS: list[Preset] = ["fp32", "bf16", "fp8-rollout", "fp8-linear", "fp8", "int8-rollout", "int8"]


def described(shape: ModelConfig, preset: Preset = "fp8", **fields: Any) -> FrozenModel:
    flow = build_flow(PrecisionConfig(preset=preset), decoder_shape(shape))
    return replace(FrozenModel("reference model", shape, flow, "reference"), **fields)


def held_bytes(frozen: FrozenPolicy) -> int:
    return storage_bytes(published_tensors(frozen, ["training"]))


@pytest.mark.few(20)
@pytest.mark.parametrize("shape", list(SHAPES))
@pytest.mark.parametrize("preset", PRESETS)
def test_planned_bytes_are_those_of_the_tensors(preset: Preset, shape: str) -> None:
    config, model = SHAPES[shape], described(SHAPES[shape], preset)
    precision = PrecisionConfig(preset=preset)
    frozen = FrozenPolicy.publish(config, precision, random_masters(config, 0))
    assert model.weight_bytes(spec_sizes) == held_bytes(frozen) == frozen.num_bytes
    saved = sum(tensor.nbytes for tensor in frozen.tensors().values())
    assert model.checkpoint_bytes(spec_sizes) == saved


@pytest.mark.few(3)
@pytest.mark.parametrize("preset", ["bf16", "fp8", "int8", "fp8-rollout"])
@pytest.mark.parametrize("shape", ["qwen3-8b", "qwen3-0.6b", "qwen2.5-7b"])
def test_bytes_on_a_gpu_are_exact_and_what_scoring_takes_is_near(
    shape: str, preset: Preset, monkeypatch: pytest.MonkeyPatch
) -> None:
    meta_memory.without_launches(monkeypatch)
    config = replace(model_shape(shape), num_layers=4)
    model = described(config, preset)
    masters = (
        (name, torch.empty_like(master))
        for name, master in meta_memory.meta_policy(
            config, PrecisionConfig(preset="fp8")
        ).masters.items()
    )
    precision = PrecisionConfig(preset=preset)
    frozen = FrozenPolicy.publish(config, precision, masters, meta_memory.META)
    assert model.weight_bytes(hopper_sizes) == held_bytes(frozen) == frozen.num_bytes
    for lengths in ((4096,), (16384,), (2048,) * 8):
        tokens = sum(lengths)
        with meta_memory.LiveBytes() as live:
            Scorer(frozen).score(meta_memory.meta_batch(lengths))
        planned = model.scoring_bytes(hopper_sizes, tokens, max(lengths))
        assert -0.001 < planned / live.peak - 1 < 0.04


def estimate(*frozen: FrozenModel) -> MemoryEstimate:
    flow = build_flow(PrecisionConfig(preset="fp8"), decoder_shape(TIED))
    return estimate_memory(TIED, flow, RolloutConfig(), TrainingConfig(), 64, spec_sizes, frozen)


def test_main_memory_holds_them_beside_the_rest() -> None:
    judge = described(SHAPES["untied"], "bf16", name="reward models", table="reward")
    reference, rewards = described(TIED), [judge, judge]
    plain, with_them = estimate(), estimate(reference, *rewards)
    first, second = reference.weight_bytes(spec_sizes), judge.weight_bytes(spec_sizes)
    assert with_them.size("reference model") == first
    assert with_them.size("reward models") == 2 * second
    assert with_them.total == plain.total + first + 2 * second
    assert estimate(reference.with_offload()).total == plain.total + first, "it is main memory"


def test_a_warning_about_a_large_reward_model_names_who_sets_it() -> None:
    judge = described(SMALL, name="reward models", table="reward")
    warning = estimate(judge).warning(1)
    assert warning is not None
    assert "reward models is the largest item" in warning
    assert "and reward.model sets it; the largest that another key lowers is GEMM" in warning


def planner(*frozen: FrozenModel, total: int = H200) -> DevicePlanner:
    flow = build_flow(PrecisionConfig(preset="fp8"), decoder_shape(QWEN3_8B))
    return DevicePlanner(QWEN3_8B, flow, hopper_sizes, total, frozen)


def plan(*frozen: FrozenModel, total: int = H200, **training: Any) -> DevicePlan:
    settings = TrainingConfig.model_validate({"moments": "bf16", **training})
    return planner(*frozen, total=total).plan(RolloutConfig(), settings, 4096)


def test_a_reference_on_the_device_is_there_in_both_phases() -> None:
    reference = described(QWEN3_8B)
    size = reference.weight_bytes(hopper_sizes)
    assert size == pytest.approx(8.8 * GIB, rel=0.01)
    without, made = plan(), plan(reference)
    assert made.training == {**without.training, "reference model": size}
    assert made.rollout["reference model"] == size
    fewer = without.rollout["KV pages"] - made.rollout["KV pages"]
    assert abs(fewer - size) < hopper_sizes.page_bytes(QWEN3_8B, planner().flow), "whole pages"
    assert not made.host


def test_an_offloaded_reference_costs_nothing_but_main_memory() -> None:
    """It is gone when gradients and activations come, which take more than it does."""
    reference = described(QWEN3_8B).with_offload()
    without, made = plan(), plan(reference, offload_moments=True)
    assert made.training == without.training and "reference model" not in made.rollout
    assert made.host == {"reference model": 16 * GIB, "optimiser moments": 32 * GIB}
    lines = made.describe()
    assert "  16 GiB of main memory hold the reference model except while they score" in lines
    assert "  32 GiB of main memory hold the optimiser moments during rollout" in lines


def test_a_model_that_is_larger_than_the_backward_decides_while_it_scores() -> None:
    judge = described(model_shape("qwen3-32b"), "bf16", name="reward models", table="reward")
    small = DevicePlanner(SMALL, described(SMALL).flow, hopper_sizes, H200, (judge.with_offload(),))
    made = small.plan(RolloutConfig(), TrainingConfig(), 2048)
    passing = judge.scoring_bytes(hopper_sizes, made.tokens, 2048)
    assert made.training == {
        **small.weight_bytes(TrainingConfig()),
        "reward models": judge.weight_bytes(hopper_sizes),
        "a forward that scores": passing,
    }
    assert sum(made.training.values()) > sum(
        replace(small, frozen=()).training_bytes(TrainingConfig(), made.tokens, 2048).values()
    )


def test_two_offloaded_models_score_one_after_the_other() -> None:
    two: list[tuple[Preset, str]] = [("fp8", "one"), ("bf16", "other")]
    one, other = (
        described(QWEN3_8B, preset, name=name, table=name, offload=True) for preset, name in two
    )
    made = DevicePlanner(SMALL, described(SMALL).flow, hopper_sizes, H200, (one, other)).plan(
        None, TrainingConfig(), 2048
    )
    assert "other" in made.training and "one" not in made.training and not made.rollout
    sizes = {model.name: page_locked(model.weight_bytes(hopper_sizes)) for model in (one, other)}
    assert made.host == sizes


def test_a_shadow_is_there_only_while_it_scores() -> None:
    shadow = described(QWEN3_8B, "bf16", name="BF16 shadow", table="algorithm", lasting=False)
    without, made = plan(), plan(shadow)
    assert (made.rollout, made.training, made.host) == (without.rollout, without.training, {})
    moments = planner(shadow)._scoring(shadow, TrainingConfig(), 8192, 4096)
    assert moments["BF16 shadow"] == shadow.weight_bytes(hopper_sizes)
    small = DevicePlanner(SMALL, described(SMALL).flow, hopper_sizes, H200, (shadow,))
    largest = small.plan(RolloutConfig(), TrainingConfig(), 2048)
    assert largest.training["BF16 shadow"] == shadow.weight_bytes(hopper_sizes)
    assert "BF16 shadow" not in largest.rollout
    assert shadow.with_offload() == shadow, "it has nowhere to go to"


def test_main_memory_counts_a_shadow_among_what_passes() -> None:
    shadow = described(TIED, "bf16", name="BF16 shadow", table="algorithm", lasting=False)
    largest = max(item.size for item in estimate().items if item.passing)
    more = max(0, shadow.weight_bytes(spec_sizes) - largest)
    assert estimate(shadow).total == estimate().total + more
    assert estimate(shadow).size("BF16 shadow") == shadow.weight_bytes(spec_sizes)


def refusal(frozen: Sequence[FrozenModel], total: int, **training: Any) -> str:
    with pytest.raises(ConfigError) as error:
        plan(*frozen, total=total, **training)
    return str(error.value)


def test_a_plan_that_fails_for_the_reference_says_to_offload_it() -> None:
    reference = described(QWEN3_8B)
    needed = plan(tokens_per_microbatch=7168).peaks["training"] + RESERVE
    plan(reference.with_offload(), total=needed, tokens_per_microbatch=7168)
    said = refusal([reference], needed, tokens_per_microbatch=7168)
    assert "7,168 fit with reference.offload = true" in said
    smallest = plan(moments="fp8", recompute="mlp").peaks["training"] + RESERVE
    both = "4,096 fit with reference.offload = true and training.recompute = 'mlp'"
    assert both in refusal([reference], smallest, moments="fp8")
    shadow = described(QWEN3_8B, "bf16", name="BF16 shadow", table="algorithm", lasting=False)
    assert "offload" not in refusal([shadow], smallest, moments="fp8")


def test_a_cache_that_fails_says_so_too() -> None:
    reference = described(QWEN3_8B)
    settings = TrainingConfig(moments="bf16", recompute="full")
    rollout = RolloutConfig(kv_memory_gib=60)
    planner().plan(rollout, settings, 4096)
    with pytest.raises(ConfigError, match=r"it fits with reference\.offload = true(;|\n)"):
        planner(reference).plan(rollout, settings, 4096)
    planner(reference.with_offload()).plan(rollout, settings, 4096)


@pytest.mark.few(3)
@pytest.mark.parametrize("recompute", ["none", "mlp", "full"])
@pytest.mark.parametrize("preset", ["bf16", "fp8", "int8"])
@pytest.mark.parametrize("family", ["qwen3", "olmo3", "gemma3_text"])
def test_what_a_pass_saves_is_planned_wherever_its_norms_are(
    family: Family, preset: Preset, recompute: Recompute
) -> None:
    """To the byte; 384 tokens are whole groups."""
    assert planned_beyond_saved(replace(TIED, family=family), preset, recompute) == 0


@pytest.mark.few(3)
@pytest.mark.parametrize("recompute", ["none", "mlp", "full"])
@pytest.mark.parametrize("preset", ["bf16", "fp8", "int8"])
@pytest.mark.parametrize(
    "targets", [KNOWN_TARGETS, ("out_proj",), ("in_proj_b", "in_proj_a"), ("in_proj_z", "q_proj")]
)
def test_so_is_what_adapters_of_delta_nets_save(
    targets: tuple[str, ...], preset: Preset, recompute: Recompute
) -> None:
    """But for a state: one is planned for each chunk, and the first has none in front of it."""
    shape = SHAPES["delta rules"]
    config, rule = replace(shape, lora=Lora(8, 16.0, targets).within(shape)), shape.delta
    assert rule is not None
    state = 4 * rule.value_heads * rule.key_dim * rule.value_dim
    wanted = 0 if recompute == "full" else state
    assert planned_beyond_saved(config, preset, recompute) == wanted


def planned_beyond_saved(shape: ModelConfig, preset: Preset, recompute: Recompute) -> int:
    """How many bytes more are planned than a pass of 384 tokens saves."""
    config, tokens = replace(shape, max_positions=384), 384
    policy, ids = random_policy(config, preset, 0), torch.arange(tokens) % config.vocab_size
    made = PackedPass(policy, ids, torch.arange(tokens), (tokens,), recompute)
    made.forward()
    planned = saved_bytes(config, policy.flow, spec_sizes, recompute, tokens)
    return planned - storage_bytes(tensors_in(made._saved))


def tensors_in(saved: Any) -> list[torch.Tensor]:
    """Of records and lists within each other."""
    if isinstance(saved, torch.Tensor):
        return [saved]
    if is_dataclass(saved):
        return [one for field in fields(saved) for one in tensors_in(getattr(saved, field.name))]
    return (
        [one for part in saved for one in tensors_in(part)] if type(saved) in (list, tuple) else []
    )
