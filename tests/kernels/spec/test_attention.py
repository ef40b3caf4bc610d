"""Attention: packed (training) and paged (rollout) give the same bits, whatever the company, and
the comparison would see it if they did not.

Attention of the training forward against FP64 attention over the encoded inputs, and its
explicit backward against autograd of that; over all keys or a sliding window's.
"""

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from isobit.config.tables import PrecisionConfig, Preset
from isobit.kernels.operands import DecodeBatch, PagedBatch, QkvTransform, RopeTable
from isobit.kernels.spec import attention
from isobit.kernels.spec.attention import PackedAttention
from isobit.kernels.spec.backend import SpecBackend
from isobit.kernels.spec.paged_attention import PAGE_TOKENS, PagedAttention, SpecKvCache
from isobit.kernels.spec.qkv import Heads, transform_qkv
from isobit.models.config import ModelConfig
from isobit.models.decoder import decoder_shape
from isobit.precision.flow import Graph, LinearShape, PrecisionFlow, build_flow
from isobit.precision.quant_tensor import DTYPES
from tests.sites import shape_of_layers

LENGTHS = (1, 63, 64, 65, 130, 7, 200, 100)
LAYOUTS = [(4, 4, 32), (4, 2, 64), (6, 1, 64), (2, 2, 128), (4, 2, 80), (2, 1, 96), (2, 1, 256)]
WINDOWS = [1, 20, 64, 65, 100, 128, 1000]
"""Below and above a tile of 64 and the sequences, multiples of it and not."""


def make_model(heads: int, kv_heads: int, dim: int) -> ModelConfig:
    return ModelConfig("llama", 128, 128, 128, 1, heads, kv_heads, dim, 512, 1e-6, 1e4, False)


def make_flow(model: ModelConfig, preset: Preset) -> PrecisionFlow:
    return build_flow(PrecisionConfig(preset=preset), decoder_shape(model))


