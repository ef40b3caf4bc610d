"""Attention: packed (training) and paged (rollout) give the same bits, the values are right, the
backward is straight-through.
"""

import random
from collections.abc import Callable

import pytest
import torch

from isobit.config.precision import PrecisionConfig, Preset
from isobit.kernels.spec import attention
from isobit.kernels.spec.heads import Heads
from isobit.kernels.spec.kv_cache import PAGE_TOKENS, KvCache
from isobit.kernels.spec.packed_attention import PackedAttention
from isobit.kernels.spec.paged_attention import PagedAttention, PagedBatch
from isobit.models.config import ModelConfig
from isobit.precision.flow import PrecisionFlow, build_flow
from isobit.precision.formats import DTYPES

LENGTHS = (1, 63, 64, 65, 130, 7, 200, 100)
LAYOUTS = [(4, 4, 32), (4, 2, 64), (6, 1, 64), (2, 2, 128)]
Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def make_model(heads: int, kv_heads: int, dim: int) -> ModelConfig:
    return ModelConfig("llama", 128, 128, 128, 1, heads, kv_heads, dim, 512, 1e-6, 1e4, False)


def make_flow(model: ModelConfig, preset: Preset) -> PrecisionFlow:
    return build_flow(PrecisionConfig(preset=preset), model.shape)


def make_inputs(model: ModelConfig, flow: PrecisionFlow, lengths: tuple[int, ...]) -> Tensors:
    """Random q, k, v with planted outliers and a large bias on K."""
    tokens, dtype = sum(lengths), DTYPES[flow.training.activations]
    q = torch.randn(tokens, model.num_heads, model.head_dim)
    k = torch.randn(tokens, model.num_kv_heads, model.head_dim) + 20 * torch.randn(
        model.num_kv_heads, model.head_dim
    )
    v = torch.randn(tokens, model.num_kv_heads, model.head_dim) * torch.exp(
        2 * torch.randn(tokens, 1, 1)
    )
    q[::17] *= 100
    k[::13, :, 3] *= 50
    return q.to(dtype), k.to(dtype), v.to(dtype)


