"""Faults planted in the arithmetic and in the bookkeeping of the ``fp8`` flow, many of a single
unit in the last place of an FP32 number: ``isobit verify`` sees each, ``--bisect`` names it.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from isobit.config.precision import PrecisionConfig
from isobit.kernels.operands import RopeTable
from isobit.kernels.spec import attention, head, linear, paged_attention, pointwise, qkv, quantise
from isobit.kernels.spec.paged_attention import SpecKvCache
from isobit.memory.cache_size import PageAllocator
from isobit.models.config import ModelConfig
from isobit.models.policy import Policy, random_policy
from isobit.precision.quant_tensor import QuantTensor
from isobit.proof import verify
from isobit.proof.bisect import bisect_policy, describe_bisect
from isobit.proof.verify import VerifyOptions
from isobit.rollout import executor
from isobit.rollout.runner import ForwardBatch
from isobit.rollout.scheduler import Plan
from isobit.rollout.sequence import Sample
from tests.proof.faults import TorchWith, later_chunks_one_position_off

Patch = pytest.MonkeyPatch
InRollout = Callable[[], bool]
Fault = Callable[[Patch, InRollout], None]
CONFIG = ModelConfig("qwen3", 128, 128, 300, 1, 4, 2, 32, 256, 1e-6, 1e4, tied_embeddings=True)
"""Three blocks of K, the last one short, in down_proj."""
OPTIONS = VerifyOptions(prompts=5, samples=2, max_new_tokens=6)


def rope_beyond_64(patch: Patch, in_rollout: InRollout) -> None:
    """In training alone, by one unit in the last place of the cosine."""

    class Table(RopeTable):
        def rows(self, positions: torch.Tensor) -> RopeTable:
            rows = super().rows(positions)
            if in_rollout():
                return rows
            far = positions.view(-1, *[1] * (rows.cos.ndim - 1)) >= 64
            return RopeTable(
                torch.where(far, rows.cos.nextafter(torch.tensor(9.0)), rows.cos), rows.sin
            )

    patch.setattr(qkv, "RopeTable", Table)


def far_tiles_skipped(patch: Patch, in_rollout: InRollout) -> None:
    """In the rollout, where no probability of the tile reaches 2^-12 of the largest so far."""
    exact = attention._tile_sums

    def tile_sums(q: Any, q_scale: Any, tile: Any, hidden: Any, maximum: Any, narrow: bool) -> Any:
        sums = exact(q, q_scale, tile, hidden, maximum, narrow)
        if in_rollout() and maximum is not None:
            own = exact(q, q_scale, tile, hidden, None, narrow).maximum
            small = own < sums.maximum - 12
            sums.denominator.masked_fill_(small, 0.0)
            sums.total.masked_fill_(small, 0.0)
        return sums

    patch.setattr(attention, "_tile_sums", tile_sums)


def exp2_in_attention(patch: Patch, in_rollout: InRollout) -> None:
    """As vectors and their remainders differ in torch.exp2 on some processors: here, on all."""

    def exp(x: torch.Tensor) -> torch.Tensor:
        return torch.exp2(x) if x.numel() % 1024 else torch.exp(x * math.log(2.0))

    patch.setattr(attention, "torch", TorchWith(exp=exp))
    patch.setattr(attention, "_LN2", 1.0)


def sums_of_as_many_keys_as_there_are(patch: Patch, in_rollout: InRollout) -> None:
    patch.setattr(attention, "_sum_of_64", lambda x: x.sum(-1, keepdim=True))


def silu_of_torch(patch: Patch, in_rollout: InRollout) -> None:
    def gated(gate: torch.Tensor, up: torch.Tensor, kind: str) -> torch.Tensor:
        return torch.nn.functional.silu(gate.contiguous()) * up

    patch.setattr(pointwise, "gated", gated)


def silu_of_torch_in_rollout(patch: Patch, in_rollout: InRollout) -> None:
    exact = pointwise.gated

    def gated(gate: torch.Tensor, up: torch.Tensor, kind: str) -> torch.Tensor:
        return torch.nn.functional.silu(gate) * up if in_rollout() else exact(gate, up)

    patch.setattr(pointwise, "gated", gated)


def a_stale_page(patch: Patch, in_rollout: InRollout) -> None:
    """The first page of a sequence of several is another one."""
    exact = executor.build_batch

    def build_batch(plan: Plan, page_tokens: int) -> ForwardBatch:
        batch = exact(plan, page_tokens)
        table = batch.paged.block_table.clone()
        for row, length in enumerate(batch.paged.lengths):
            if length > page_tokens + 1 and batch.paged.counts[row] == 1:
                table[row, 0] = (table[row, 0] + 1) % 3
        return replace(batch, paged=replace(batch.paged, block_table=table))

    patch.setattr(executor, "build_batch", build_batch)


def keys_that_are_not_computed_again(patch: Patch, in_rollout: InRollout) -> None:
    """A sample that has lost its pages goes on as if they still held its tokens."""
    exact = Sample.start

    def start(self: Sample, allocator: PageAllocator) -> None:
        exact(self, allocator)
        missing = allocator.pages_for(len(self.tokens)) - len(self.pages)
        if len(self.tokens) > self.cached + 1 and missing <= allocator.num_free:
            for _ in range(missing):
                self.add_page(allocator.allocate())
            self.cached = len(self.tokens) - 1

    patch.setattr(Sample, "start", start)


def pages_copied_without_scales(patch: Patch, in_rollout: InRollout) -> None:
    def copy_pages(self: SpecKvCache, sources: list[int], targets: list[int]) -> None:
        for arena in self.layers.values():
            raw = paged_attention._raw(arena.values)
            for source, target in zip(sources, targets, strict=True):
                raw[:, target] = raw[:, source]

    patch.setattr(SpecKvCache, "copy_pages", copy_pages)


def chunks_off_by_one(patch: Patch, in_rollout: InRollout) -> None:
    later_chunks_one_position_off(patch)


def temperature_after_the_softmax(patch: Patch, in_rollout: InRollout) -> None:
    exact = head.log_softmax
    patch.setattr(
        head,
        "log_softmax",
        lambda logits, temperatures: (
            exact(logits, torch.ones_like(temperatures)) / temperatures[:, None]
            if in_rollout()
            else exact(logits, temperatures)
        ),
    )


def v_scaled(patch: Patch, in_rollout: InRollout) -> None:
    exact = attention.transform_qkv

    def transform(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        q, k, v = exact(*arguments)
        return q, k, (v.float() * 1.0039).to(v.dtype)

    patch.setattr(attention, "transform_qkv", transform)


def amax_without_the_last_element(patch: Patch, in_rollout: InRollout) -> None:
    exact = linear.quantise_rows

    def quantise_rows(x: torch.Tensor, *arguments: Any) -> QuantTensor:
        if not in_rollout():
            return exact(x, *arguments)
        blind = x.clone()
        blind[:, quantise.BLOCK - 1 :: quantise.BLOCK] = 0
        scales = exact(blind, *arguments).scales
        of_columns = scales.repeat_interleave(quantise.BLOCK, -1)[:, : x.shape[1]]
        values = (x.float() / of_columns).clamp(-448, 448).to(torch.float8_e4m3fn)
        return QuantTensor(values, scales, "1x128")

    patch.setattr(linear, "quantise_rows", quantise_rows)


def blocks_of_k_reversed(patch: Patch, in_rollout: InRollout) -> None:
    exact = linear.fp8_gemm_nt

    def reversed_blocks(a: QuantTensor, b: QuantTensor) -> torch.Tensor:
        if not in_rollout() or a.scales.shape[1] == 1:
            return exact(a, b)
        left = linear.shifted_e4m3(a.values).double()
        right = linear.shifted_e4m3(b.values).double()
        scales = b.row_scales().mul_(linear.SHIFT * linear.SHIFT).t().contiguous()
        total = torch.zeros(len(left), len(right))
        for k in reversed(range(a.scales.shape[1])):
            total += linear._block_product(left, right, k) * a.scales[:, k, None] * scales[k]
        return total

    patch.setattr(linear, "fp8_gemm_nt", reversed_blocks)


def lm_head_in_fp32(patch: Patch, in_rollout: InRollout) -> None:
    exact = head.grid_gemm_nt
    patch.setattr(
        head,
        "grid_gemm_nt",
        lambda a, b: a.float() @ b.float().t() if in_rollout() else exact(a, b),
    )


def a_head_of_attention_in_fp32(patch: Patch, in_rollout: InRollout) -> None:
    """Its probabilities are not rounded to FP16."""
    exact = attention.attend

    def attend(*arguments: Any) -> attention.AttentionOutput:
        made = exact(*arguments)
        with patch.context() as inner:
            inner.setattr(
                attention,
                "_tile_sums",
                lambda *rest, tile_sums=attention._tile_sums: tile_sums(*rest[:-1], False),
            )
            made.output[:, 0, 0] = exact(*arguments).output[:, 0, 0]
        return made

    patch.setattr(paged_attention, "attend", attend)


FAULTS: dict[Fault, tuple[str, str]] = {
    rope_beyond_64: ("layers.0.rope.q.unrounded", "RoPE"),
    far_tiles_skipped: ("layers.0.attention.unrounded", "attention"),
    exp2_in_attention: ("layers.0.attention.unrounded", "attention"),
    sums_of_as_many_keys_as_there_are: ("layers.0.attention.unrounded", "attention"),
    silu_of_torch: ("layers.0.activation.unrounded", "activation"),
    silu_of_torch_in_rollout: ("layers.0.activation.unrounded", "activation"),
    a_stale_page: ("layers.0.attention.unrounded", "attention"),
    keys_that_are_not_computed_again: ("kv_cache", "KV pages"),
    pages_copied_without_scales: ("layers.0.attention.unrounded", "attention"),
    chunks_off_by_one: ("layers.0.rope.q.unrounded", "RoPE"),
    temperature_after_the_softmax: ("log_prob", "log-probability"),
    v_scaled: ("layers.0.kv_cache.v", "KV write"),
    amax_without_the_last_element: ("layers.0.down_proj.input", "quantiser"),
    blocks_of_k_reversed: ("layers.0.down_proj.unrounded", "GEMM"),
    lm_head_in_fp32: ("lm_head", "head"),
    a_head_of_attention_in_fp32: ("layers.0.attention.unrounded", "attention"),
}


@pytest.fixture(scope="module")
def policy() -> Policy:
    """One that looks hard at few tokens: its probabilities reach below 2^-12."""
    made = random_policy(CONFIG, PrecisionConfig(preset="fp8"), seed=0)
    with torch.no_grad():
        for name, master in made.masters.items():
            if name.endswith(("q_norm.weight", "k_norm.weight")):
                master.mul_(4)
    made.publish()
    return made


@pytest.mark.usefixtures("one_scenario")
def test_nothing_differs_without_a_fault(policy: Policy) -> None:
    result = bisect_policy(policy, OPTIONS)
    (operations,) = result.verified.operations
    assert result.exit_code == 0 and operations.difference is None
    assert operations.rows > 10_000
    assert describe_bisect(result)[0].startswith("nothing differs")


@pytest.mark.usefixtures("one_scenario")
def test_nothing_differs_with_a_head_in_int8() -> None:
    """Its inputs are rows of the drawn tokens alone, as its logits are."""
    made = random_policy(CONFIG, PrecisionConfig(preset="int8", head="int8"), seed=0)
    result = bisect_policy(made, OPTIONS)
    (operations,) = result.verified.operations
    assert result.exit_code == 0 and operations.difference is None


@pytest.mark.few(1)
@pytest.mark.usefixtures("one_scenario")
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_planted_fault_is_seen_and_named(
    fault: Fault, policy: Policy, in_rollout: InRollout, monkeypatch: Patch
) -> None:
    fault(monkeypatch, in_rollout)
    result = bisect_policy(policy, OPTIONS)
    assert result.verified.exit_code == result.exit_code == 1
    assert result.parting is not None
    assert (result.parting.site, result.parting.kind) == FAULTS[fault]
    assert describe_bisect(result)[0].startswith("rollout and training part at ")


BELOW_BF16 = (rope_beyond_64, sums_of_as_many_keys_as_there_are, silu_of_torch_in_rollout)


@pytest.mark.few(1)
@pytest.mark.usefixtures("one_scenario")
@pytest.mark.parametrize("fault", BELOW_BF16, ids=lambda fault: fault.__name__)
def test_faults_that_no_log_probability_shows(
    fault: Fault, policy: Policy, in_rollout: InRollout, monkeypatch: Patch
) -> None:
    """What was compared before the numbers before a rounding were: it passes."""
    fault(monkeypatch, in_rollout)
    monkeypatch.setattr(verify, "_shows_operations", lambda policy: False)
    assert verify.verify_policy(policy, OPTIONS).exit_code == 0
