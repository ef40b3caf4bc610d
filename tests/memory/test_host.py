"""The estimate against the tensors that it estimates."""

import gc
import math
from dataclasses import replace
from typing import get_args

import pytest
import torch

from isobit.config.lora import KNOWN_TARGETS, LORA_TARGETS
from isobit.config.precision import PrecisionConfig, Preset
from isobit.config.rollout import RolloutConfig
from isobit.config.training import Moments, Recompute, TrainingConfig
from isobit.kernels.spec import sizes
from isobit.kernels.spec.paged_attention import SpecKvCache
from isobit.memory import host as memory
from isobit.memory.activations import published_bytes
from isobit.memory.cache_size import cache_size_for
from isobit.memory.host import MemoryEstimate, estimate_memory
from isobit.models.config import Experts, Lora, ModelConfig
from isobit.models.decoder import decoder_shape
from isobit.models.policy import Policy, random_policy
from isobit.models.published import SIDES
from isobit.models.scorer import ScoredPass
from isobit.precision.flow import build_flow
from isobit.rollout.runner import PolicyRunner
from isobit.training.trainer import Trainer
from tests.memory.meta_memory import LiveBytes
from tests.models.policies import delta_nets, published_tensors, storage_bytes, whole_batch

QWEN3 = ModelConfig("qwen3", 256, 128, 384, 2, 4, 2, 32, 256, 1e-6, 1e4, True)
QWEN2 = replace(
    QWEN3, family="qwen2", tied_embeddings=False, hidden_size=160, num_layers=3
)  # no linear but down_proj's output fits blocks
VALUES, REWARD = replace(QWEN3, value_head=True), replace(QWEN2, score_head=True)
ADAPTED = replace(QWEN3, lora=Lora(8, 16.0, LORA_TARGETS))
HYBRID = replace(QWEN3, family="qwen3_5_text", **delta_nets("qwen3_5_text", 2))
HYBRID = replace(HYBRID, lora=Lora(8, 16.0, KNOWN_TARGETS).within(HYBRID))
SHAPES = ["qwen3", "qwen2", "value head", "reward model", "adapters", "adapters of delta nets"]
PRESETS: list[Preset] = ["fp32", "bf16", "fp8-rollout", "fp8-linear", "fp8", "int8-rollout", "int8"]


@pytest.mark.few(16)
@pytest.mark.parametrize("shape", [QWEN3, QWEN2, VALUES, REWARD, ADAPTED, HYBRID], ids=SHAPES)
@pytest.mark.parametrize("preset", PRESETS)
def test_published_weights_and_pages_are_exact(shape: ModelConfig, preset: Preset) -> None:
    policy = random_policy(shape, PrecisionConfig(preset=preset, first_layers_bf16=1), seed=0)
    held = published_tensors(policy, SIDES)
    bytes_planned = published_bytes(shape, policy.flow, sizes)  # pyright: ignore[reportArgumentType] (a module is hashable)
    assert bytes_planned == storage_bytes(held)
    rollout = RolloutConfig(max_sequences=3)
    estimate = estimate_memory(shape, policy.flow, rollout, TrainingConfig(), 64, sizes)
    cache = PolicyRunner(policy, cache_size_for(shape, policy.flow, rollout, sizes))._cache
    assert isinstance(cache, SpecKvCache)
    assert estimate.size("KV pages") == storage_bytes(
        tensor for layer in cache.layers.values() for tensor in (layer.values, layer.scales)
    )