def make_transform(model: ModelConfig) -> QkvTransform:
    frequencies = 0.1 ** torch.arange(model.head_dim // 2, dtype=torch.float64)
    table = RopeTable.build(frequencies, 256)
    heads = model.num_heads, model.num_kv_heads, model.head_dim
    window = model.sliding_window
    return QkvTransform(*heads, table.cos, table.sin, 1e-6, None, None, None, window)


def make_inputs(model: ModelConfig, flow: PrecisionFlow, lengths: tuple[int, ...]) -> torch.Tensor:
    """Random rows of q, k and v, with planted outliers and a large bias on K."""
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
    return torch.cat([q, k, v], 1).view(tokens, -1).to(dtype)


def run_packed(
    model: ModelConfig, flow: PrecisionFlow, qkv: torch.Tensor, lengths: tuple[int, ...]
) -> torch.Tensor:
    positions = torch.cat([torch.arange(n) for n in lengths])
    return PackedAttention(flow.training, lengths, positions)(0, qkv, make_transform(model))


def run_paged(
    model: ModelConfig, flow: PrecisionFlow, qkv: torch.Tensor, lengths: tuple[int, ...], seed: int
) -> torch.Tensor:
    """Feed the sequences to the cache in random chunks, in random company, in shuffled pages."""
    choose, transform = random.Random(seed), make_transform(model)
    pages = -(-max(lengths) // PAGE_TOKENS)
    order = list(range(len(lengths) * pages))
    choose.shuffle(order)
    table = torch.tensor(order).view(len(lengths), pages)
    cache = SpecKvCache(model, flow, table.numel())
    starts = [sum(lengths[:s]) for s in range(len(lengths))]
    done = [0] * len(lengths)
    output = torch.empty(sum(lengths), model.num_heads * model.head_dim, dtype=qkv.dtype)
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
        positions = torch.tensor([p for _, p in places])
        for s, count in zip(members, counts, strict=True):
            done[s] += count
        batch = PagedBatch(tuple(counts), tuple(done[s] for s in members), table[members], slots)
        output[rows] = PagedAttention(cache, batch, positions)(0, qkv[rows], transform)
    return output


@pytest.mark.parametrize("preset", ["fp8", "bf16", "fp32"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_paged_equals_packed_bit_for_bit(preset: Preset, layout: tuple[int, int, int]) -> None:
    model = make_model(*layout)
    flow = make_flow(model, preset)
    inputs = make_inputs(model, flow, LENGTHS)
    packed = run_packed(model, flow, inputs, LENGTHS)
    assert torch.equal(run_paged(model, flow, inputs, LENGTHS, seed=1), packed)
    alone = [
        run_packed(model, flow, part, (n,))
        for n, part in zip(LENGTHS, inputs.split(LENGTHS), strict=True)
    ]
    assert torch.equal(torch.cat(alone), packed)


@pytest.mark.parametrize("preset", ["fp8", "bf16", "fp32"])
@pytest.mark.parametrize("window", WINDOWS)
def test_a_window_is_as_exact(window: int, preset: Preset) -> None:
    model = replace(make_model(4, 2, 64), sliding_window=window)
    flow = make_flow(model, preset)
    inputs = make_inputs(model, flow, LENGTHS)
    packed = run_packed(model, flow, inputs, LENGTHS)
    assert torch.equal(run_paged(model, flow, inputs, LENGTHS, seed=1), packed)
    alone = [
        run_packed(model, flow, part, (n,))
        for n, part in zip(LENGTHS, inputs.split(LENGTHS), strict=True)
    ]
    assert torch.equal(torch.cat(alone), packed)
    full = run_packed(replace(model, sliding_window=None), flow, inputs, LENGTHS)
    assert torch.equal(packed, full) is (window >= max(LENGTHS))


@pytest.mark.parametrize("window", [1, 20, 64, 65])
def test_tiles_before_every_window_are_not_read(
    window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In company too, whatever the lengths; and a long prompt costs what its windows hold."""
    read = 0
    build = attention.KeyTile.build

    def counting(pair: Heads) -> attention.KeyTile:
        nonlocal read
        read += pair.bytes.shape[1]  # tiles of one sequence
        return build(pair)

    monkeypatch.setattr(attention.KeyTile, "build", counting)
    model = replace(make_model(4, 2, 64), sliding_window=window)
    flow, lengths = make_flow(model, "fp8"), (1000, 700, 690, 100, 3)
    table = torch.arange(80).view(5, 16)
    cache = SpecKvCache(model, flow, 80)
    positions = torch.tensor(lengths) - 1
    slots = table[torch.arange(5), positions // PAGE_TOKENS] * PAGE_TOKENS + positions % PAGE_TOKENS
    transform = replace(make_transform(model), cos=torch.ones(1, 32), sin=torch.zeros(1, 32))
    batch = PagedBatch((1,) * 5, lengths, table, slots)
    attend = PagedAttention(cache, batch, torch.zeros_like(positions))
    attend(0, make_inputs(model, flow, (5,)), transform)
    assert read <= sum((n - 1) // 64 - max(0, n - window) // 64 + 1 for n in lengths)
    read = 0
    packed = PackedAttention(flow.training, (1000,), torch.zeros(1000, dtype=torch.int64))
    packed(0, make_inputs(model, flow, (1000,)), transform)
    assert read == 16  # every tile once, for the queries that see it


def test_a_decoding_step_is_the_paged_one_of_a_token_each() -> None:
    """With tensors alone: the table is int32 and wider than the sequences need."""
    model = make_model(4, 2, 64)
    flow = make_flow(model, "fp8")
    lengths = (130, 64, 65)
    inputs = make_inputs(model, flow, lengths)
    packed = run_packed(model, flow, inputs, lengths)
    table = torch.randperm(12, dtype=torch.int32).view(3, 4)
    cache = SpecKvCache(model, flow, 12)
    starts, backend, transform = (0, 130, 194), SpecBackend(), make_transform(model)
    for position in range(130):
        members = [s for s in range(3) if position < lengths[s]]
        positions = torch.full((len(members),), position)
        pages = table[members, position // PAGE_TOKENS].long()
        batch = DecodeBatch(
            positions,
            pages * PAGE_TOKENS + position % PAGE_TOKENS,
            table[members],
            (positions + 1).int(),
            256,
        )
        rows = torch.tensor([starts[s] + position for s in members])
        out = backend.decode_attention(cache, batch)(0, inputs[rows], transform)
        assert torch.equal(out, packed[rows]), position


@pytest.mark.parametrize("window", [None, 70])
def test_log_sum_exps_agree_too(window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """BF16 outputs hide most differences; the FP32 log-sum-exp does not."""
    seen: list[torch.Tensor] = []
    original = attention.attend

    def recording(
        queries: Heads, visible: torch.Tensor, tile_at: attention.TileAt, window: int | None
    ) -> attention.AttentionOutput:
        result = original(queries, visible, tile_at, window)
        last = visible[:, -1:] == visible  # rows of each sequence's last token
        seen.append(result.log_sum_exp[last[:, None, None].expand_as(result.log_sum_exp)])
        return result

    for module in ("attention", "paged_attention"):
        monkeypatch.setattr(f"isobit.kernels.spec.{module}.attend", recording)
    model = replace(make_model(4, 2, 64), sliding_window=window)
    flow = make_flow(model, "fp8")
    inputs = make_inputs(model, flow, (150,))
    run_packed(model, flow, inputs, (150,))
    (packed,) = seen
    seen.clear()
    run_paged(model, flow, inputs, (150,), seed=2)
    assert torch.equal(seen[-1].sort().values, packed.sort().values)


def exp2_mutant(x: torch.Tensor) -> torch.Tensor:
    return torch.exp2(x / attention._LN2)


def fp32_bmm_mutant(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.baddbmm(torch.zeros(1, dtype=torch.float32), a.float(), b.float()).double()


def test_a_window_of_one_key_less_differs() -> None:
    model = replace(make_model(4, 2, 64), sliding_window=100)
    flow = make_flow(model, "fp8")
    inputs = make_inputs(model, flow, LENGTHS)
    packed = run_packed(model, flow, inputs, LENGTHS)
    less = replace(model, sliding_window=99)
    assert not torch.equal(run_paged(less, flow, inputs, LENGTHS, seed=1), packed)


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
    packed = run_packed(model, flow, inputs, LENGTHS)
    monkeypatch.setattr(attention.torch, name, mutant)
    assert not torch.equal(run_paged(model, flow, inputs, LENGTHS, seed=1), packed)


SHAPE = shape_of_layers(1, {"qkv_proj": LinearShape({"q_proj": 128}, 128)})
H, G, D = 4, 2, 64
TABLE = RopeTable.build(0.1 ** torch.arange(D // 2, dtype=torch.float64), 256)
TRANSFORM = QkvTransform(H, G, D, TABLE.cos, TABLE.sin, 1e-6, None, None, None)
Tensors = tuple[torch.Tensor, ...]


def graph(preset: Preset) -> Graph:
    return build_flow(PrecisionConfig(preset=preset), SHAPE).training


def make(preset: Preset, lengths: tuple[int, ...]) -> tuple[PackedAttention, torch.Tensor]:
    positions = torch.cat([torch.arange(n) for n in lengths])
    qkv = torch.randn(sum(lengths), (H + 2 * G) * D).to(DTYPES[graph(preset).activations])
    return PackedAttention(graph(preset), lengths, positions), qkv


def encoded(preset: Preset, qkv: torch.Tensor, lengths: tuple[int, ...]) -> Tensors:
    """Q, K and V as attention reads them, FP64."""
    positions = torch.cat([torch.arange(n) for n in lengths])
    format = graph(preset).attention_format(0)
    parts = transform_qkv(0, qkv, TRANSFORM, TABLE.rows(positions))
    return tuple(Heads.encode(x, format).dequantised().double() for x in parts)


def reference(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int | None
) -> torch.Tensor:
    k, v = (x.repeat_interleave(H // G, 1) for x in (k, v))
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    place = torch.arange(q.shape[1])
    behind = place[:, None] - place[None, :]
    seen = (behind >= 0) & (behind < (window or len(place)))
    attended = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen)
    return attended.transpose(0, 1)


def of_each_sequence(
    inputs: Tensors, lengths: tuple[int, ...], window: int | None = None
) -> torch.Tensor:
    split = [x.split(lengths) for x in inputs]
    return torch.cat([reference(q, k, v, window) for q, k, v in zip(*split, strict=True)])


def error(ours: torch.Tensor, exact: torch.Tensor) -> float:
    return float((ours.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("window", [None, 1, 70])
@pytest.mark.parametrize(("preset", "bound"), [("fp8", 2.5e-3), ("bf16", 2.5e-3), ("fp32", 2e-6)])
def test_values_against_fp64_attention_over_the_encoded_inputs(
    preset: Preset, bound: float, window: int | None
) -> None:
    lengths = (150, 20)
    attend, qkv = make(preset, lengths)
    exact = of_each_sequence(encoded(preset, qkv, lengths), lengths, window)
    output = attend(0, qkv, replace(TRANSFORM, window=window))
    assert error(output.view_as(exact), exact) < bound


@pytest.mark.parametrize("window", [None, 2, 37, 70, 200])
@pytest.mark.parametrize("preset", ["fp8", "bf16", "fp32"])
@pytest.mark.parametrize("block", [50, 512], ids=["several blocks of queries", "one"])
def test_the_backward_is_straight_through(
    preset: Preset, block: int, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the rotated Q, K and V: ``qkv_backward`` goes on from there."""
    monkeypatch.setattr(attention, "QUERY_BLOCK", block)
    lengths = (130, 70, 1)
    attend, qkv = make(preset, lengths)
    transform = replace(TRANSFORM, window=window)
    output, attended = attend.attend(0, qkv, transform)
    assert torch.equal(output, attend(0, qkv, transform))
    d_output = torch.randn(output.shape).to(output.dtype)
    ours = attend.backward(attended, d_output)
    inputs = tuple(x.requires_grad_() for x in encoded(preset, qkv, lengths))
    made = of_each_sequence(inputs, lengths, window)
    exact = torch.autograd.grad(made, inputs, d_output.double().view_as(made))
    bound = 1e-5 if preset == "fp32" else 6e-3
    for one, wanted in zip(ours, exact, strict=True):
        assert one.shape == wanted.shape and one.dtype == qkv.dtype
        assert error(one, wanted) < bound


@pytest.mark.parametrize("group", [100, 4096])
def test_gradients_of_a_sequence_are_its_own(group: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Padding carries none, and a sequence alone has those that it has in company."""
    monkeypatch.setattr(attention, "GROUP_TOKENS", group)
    lengths = (90, 70, 71, 3)
    attend, qkv = make("fp32", lengths)
    _, attended = attend.attend(0, qkv, TRANSFORM)
    d_output = torch.randn(sum(lengths), H * D)
    together = attend.backward(attended, d_output)
    for s, rows in enumerate(torch.arange(sum(lengths)).split(lengths)):
        alone = PackedAttention(graph("fp32"), lengths[s : s + 1], torch.arange(lengths[s]))
        _, attended = alone.attend(0, qkv[rows], TRANSFORM)
        for ours, whole in zip(alone.backward(attended, d_output[rows]), together, strict=True):
            torch.testing.assert_close(ours, whole[rows], rtol=1e-4, atol=1e-5)


def test_a_nan_key_reaches_the_queries_that_see_it_and_no_other() -> None:
    attend, qkv = make("fp8", (70, 70))
    qkv[100, H * D + 5] = torch.nan
    output = attend(0, qkv, TRANSFORM)
    assert output[:100].isfinite().all()
    seen = output[100:].view(40, G, -1)
    assert seen[:, 0].isnan().all() and seen[:, 1].isfinite().all()