def run_paged(
    model: ModelConfig, flow: PrecisionFlow, inputs: Tensors, lengths: tuple[int, ...], seed: int
) -> torch.Tensor:
    """Feed the sequences to the cache in random chunks, in random company, in shuffled pages."""
    choose = random.Random(seed)
    pages = -(-max(lengths) // PAGE_TOKENS)
    order = list(range(len(lengths) * pages))
    choose.shuffle(order)
    table = torch.tensor(order).view(len(lengths), pages)
    cache = KvCache(model, flow, table.numel())
    starts = [sum(lengths[:s]) for s in range(len(lengths))]
    done = [0] * len(lengths)
    output = torch.empty_like(inputs[0])
    while unfinished := [s for s in range(len(lengths)) if done[s] < lengths[s]]:
        members = choose.sample(unfinished, choose.randint(1, len(unfinished)))
        counts = [choose.choice([1, 1, choose.randint(1, 40)]) for _ in members]
        counts = [
            min(count, lengths[s] - done[s]) for count, s in zip(counts, members, strict=True)
        ]
        places = [
            (s, done[s] + i) for s, count in zip(members, counts, strict=True) for i in range(count)
        ]
        slots = torch.tensor(
            [int(table[s, p // PAGE_TOKENS]) * PAGE_TOKENS + p % PAGE_TOKENS for s, p in places]
        )
        rows = torch.tensor([starts[s] + p for s, p in places])
        for s, count in zip(members, counts, strict=True):
            done[s] += count
        batch = PagedBatch(tuple(counts), tuple(done[s] for s in members), table[members], slots)
        q, k, v = (x[rows] for x in inputs)
        output[rows] = PagedAttention(cache, batch)(0, q, k, v)
    return output


@pytest.mark.parametrize("preset", ["fp8", "bf16", "fp32"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_paged_equals_packed_bit_for_bit(preset: Preset, layout: tuple[int, int, int]) -> None:
    model = make_model(*layout)
    flow = make_flow(model, preset)
    inputs = make_inputs(model, flow, LENGTHS)
    packed = PackedAttention(flow, LENGTHS)(0, *inputs)
    assert torch.equal(run_paged(model, flow, inputs, LENGTHS, seed=1), packed)
    alone = [
        PackedAttention(flow, (n,))(0, *parts)
        for n, *parts in zip(LENGTHS, *(x.split(LENGTHS) for x in inputs), strict=True)
    ]
    assert torch.equal(torch.cat(alone), packed)


def test_log_sum_exps_agree_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """BF16 outputs hide most differences; the FP32 log-sum-exp does not."""
    seen: list[torch.Tensor] = []
    original = attention.attend

    def recording(
        queries: Heads, visible: torch.Tensor, tile_at: attention.TileAt
    ) -> attention.AttentionOutput:
        result = original(queries, visible, tile_at)
        last = visible[:, -1:] == visible  # rows of each sequence's last token
        seen.append(result.log_sum_exp[last[:, None, None].expand_as(result.log_sum_exp)])
        return result

    for module in ("packed_attention", "paged_attention"):
        monkeypatch.setattr(f"isobit.kernels.spec.{module}.attend", recording)
    model = make_model(4, 2, 64)
    flow = make_flow(model, "fp8")
    inputs = make_inputs(model, flow, (150,))
    PackedAttention(flow, (150,))(0, *inputs)
    (packed,) = seen
    seen.clear()
    run_paged(model, flow, inputs, (150,), seed=2)
    assert torch.equal(seen[-1].sort().values, packed.sort().values)


def test_values_against_fp64_attention_over_the_quantised_inputs() -> None:
    model = make_model(4, 2, 64)
    bounds: dict[Preset, float] = {"fp8": 2.5e-3, "bf16": 2.5e-3, "fp32": 2e-6}
    for preset, bound in bounds.items():
        flow = make_flow(model, preset)
        torch.manual_seed(0)
        dtype = DTYPES[flow.training.activations]
        q, k, v = (torch.randn(150, heads, 64).to(dtype) for heads in (4, 2, 2))
        ours = PackedAttention(flow, (150,))(0, q, k, v)
        format = flow.training.attention_format(0)
        exact = reference(*(Heads.encode(x, format).dequantised().double() for x in (q, k, v)))
        assert (ours.double() - exact).norm() / exact.norm() < bound, preset


def reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(0, 1)


@pytest.mark.parametrize("preset", ["fp8", "fp32"])
def test_backward_is_straight_through(preset: Preset, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against FP64 autograd over the quantised inputs; the queries are taken in several blocks."""
    monkeypatch.setattr("isobit.kernels.spec.packed_attention._QUERY_BLOCK", 50)
    model = make_model(4, 2, 64)
    flow = make_flow(model, preset)
    lengths = (130, 70, 1)
    format = flow.training.attention_format(0)
    inputs = [
        torch.randn(sum(lengths), heads, 64).to(DTYPES[flow.training.activations]).requires_grad_()
        for heads in (4, 2, 2)
    ]
    output = PackedAttention(flow, lengths)(0, *inputs)
    d_output = torch.randn_like(output)
    ours = torch.autograd.grad(output, inputs, d_output)
    exact_inputs = [
        Heads.encode(x.detach(), format).dequantised().double().requires_grad_() for x in inputs
    ]
    exact_output = torch.cat(
        [reference(*parts) for parts in zip(*(x.split(lengths) for x in exact_inputs), strict=True)]
    )
    exact = torch.autograd.grad(exact_output, exact_inputs, d_output.double())
    bound = 1e-5 if preset == "fp32" else 6e-3
    assert all(
        float((a.double() - b).norm() / b.norm()) < bound for a, b in zip(ours, exact, strict=True)
    )


def test_a_nan_key_reaches_the_queries_that_see_it_and_no_other() -> None:
    model = make_model(2, 1, 64)
    flow = make_flow(model, "fp8")
    q, k, v = (torch.randn(140, heads, 64).bfloat16() for heads in (2, 1, 1))
    k[100, 0, 5] = torch.nan
    output = PackedAttention(flow, (70, 70))(0, q, k, v)
    assert output[:100].isfinite().all() and output[100:].isnan().all()


def exp2_mutant(x: torch.Tensor) -> torch.Tensor:
    return torch.exp2(x / attention._LN2)


def fp32_bmm_mutant(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.baddbmm(torch.zeros(1, dtype=torch.float32), a.float(), b.float()).double()


@pytest.mark.parametrize(("name", "mutant"), [("exp", exp2_mutant), ("bmm", fp32_bmm_mutant)])
def test_the_comparison_catches_a_mutant(
    name: str, mutant: Callable[..., torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same arithmetic with exp2, or with an FP32 bmm, on the paged side only must be seen as a
    difference.
    """
    model = make_model(4, 2, 64)
    flow = make_flow(model, "fp32")
    inputs = make_inputs(model, flow, LENGTHS)
    packed = PackedAttention(flow, LENGTHS)(0, *inputs)
    monkeypatch.setattr(attention.torch, name, mutant)
    assert not torch.equal(run_paged(model, flow, inputs, LENGTHS, seed=1), packed)
