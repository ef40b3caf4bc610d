"""A policy cut for 2 and 4 ranks has the bits of the whole one; a sum across ranks has not."""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache

import pytest
import torch

from isobit.config.precision import PrecisionConfig, Preset
from isobit.kernels.operands import LinearInput, PagedBatch
from isobit.memory.cache_size import CacheSize
from isobit.models.config import Experts, ModelConfig
from isobit.models.function import SampledPolicy
from isobit.models.layers import Linear
from isobit.models.policy import Policy, random_masters
from isobit.models.policy_share import PolicyShare
from isobit.models.tensor_parallel import TensorParallel
from isobit.parallel.world import Alone, World
from isobit.precision.quant_tensor import QuantTensor
from isobit.rollout.runner import empty_cache, rollout_states
from isobit.util.errors import ConfigError
from tests.ranks import in_ranks

EXACT: tuple[Preset, ...] = ("fp8", "fp8-linear", "int8", "int8-linear", "bf16", "fp32")
SMALL = ModelConfig("qwen3", 700, 384, 640, 2, 8, 4, 64, 256, 1e-6, 1e4, tied_embeddings=False)
"""For 2 ranks and 4 the shares of hidden size, width and vocabulary are unequal."""
TIED = replace(SMALL, family="qwen2", tied_embeddings=True, num_heads=12, num_kv_heads=4)
"""Biases of Q, K and V, and rows of Q that begin within a block for 4 ranks."""
NARROW = replace(SMALL, num_heads=4, num_kv_heads=4, head_dim=32, hidden_size=256)
"""A share of heads is no whole group of 128."""

BEYOND = replace(SMALL, tokenizer_size=555)
"""Rows beyond the tokenizer, whose last block of tokens is a short one."""
FUSED = replace(TIED, family="phi3", partial_rotary_factor=0.75)
"""The same in one matrix, of heads that are turned in part."""


def masters(config: ModelConfig) -> Iterator[tuple[str, torch.Tensor]]:
    """Sharper than fresh ones, with biases, so that everything matters."""
    for name, values in random_masters(config, seed=3):
        if name.endswith("bias"):
            values.copy_(torch.linspace(-2, 2, len(values)))
        elif values.ndim == 2:
            values.mul_(6)
        yield name, values


@cache
def whole(config: ModelConfig, preset: Preset) -> Policy:
    return Policy(config, PrecisionConfig(preset=preset), masters(config), trainable=False)


def share(config: ModelConfig, preset: Preset, world: World) -> PolicyShare:
    return PolicyShare(config, PrecisionConfig(preset=preset), masters(config), world)


