"""WGrad's operands on the GPU have the CPU's bytes, transposed; the fused quantisers give those of
their parts.
"""

import pytest
import torch

from isobit.kernels.hopper.pointwise import swiglu_backward_bf16, swiglu_backward_quantise
from isobit.kernels.hopper.quantise import QuantRows, quantise_rows, swiglu, swiglu_quantise
from isobit.kernels.hopper.token_groups import (
    quantise_both,
    quantise_tokens,
    swiglu_both,
    swiglu_tokens,
)
from isobit.kernels.spec import quantise as specification
from isobit.kernels.spec.pointwise import swiglu_backward
from isobit.precision.flow import Site
from isobit.precision.quant_tensor import BLOCK, ScaleKind

KINDS: list[ScaleKind] = ["power_of_two", "fp32"]
TOKENS = (1, 127, 128, 129, 300)


def assert_rows(ours: QuantRows, x: torch.Tensor, kind: ScaleKind) -> None:
    """The specification's bytes of x in row groups."""
    expected = specification.quantise_rows(x.cpu(), kind)
    assert torch.equal(ours.values.view(torch.uint8).cpu(), expected.values.view(torch.uint8))
    assert torch.equal(ours.scales.cpu().view(torch.int32), expected.scales.view(torch.int32))


def assert_tokens(ours: QuantRows, x: torch.Tensor, kind: ScaleKind) -> None:
    """The specification's bytes of x in token groups, transposed, with zeros beyond the batch, in
    the layout that the GEMMs read.
    """
    tokens, columns = x.shape
    expected = specification.quantise_tokens(x.cpu(), kind)
    padded = -(-tokens // BLOCK) * BLOCK
    assert ours.values.shape == (columns, padded) and ours.values.is_contiguous()
    assert ours.scales.shape == (columns, padded // BLOCK) and ours.scales.stride() == (1, columns)
    values = ours.values.view(torch.uint8).cpu()
    assert torch.equal(values[:, :tokens], expected.values.view(torch.uint8).t())
    assert torch.equal(ours.scales.cpu().view(torch.int32), expected.scales.view(torch.int32).t())
    last_is_finite = expected.scales[-1].isfinite()
    assert not values[last_is_finite, tokens:].any()


def assert_equal(a: QuantRows, b: QuantRows) -> None:
    assert torch.equal(a.values.view(torch.uint8), b.values.view(torch.uint8))
    assert torch.equal(
        a.scales.contiguous().view(torch.int32), b.scales.contiguous().view(torch.int32)
    )


def wild(tokens: int, columns: int) -> torch.Tensor:
    """Magnitudes over many orders, with zeros of both signs, an infinity, a NaN, tiny and subnormal
    numbers where there is room.
    """
    x = (torch.randn(tokens, columns) * torch.exp(6 * torch.randn(tokens, columns))).bfloat16()
    x[:, 0], x[:, 1], x[:, 2], x[:, 3] = 0.0, -0.0, 1e-12, 1e-38
    x[tokens // 2, 5], x[tokens - 1, 6] = torch.inf, torch.nan
    return x


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("columns", [128, 384, 4096])
def test_one_pass_gives_both_groupings(kind: ScaleKind, columns: int) -> None:
    for tokens in TOKENS:
        x = wild(tokens, columns)
        rows, by_token = quantise_both(x.cuda(), kind)
        assert_rows(rows, x, kind)
        assert_tokens(by_token, x, kind)
        assert_equal(quantise_tokens(x.cuda(), kind), by_token)
        assert_equal(quantise_rows(x.cuda(), kind), rows)


@pytest.mark.parametrize("kind", KINDS)
def test_every_bf16_number(kind: ScaleKind) -> None:
    bits = torch.randperm(65536, generator=torch.Generator().manual_seed(0)).to(torch.int32)
    x = bits.to(torch.uint16).view(torch.bfloat16).view(512, 128)
    finite = torch.where(x.isfinite(), x, torch.zeros_like(x))
    for case in (x, finite, torch.where(finite.abs() < 1, finite, torch.zeros_like(x))):
        rows, by_token = quantise_both(case.cuda(), kind)
        assert_rows(rows, case, kind)
        assert_tokens(by_token, case, kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("columns", [128, 1536])
def test_swiglu_in_both_groupings_quantises_what_swiglu_gives(
    kind: ScaleKind, columns: int
) -> None:
    for tokens in TOKENS:
        tame = (3 * torch.randn(tokens, 2 * columns)).bfloat16()
        for gate_up in (tame.cuda(), wild(tokens, 2 * columns).cuda()):
            y = swiglu(gate_up)
            rows, by_token = swiglu_both(gate_up, kind)
            assert_rows(rows, y, kind)
            assert_tokens(by_token, y, kind)
            assert_equal(swiglu_tokens(gate_up, kind), by_token)
            assert_equal(swiglu_quantise(gate_up, kind), rows)
            kept = torch.empty_like(y)
            assert_equal(swiglu_quantise(gate_up, kind, kept), rows)
            assert torch.equal(kept.view(torch.int16), y.view(torch.int16))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("columns", [128, 1536])
def test_swiglu_backward_quantises_its_own_rounded_output(kind: ScaleKind, columns: int) -> None:
    for tokens in TOKENS:
        dy, gate_up = (
            torch.randn(tokens, columns).bfloat16().cuda(),
            (3 * torch.randn(tokens, 2 * columns)).bfloat16().cuda(),
        )
        d = swiglu_backward_bf16(dy, gate_up)
        rows, by_token = swiglu_backward_quantise(dy, gate_up, kind)
        assert_rows(rows, d, kind)
        assert_tokens(by_token, d, kind)
        beside = QuantRows.empty(tokens, 2 * columns, d.device)
        assert torch.equal(swiglu_backward_bf16(dy, gate_up, beside, kind), d)
        assert_equal(beside, rows)


@pytest.mark.parametrize("columns", [128, 896, 12288])  # 896: a row that is no power of two
def test_swiglu_backward_against_fp64_and_the_specification(columns: int) -> None:
    dy, gate_up = torch.randn(50, columns).bfloat16(), (3 * torch.randn(50, 2 * columns)).bfloat16()
    gate_up[0, :9] = torch.tensor(
        [-200.0, -100.0, -50.0, 0.0, -0.0, 20.0, 50.0, 100.0, 200.0]
    )  # exp overflows, or vanishes
    ours = swiglu_backward_bf16(dy.cuda(), gate_up.cuda()).cpu()
    exact = gate_up.double().requires_grad_()
    gate, up = exact.chunk(2, -1)
    (torch.nn.functional.silu(gate) * up).backward(dy.double())
    assert exact.grad is not None
    error = (ours.double() - exact.grad).abs()
    assert (
        error <= 2**-8 * exact.grad.abs() + 1e-6
    ).all()  # one rounding to BF16, and d gate's cancellation near -1.28
    site = Site("gate_up_proj", "linear", "bf16", dgrad="bf16", wgrad="bf16")
    on_cpu = swiglu_backward(dy, gate_up, site).rows
    assert isinstance(on_cpu, torch.Tensor)
    assert (ours != on_cpu).float().mean() < 2e-3  # the GPU's exp and division round differently
    assert torch.equal(swiglu_backward_bf16(dy[7:8].cuda(), gate_up[7:8].cuda()).cpu(), ours[7:8])


@pytest.mark.parametrize("kind", KINDS)
def test_groups_do_not_depend_on_the_rest_of_the_batch_and_results_repeat(kind: ScaleKind) -> None:
    dy, gate_up = (
        torch.randn(640, 512).bfloat16().cuda(),
        (3 * torch.randn(640, 1024)).bfloat16().cuda(),
    )
    rows, by_token = swiglu_backward_quantise(dy, gate_up, kind)
    for again, expected in zip(
        swiglu_backward_quantise(dy, gate_up, kind), (rows, by_token), strict=True
    ):
        assert_equal(again, expected)
    y_rows, y_by_token = swiglu_both(gate_up, kind)
    for again, expected in zip(swiglu_both(gate_up, kind), (y_rows, y_by_token), strict=True):
        assert_equal(again, expected)
    part = slice(256, 384)
    part_rows, part_by_token = swiglu_both(gate_up[part], kind)
    assert_equal(part_rows, QuantRows(y_rows.values[part], y_rows.scales[part]))
    assert_equal(part_by_token, QuantRows(y_by_token.values[:, part], y_by_token.scales[:, 2:3]))
    part_rows, part_by_token = swiglu_backward_quantise(dy[part], gate_up[part], kind)
    assert_equal(part_rows, QuantRows(rows.values[part], rows.scales[part]))
    assert_equal(part_by_token, QuantRows(by_token.values[:, part], by_token.scales[:, 2:3]))