@pytest.mark.parametrize("preset", ["bf16", "int8"])
def test_states_of_delta_nets_and_pages_of_the_other_layers_are_exact(preset: Preset) -> None:
    shape = replace(QWEN3, family="qwen3_5_text", num_layers=3, **delta_nets("qwen3_5_text", 3))
    policy = random_policy(shape, PrecisionConfig(preset=preset), seed=0)
    rollout = RolloutConfig(max_sequences=3)
    parts = estimate_memory(shape, policy.flow, rollout, TrainingConfig(), 64, sizes)
    cache = PolicyRunner(policy, cache_size_for(shape, policy.flow, rollout, sizes))._cache
    assert isinstance(cache, SpecKvCache)
    pages = storage_bytes(
        x for layer in cache.layers.values() for x in (layer.values, layer.scales)
    )
    carried = sum(x.nbytes for carries in cache.delta.values() for x in carries.tensors)
    assert len(cache.layers) == 1 and cache.delta[0].states.shape[0] == 5
    assert parts.size("states of delta nets") == carried > 0
    assert parts.size("KV pages") == pages


@pytest.mark.parametrize("shape", [QWEN3, ADAPTED, HYBRID], ids=["all weights", *SHAPES[4:]])
@pytest.mark.parametrize("moments", get_args(Moments))
def test_masters_gradients_and_moments_are_exact(moments: Moments, shape: ModelConfig) -> None:
    """Norms of 32 numbers have groups of scales that are not full."""
    policy = random_policy(shape, PrecisionConfig(preset="fp8"), seed=0)
    training = TrainingConfig(moments=moments)
    trainer = Trainer(policy, training, total_updates=1)
    for master in policy.parameters():
        master.grad = torch.ones_like(master)
    trainer._step(1.0, 1e-3)
    estimate = estimate_memory(shape, policy.flow, RolloutConfig(), training, 64, sizes)
    assert estimate.size("masters") == storage_bytes(policy.parameters())
    assert estimate.size("gradients") == storage_bytes(
        master.grad for master in policy.parameters() if master.grad is not None
    )
    held = [tensor for name, tensor in trainer.moments().items() if not name.endswith(".step")]
    assert estimate.size("optimiser moments") == storage_bytes(held)


