"""The estimate against the tensors that it estimates."""

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import get_args

import pytest
import torch
from isobit.models.head import token_log_probs

from isobit.config.precision import PrecisionConfig, Preset
from isobit.config.rollout import RolloutConfig
from isobit.config.training import Moments, TrainingConfig
from isobit.kernels.spec import packed_attention
from isobit.kernels.spec import token_log_probs as token_log_probs_kernel
from isobit.kernels.spec.heads import Heads
from isobit.kernels.spec.kv_cache import KvCache
from isobit.kernels.spec.packed_attention import PackedAttention
from isobit.memory import host as memory
from isobit.memory.cache_size import num_pages_for
from isobit.memory.host import MemoryEstimate, activation_bytes, estimate_memory, published_bytes
from isobit.models.config import ModelConfig
from isobit.models.decoder import hidden_states
from isobit.models.policy import Policy, random_policy
from isobit.precision.flow import build_flow
from isobit.precision.quant_tensor import QuantTensor
from isobit.rollout.native.runner import PolicyRunner
from isobit.training.trainer import Trainer

QWEN3 = ModelConfig("qwen3", 256, 128, 384, 2, 4, 2, 32, 256, 1e-6, 1e4, True)
QWEN2 = replace(
    QWEN3, family="qwen2", tied_embeddings=False, hidden_size=160, num_layers=3
)  # no linear but down_proj's output fits blocks
PRESETS: list[Preset] = ["fp32", "bf16", "fp8-rollout", "fp8-linear", "fp8"]


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the distinct storages behind the tensors."""
    return sum(
        {
            tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
            for tensor in tensors
        }.values()
    )


def published_tensors(policy: Policy) -> list[torch.Tensor]:
    tensors = [policy.rope.cos, policy.rope.sin]
    for side in ("rollout", "training"):
        weights = policy.weights(side)
        tensors += weights.plain.values()
        for linear in weights.linears.values():
            matrix = linear.matrix
            tensors += (
                [matrix.values, matrix.scales] if isinstance(matrix, QuantTensor) else [matrix]
            )
            tensors += [linear.bias] if linear.bias is not None else []
    return tensors


@pytest.mark.parametrize("shape", [QWEN3, QWEN2], ids=["qwen3", "qwen2"])
@pytest.mark.parametrize("preset", PRESETS)
def test_published_weights_and_pages_are_exact(shape: ModelConfig, preset: Preset) -> None:
    policy = random_policy(shape, PrecisionConfig(preset=preset, first_layers_bf16=1), seed=0)
    assert published_bytes(shape, policy.flow) == storage_bytes(published_tensors(policy))
    rollout = RolloutConfig(max_sequences=3)
    estimate = estimate_memory(shape, policy.flow, rollout, TrainingConfig(), 64)
    cache = PolicyRunner(policy, num_pages_for(shape, policy.flow, rollout))._cache
    assert isinstance(cache, KvCache)
    assert estimate.size("KV pages") == storage_bytes(
        tensor for layer in cache.layers for tensor in (layer.values, layer.bytes)
    )


@pytest.mark.parametrize("moments", get_args(Moments))
def test_masters_gradients_and_moments_are_exact(moments: Moments) -> None:
    """Norms of 32 numbers have groups of scales that are not full."""
    policy = random_policy(QWEN3, PrecisionConfig(), seed=0)
    training = TrainingConfig(moments=moments)
    trainer = Trainer(policy, training, total_updates=1)
    for master in policy.parameters():
        master.grad = torch.ones_like(master)
    trainer._step(1.0, 1e-3)
    estimate = estimate_memory(QWEN3, policy.flow, RolloutConfig(), training, 64)
    assert estimate.size("masters") == storage_bytes(policy.parameters())
    assert estimate.size("gradients") == storage_bytes(
        master.grad for master in policy.parameters() if master.grad is not None
    )
    held = [tensor for name, tensor in trainer.moments().items() if not name.endswith(".step")]
    assert estimate.size("optimiser moments") == storage_bytes(held)


@pytest.mark.parametrize("shape", [QWEN3, QWEN2], ids=["qwen3", "qwen2"])
@pytest.mark.parametrize("preset", ["fp32", "bf16", "fp8"])
def test_activations_are_what_the_forward_keeps(
    shape: ModelConfig, preset: Preset, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that autograd saves and the attention's encoded heads, within 5%; what lives on anyway
    (weights, masters) apart.
    """
    policy = random_policy(shape, PrecisionConfig(preset=preset), seed=0)
    kept: list[torch.Tensor] = []
    encode = Heads.encode

    class KeptHeads(Heads):
        @classmethod
        def encode(cls, x, format):
            heads = encode(x, format)
            kept.extend((heads.values, heads.bytes))
            return heads

    monkeypatch.setattr(packed_attention, "Heads", KeptHeads)
    lengths = (96,) * 8
    ids = torch.randint(0, shape.vocab_size, (sum(lengths),))
    positions = torch.arange(lengths[0]).repeat(len(lengths))
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor
    ):
        hidden = hidden_states(
            policy, "training", ids, positions, PackedAttention(policy.flow, lengths)
        )
        token_log_probs(policy, "training", hidden, ids, torch.ones(len(ids)))
    rows = policy.rope.rows(positions)
    standing = {
        tensor.untyped_storage().data_ptr()
        for tensor in (*published_tensors(policy), *policy.parameters())
    }
    live = [
        tensor
        for tensor in (*kept, rows.cos, rows.sin)
        if tensor.untyped_storage().data_ptr() not in standing
    ]
    log_sum_exps = 4 * shape.num_layers * shape.num_heads * len(ids)
    measured = storage_bytes(live) + log_sum_exps
    assert math.isclose(activation_bytes(shape, policy.flow, len(ids)), measured, rel_tol=0.05)


def estimate(**rollout: float) -> MemoryEstimate:
    flow = build_flow(PrecisionConfig(), QWEN3.shape)
    return estimate_memory(QWEN3, flow, RolloutConfig.model_validate(rollout), TrainingConfig(), 64)


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
    parts = estimate_memory(
        large, build_flow(PrecisionConfig(), large.shape), RolloutConfig(), TrainingConfig(), 512
    )
    warning = parts.warning(1 << 30)
    assert warning is not None
    assert (
        "optimiser moments is the largest item" in warning
        and "training.tokens_per_microbatch" in warning
    )


def test_a_longer_sequence_than_the_budget_is_a_micro_batch_of_its_own() -> None:
    flow = build_flow(PrecisionConfig(), QWEN3.shape)
    training = TrainingConfig(tokens_per_microbatch=100)
    parts = [
        estimate_memory(QWEN3, flow, RolloutConfig(), training, longest).size("activations")
        for longest in (50, 100, 200)
    ]
    assert parts[0] == parts[1] == parts[2] / 2


def test_the_sizes_of_chunks_are_the_kernels_own() -> None:
    assert memory._LOGITS_CHUNK == token_log_probs_kernel._CHUNK
    assert (memory._QUERY_BLOCK, memory._GROUP_TOKENS) == (
        packed_attention._QUERY_BLOCK,
        packed_attention._GROUP_TOKENS,
    )