@torch.no_grad()
def forward(policy: SampledPolicy) -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden states and logits of two prompts, the second in a page of its own."""
    counts = (70, 13)
    cache, device = empty_cache(policy, CacheSize(3)), policy.backend
    assert cache.page_tokens == 64
    token_ids = torch.arange(83) * 37 % policy.config.vocab_size
    positions = torch.cat([torch.arange(n) for n in counts])
    slots = torch.cat([torch.arange(70), 128 + torch.arange(13)])
    batch = PagedBatch(counts, counts, torch.tensor([[0, 1], [2, 2]]), slots)
    attend = device.paged_attention(cache, batch, positions)
    hidden = rollout_states(policy, token_ids, attend).hidden
    return hidden, policy.decoder.lm_head.logits(policy.weights("rollout"), hidden)


@pytest.mark.few(1)
@pytest.mark.parametrize("preset", EXACT)
@pytest.mark.parametrize(
    ("config", "ranks"),
    [
        (SMALL, 2),
        (SMALL, 4),
        (TIED, 4),
        (FUSED, 4),
        (NARROW, 2),
        (NARROW, 4),
        (BEYOND, 2),
        (BEYOND, 4),
    ],
)
def test_every_rank_has_the_bits_of_the_whole(config: ModelConfig, ranks: int, preset: Preset):
    hidden, logits = forward(whole(config, preset))
    for mine in in_ranks(ranks, lambda world: forward(share(config, preset, world))):
        assert torch.equal(mine[0], hidden)
        assert torch.equal(mine[1], logits)


@pytest.mark.few(1)
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_head_in_int8_is_shared_by_its_rows(ranks: int):
    precision = PrecisionConfig(preset="int8", head="int8")
    total = Policy(BEYOND, precision, masters(BEYOND), trainable=False)
    hidden, logits = forward(total)

    def forward_of(world: World) -> tuple[torch.Tensor, ...]:
        made = PolicyShare(BEYOND, precision, masters(BEYOND), world)
        int8 = made.weights("rollout").lm_head.int8
        assert int8 is not None
        return *forward(made), int8.values

    found = in_ranks(ranks, forward_of)
    for mine in found:
        assert torch.equal(mine[0], hidden) and torch.equal(mine[1], logits)
    int8 = total.weights("rollout").lm_head.int8
    assert int8 is not None
    held = torch.cat([values for _, _, values in found])
    assert torch.equal(held, int8.values[: len(held)]) and len(held) >= BEYOND.num_drawn


def test_one_rank_has_everything():
    made = share(SMALL, "fp8", Alone())
    for mine, expected in zip(forward(made), forward(whole(SMALL, "fp8")), strict=True):
        assert torch.equal(mine, expected)


def row_parallel(self: Linear, weights, x: LinearInput, cuts) -> torch.Tensor:
    """The mutant: a rank multiplies its columns of the input with its columns of the matrix, and
    the products are added in FP32, as an all-reduce does it.
    """
    cut = weights.tensor_parallel
    if cut.size == 1:
        return self.forward(weights, x)
    whole_input = cut.input(weights.backend, x, cuts).read
    mine = cut.mine(cuts)
    rows = cut.columns(weights.backend.linear(whole_input, weights.linears[self.path]), cut.hidden)
    weight = weights.linears[self.path].matrix
    stacked = cut.columns(weight.t().contiguous(), cut.hidden).t()
    products = cut.world.all_gather_stack(
        whole_input[:, mine].float() @ stacked[:, mine].float().t()
    )
    return products.sum(0).to(rows.dtype)


def test_a_sum_across_ranks_has_others(monkeypatch: pytest.MonkeyPatch):
    hidden, logits = forward(whole(SMALL, "bf16"))
    monkeypatch.setattr(Linear, "joined", row_parallel)
    mutant = in_ranks(2, lambda world: forward(share(SMALL, "bf16", world)))[0]
    assert torch.allclose(mutant[0].float(), hidden.float(), atol=0.5)
    assert (mutant[0] != hidden).float().mean() > 0.05
    assert (mutant[1] != logits).float().mean() > 0.05


def test_a_rank_holds_its_share_alone():
    made = in_ranks(4, lambda world: share(SMALL, "fp8", world))
    total = whole(SMALL, "fp8").weights("rollout")
    for path, linear in total.linears.items():
        assert isinstance(linear.matrix, QuantTensor)
        parts = [one.weights("rollout").linears[path].matrix for one in made]
        numbers = [part.values.numel() for part in parts if isinstance(part, QuantTensor)]
        assert sum(numbers) == linear.matrix.values.numel()
    tables = [one.weights("rollout").lm_head.table for one in made]
    assert torch.equal(torch.cat(tables), total.lm_head.table)
    assert all("lm_head.weight" not in one.weights("rollout").plain for one in made)


@pytest.mark.parametrize(
    ("config", "ranks", "names"),
    [
        (replace(SMALL, family="olmo2"), 2, "norms of Q and K of a olmo2 model are over all heads"),
        (SMALL, 3, "4 KV heads are not shared evenly by so many ranks; take 1, 2, 4"),
        (replace(SMALL, intermediate_size=128), 2, "intermediate_size is 128"),
        (replace(SMALL, family="qwen3_moe", experts=Experts(4, 2, 64, True)), 2, "4 experts"),
    ],
)
def test_what_cannot_be_cut_is_named(config: ModelConfig, ranks: int, names: str):
    world = Alone()
    world.rank, world.size = 0, ranks
    with pytest.raises(ConfigError, match=names):
        TensorParallel.of(config, world)
