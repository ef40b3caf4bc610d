"""Attention of the training forward against FP64 attention over the encoded inputs, and its
explicit backward against autograd of that; over all keys or a sliding window's.
"""

from dataclasses import replace

import pytest
import torch

from isobit.config.precision import PrecisionConfig, Preset
from isobit.kernels.operands import QkvTransform
from isobit.kernels.rope import RopeTable
from isobit.kernels.spec import packed_attention
from isobit.kernels.spec.heads import Heads
from isobit.kernels.spec.packed_attention import PackedAttention
from isobit.kernels.spec.qkv import transform_qkv
from isobit.precision.flow import Graph, LinearShape, build_flow
from isobit.precision.formats import DTYPES
from tests.sites import shape_of_layers

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
    monkeypatch.setattr(packed_attention, "QUERY_BLOCK", block)
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
    monkeypatch.setattr(packed_attention, "GROUP_TOKENS", group)
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
