"""Attention: packed (training) and paged (rollout) give the same bits in any batch, over all keys
or a sliding window's, and the comparison would see it if they did not; values and the backward
against FP64 attention over the encoded inputs.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from isobit.kernels.operands import DecodeBatch, PagedBatch
from isobit.kernels.spec import attention
from isobit.kernels.spec.attention import PackedAttention
from isobit.kernels.spec.backend import SpecBackend
from isobit.kernels.spec.paged_attention import PAGE_TOKENS, PagedAttention, SpecKvCache
from isobit.kernels.spec.qkv import Heads
from isobit.precision.quant_tensor import Format
from isobit.proof.attention_cases import AttentionCase
from tests.kernels.comparison import relative_error

LENGTHS = (1, 63, 64, 65, 130, 7, 200, 100)
LAYOUTS = [(4, 4, 32), (4, 2, 64), (6, 1, 64), (2, 2, 128), (4, 2, 80), (2, 1, 96), (2, 1, 256)]
WINDOWS = [1, 20, 64, 65, 100, 128, 1000]
"""Below and above a tile of 64 and the sequences, multiples of it and not."""
FORMATS: list[Format] = ["e4m3", "bf16", "fp32"]
SINKS = torch.tensor([0.7, -3.0, 30.0, -200.0])
"""Among the scores, below them, above them, and so far below that nothing is left of it."""


def make(
    format: Format,
    lengths: tuple[int, ...] = LENGTHS,
    layout: tuple[int, int, int] = (4, 2, 64),
    window: int | None = None,
    outliers: bool = True,
) -> AttentionCase:
    dtype = torch.float32 if format == "fp32" else torch.bfloat16
    return AttentionCase(format, lengths, *layout, window, dtype, outliers)


@pytest.mark.few(2)
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_paged_equals_packed_bit_for_bit(format: Format, layout: tuple[int, int, int]) -> None:
    sequences = make(format, layout=layout)
    packed = sequences.packed()
    assert torch.equal(sequences.paged(seed=1), packed)
    assert torch.equal(sequences.alone(), packed)


@pytest.mark.few(2)
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("window", WINDOWS)
def test_a_window_is_as_exact(window: int, format: Format) -> None:
    sequences = make(format, window=window)
    packed = sequences.packed()
    assert torch.equal(sequences.paged(seed=1), packed)
    assert torch.equal(sequences.alone(), packed)
    full = make(format).packed()
    assert torch.equal(packed, full) is (window >= max(LENGTHS))


@pytest.mark.parametrize("window", [1, 20, 64, 65])
def test_tiles_before_every_window_are_not_read(
    window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a batch too, whatever the lengths; and a long prompt costs what its windows hold."""
    read = 0
    build = attention.KeyTile.build

    def counting(pair: Heads) -> attention.KeyTile:
        nonlocal read
        read += pair.scales.shape[1]  # tiles of one sequence
        return build(pair)

    monkeypatch.setattr(attention.KeyTile, "build", counting)
    lengths = (1000, 700, 690, 100, 3)
    sequences = make("e4m3", lengths, window=window)
    projected, table = sequences.projected(), torch.arange(80).view(5, 16)
    cache = SpecKvCache(sequences, sequences.flow, 80)
    positions = torch.tensor(lengths) - 1
    slots = table[torch.arange(5), positions // PAGE_TOKENS] * PAGE_TOKENS + positions % PAGE_TOKENS
    batch = PagedBatch((1,) * 5, lengths, table, slots)
    PagedAttention(cache, batch, positions)(0, projected[:5], sequences.transform)
    assert read <= sum((n - 1) // 64 - max(0, n - window) // 64 + 1 for n in lengths)
    read = 0
    replace(sequences, lengths=(1000,)).packed()
    assert read == 16  # every tile once, for the queries that see it


def test_a_decoding_step_is_the_paged_one_of_a_token_each() -> None:
    """With tensors alone: the table is int32 and wider than the sequences need."""
    lengths = (130, 64, 65)
    sequences = make("e4m3", lengths)
    inputs, packed = sequences.projected(), sequences.packed()
    table = torch.randperm(12, dtype=torch.int32).view(3, 4)
    cache = SpecKvCache(sequences, sequences.flow, 12)
    starts, backend, transform = (0, 130, 194), SpecBackend(), sequences.transform
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
@pytest.mark.parametrize("sinks", [None, SINKS])
def test_log_sum_exps_agree_too(
    window: int | None, sinks: torch.Tensor | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """BF16 outputs hide most differences; the FP32 log-sum-exp does not."""
    seen: list[torch.Tensor] = []
    original = attention.attend

    def recording(
        queries: Heads, visible: torch.Tensor, tile_at: attention.TileAt, *options: Any
    ) -> attention.AttentionOutput:
        result = original(queries, visible, tile_at, *options)
        last = visible[:, -1:] == visible  # rows of each sequence's last token
        seen.append(result.log_sum_exp[last[:, None, None].expand_as(result.log_sum_exp)])
        return result

    for module in ("attention", "paged_attention"):
        monkeypatch.setattr(f"isobit.kernels.spec.{module}.attend", recording)
    sequences = replace(make("e4m3", (150,), window=window), sinks=sinks)
    sequences.packed()
    (packed,) = seen
    seen.clear()
    sequences.paged(seed=2)
    assert torch.equal(seen[-1].sort().values, packed.sort().values)


def exp2_mutant(x: torch.Tensor) -> torch.Tensor:
    return torch.exp2(x / attention._LN2)


def fp32_bmm_mutant(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.baddbmm(torch.zeros(1, dtype=torch.float32), a.float(), b.float()).double()


def test_a_window_of_one_key_less_differs() -> None:
    packed = make("e4m3", window=100).packed()
    assert not torch.equal(make("e4m3", window=99).paged(seed=1), packed)


@pytest.mark.parametrize(("name", "mutant"), [("exp", exp2_mutant), ("bmm", fp32_bmm_mutant)])
def test_the_comparison_catches_a_mutant(
    name: str, mutant: Callable[..., torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same arithmetic with exp2, or with an FP32 bmm, on the paged side only must be seen as a
    difference.
    """
    sequences = make("fp32")
    packed = sequences.packed()
    monkeypatch.setattr(attention.torch, name, mutant)
    assert not torch.equal(sequences.paged(seed=1), packed)


@pytest.mark.parametrize("window", [None, 1, 70])
@pytest.mark.parametrize(("format", "bound"), [("e4m3", 2.5e-3), ("bf16", 2.5e-3), ("fp32", 2e-6)])
def test_values_against_fp64_attention_over_the_encoded_inputs(
    format: Format, bound: float, window: int | None
) -> None:
    sequences = make(format, (150, 20), window=window, outliers=False)
    assert relative_error(sequences.packed(), sequences.case().results()) < bound


@pytest.mark.few(14)
@pytest.mark.parametrize("window", [None, 2, 37, 70, 200])
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("block", [50, 512], ids=["several blocks of queries", "one"])
def test_the_backward_is_straight_through(
    format: Format, block: int, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the rotated Q, K and V: ``qkv_backward`` goes on from there."""
    monkeypatch.setattr(attention, "QUERY_BLOCK", block)
    sequences = make(format, (130, 70, 1), window=window, outliers=False)
    case = sequences.case()
    assert case.gradients is not None
    exact = case.exact_gradients()
    for name, ours in case.gradients().items():
        assert ours.shape == exact[name].shape and ours.dtype == sequences.dtype
        assert relative_error(ours, exact[name]) < (1e-5 if format == "fp32" else 6e-3)


@pytest.mark.few(3)
@pytest.mark.parametrize("window", [None, 20, 64])
@pytest.mark.parametrize("format", ["e4m3", "int8", "bf16", "fp32"])
def test_sinks_are_exact_and_take_their_share(format: Format, window: int | None) -> None:
    """Also beside scores of thousands, of either sign."""
    sequences = replace(make(format, window=window), sinks=SINKS)
    packed = sequences.packed()
    assert torch.equal(sequences.paged(seed=1), packed)
    assert torch.equal(sequences.alone(), packed)
    without = make(format, (150, 20), window=window, outliers=False)
    mild = replace(without, sinks=SINKS)
    bound = 2e-6 if format == "fp32" else 2.5e-3
    assert relative_error(mild.packed(), mild.case().results()) < bound
    *_, changed, last = (mild.packed() == without.packed()).unflatten(1, (4, -1)).unbind(1)
    assert last.all() and changed.float().mean() < 0.1
    assert not replace(mild, sinks=torch.full((4,), 3e4)).packed().any()


@pytest.mark.few(2)
@pytest.mark.parametrize("window", [None, 37])
@pytest.mark.parametrize("format", FORMATS)
def test_gradients_with_sinks(format: Format, window: int | None) -> None:
    """Those of Q, K and V, and of the sinks, which add to what is there, against FP64."""
    sequences = make(format, (130, 70, 1), window=window, outliers=False)
    sequences = replace(sequences, sinks=torch.tensor([0.7, -3.0, 2.0, 0.0]))
    case = sequences.case()
    assert case.gradients is not None and case.dy is not None
    exact = case.exact_gradients()
    bound = 1e-5 if format == "fp32" else 6e-3
    for name, ours in case.gradients().items():
        assert relative_error(ours, exact[name]) < bound
    sinks = sequences.sinks.double().requires_grad_()  # type: ignore[union-attr]
    read = (x.double() for x in sequences.encoded().values())
    replace(sequences, sinks=sinks).plain(*read).backward(case.dy.double())
    attend = PackedAttention(sequences.flow.training, sequences.lengths, sequences.positions)
    _, attended = attend.attend(0, sequences.projected(), sequences.transform)
    grad = torch.ones(4)
    attend.backward(attended, case.dy, grad)
    assert sinks.grad is not None and relative_error(grad - 1, sinks.grad) < bound


@pytest.mark.parametrize("format", ["e4m3", "int8", "bf16", "fp32"])
@pytest.mark.parametrize("size", [1e3, 1e4, 1e5, 1e6, 1e8])
def test_gradients_are_finite_wherever_the_output_is(format: Format, size: float) -> None:
    """Scores of up to 1e17, which FP32 rounds by far more than an exponent holds."""
    sequences = make(format, (90, 3), outliers=False)
    qkv = sequences.projected()
    qkv[:, :-128] *= size  # Q and K, and not the two heads of V
    attend = PackedAttention(sequences.flow.training, sequences.lengths, sequences.positions)
    output, attended = attend.attend(0, qkv, sequences.transform)
    d_output = torch.randn(output.shape)
    *_, dv = attend.backward(attended, d_output)
    for made in (output, *attend.backward(attended, d_output)):
        assert made.isfinite().all()
    assert dv.abs().max() < 1.1 * 2 * 93 * d_output.abs().max(), "no weight is above 1"


@pytest.mark.parametrize("group", [100, 4096])
def test_gradients_of_a_sequence_are_its_own(group: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Padding carries none, and a sequence alone has those that it has in a batch."""
    monkeypatch.setattr(attention, "GROUP_TOKENS", group)
    lengths = (90, 70, 71, 3)
    sequences = make("fp32", lengths, outliers=False)
    graph, qkv, transform = sequences.flow.training, sequences.projected(), sequences.transform
    attend = PackedAttention(graph, lengths, sequences.positions)
    output, attended = attend.attend(0, qkv, transform)
    d_output = torch.randn(output.shape)
    together = attend.backward(attended, d_output)
    for rows in torch.arange(sum(lengths)).split(lengths):
        alone = PackedAttention(graph, (len(rows),), torch.arange(len(rows)))
        _, attended = alone.attend(0, qkv[rows], transform)
        for ours, whole in zip(alone.backward(attended, d_output[rows]), together, strict=True):
            torch.testing.assert_close(ours, whole[rows], rtol=1e-4, atol=1e-5)


def test_a_nan_key_reaches_the_queries_that_see_it_and_no_other() -> None:
    sequences = make("e4m3", (70, 70), outliers=False)
    qkv = sequences.projected()
    qkv[100, 4 * 64 + 5] = torch.nan
    attend = PackedAttention(sequences.flow.training, (70, 70), sequences.positions)
    output = attend(0, qkv, sequences.transform)
    assert output[:100].isfinite().all()
    seen = output[100:].view(40, 2, -1)
    assert seen[:, 0].isnan().all() and seen[:, 1].isfinite().all()