def pass_bytes(policy: Policy, tokens: int, length: int, recompute: Recompute) -> tuple[int, int]:
    """What a forward keeps, and what forward and backward take at most, beside weights, gradients
    and the batch; every token is a target.
    """
    ids = torch.randint(0, policy.config.vocab_size, (tokens,))
    batch = whole_batch(ids, (length,) * (tokens // length))
    for master in policy.parameters():
        master.grad = torch.zeros_like(master)
    ScoredPass(policy, batch, recompute).forward()  # makes the constants that kernels keep
    with LiveBytes() as live:
        scored = ScoredPass(policy, batch, recompute)
        scores = scored.forward()
        gc.collect()  # what cycles alone hold is not kept, whenever Python would find it
        kept = live.now
        d_values = None if scores.values is None else torch.ones_like(scores.values)
        d_log_probs = None if policy.decoder.head is None else torch.ones_like(scores.log_probs)
        scored.backward(d_log_probs, d_values=d_values)
    return kept, live.peak


@pytest.mark.few(1)
@pytest.mark.parametrize("recompute", get_args(Recompute))
@pytest.mark.parametrize("shape", [QWEN3, QWEN2, VALUES, REWARD, ADAPTED, HYBRID], ids=SHAPES)
@pytest.mark.parametrize("preset", ["fp32", "bf16", "fp8", "int8"])
def test_activations_are_what_the_forward_keeps(
    shape: ModelConfig, preset: Preset, recompute: Recompute
) -> None:
    """Within 5%: all real tensors that are alive when the loss is there."""
    policy, tokens = random_policy(shape, PrecisionConfig(preset=preset), seed=0), 96 * 8
    kept, peak = pass_bytes(policy, tokens, 96, recompute)
    training = TrainingConfig(
        tokens_per_microbatch=tokens, recompute=recompute, prompts_per_step=64
    )
    parts = estimate_memory(
        shape, policy.flow, RolloutConfig(max_batched_tokens=1), training, 96, sizes
    )
    assert math.isclose(parts.size("activations"), kept, rel_tol=0.05)
    assert peak - kept < max(item.size for item in parts.items if item.passing)


@pytest.mark.few(1)
@pytest.mark.parametrize("recompute", ["none", "mlp"])
@pytest.mark.parametrize("lora", [None, Lora(96, 16.0, (*LORA_TARGETS[4:], "shared_expert_gate"))])
@pytest.mark.parametrize("preset", ["fp32", "bf16", "fp8", "int8"])
def test_a_shared_expert_is_counted(
    preset: Preset, lora: Lora | None, recompute: Recompute
) -> None:
    """Within 2%, where it is most of what is kept."""
    experts = Experts(4, 1, 16, True, shared_size=700)
    shape = replace(QWEN3, family="qwen3_next", experts=experts, **delta_nets("qwen3_next", 2))
    shape = replace(shape, lora=lora)
    policy, tokens = random_policy(shape, PrecisionConfig(preset=preset), seed=0), 96 * 8
    training = TrainingConfig(
        tokens_per_microbatch=tokens, recompute=recompute, prompts_per_step=64
    )
    rollout = RolloutConfig(max_batched_tokens=1)
    parts = estimate_memory(shape, policy.flow, rollout, training, 96, sizes)
    kept, peak = pass_bytes(policy, tokens, 96, recompute)
    assert math.isclose(parts.size("activations"), kept, rel_tol=0.02)
    assert peak - kept < max(item.size for item in parts.items if item.passing)


def estimate(**rollout: float) -> MemoryEstimate:
    flow = build_flow(PrecisionConfig(preset="fp8"), decoder_shape(QWEN3))
    return estimate_memory(
        QWEN3, flow, RolloutConfig.model_validate(rollout), TrainingConfig(), 64, sizes
    )


def test_the_total_counts_one_workspace() -> None:
    parts = estimate()
    passing = [item.size for item in parts.items if item.passing]
    assert parts.total == sum(item.size for item in parts.items) - sum(passing) + max(passing)


def test_a_warning_names_the_largest_item_and_its_key() -> None:
    parts = estimate(kv_pages=10_000)
    needed = math.ceil(memory.MARGIN * parts.total)
    assert parts.warning(needed) is None
    warning = parts.warning(needed - 1)
    assert warning is not None
    assert "KV pages is the largest item" in warning and "lower rollout.kv_pages" in warning


def test_a_warning_about_the_model_itself_names_another_key_too() -> None:
    large = replace(
        QWEN3, hidden_size=4096, intermediate_size=12288, num_layers=32, vocab_size=150_000
    )
    flow = build_flow(PrecisionConfig(preset="fp8"), decoder_shape(large))
    training = TrainingConfig(moments="fp8")
    parts = estimate_memory(large, flow, RolloutConfig(), training, 512, sizes)
    warning = parts.warning(1 << 30)
    assert warning is not None and "masters is the largest item" in warning
    assert "lower training.tokens_per_microbatch" in warning


def test_a_warning_about_the_moments_names_the_key_of_their_format_and_the_margin() -> None:
    """Seen before: "optimiser moments is the largest item, and model sets it"."""
    large = replace(QWEN3, hidden_size=4096, intermediate_size=12288, num_layers=32)
    flow = build_flow(PrecisionConfig(preset="fp8"), decoder_shape(large))
    parts = estimate_memory(large, flow, RolloutConfig(), TrainingConfig(), 512, sizes)
    warning = parts.warning(1 << 30)
    assert warning is not None and "optimiser moments is the largest item" in warning
    assert 'set training.moments to "bf16" or "fp8"' in warning and "model" not in warning
    assert "GiB planned, times 1.2" in warning


def test_a_longer_sequence_than_the_budget_is_a_micro_batch_of_its_own() -> None:
    flow = build_flow(PrecisionConfig(preset="fp8"), decoder_shape(QWEN3))
    training = TrainingConfig(tokens_per_microbatch=100)
    parts = [
        estimate_memory(QWEN3, flow, RolloutConfig(), training, longest, sizes).size("activations")
        for longest in (50, 100, 200)
    ]
    assert parts[0] == parts[1] == parts[2] / 2
