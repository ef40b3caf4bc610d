"""The GPU's quantisers give the CPU's bytes, for every value that there is and for matrices of any
size, by rows and by tokens; the fused ones give those of their parts.
"""

from typing import get_args

import pytest
import torch
import triton
import triton.language as tl
from torch.nn import functional

from isobit.kernels.operands import SWIGLU_ALPHA, SWIGLU_LIMIT, Gate
from isobit.kernels.spec import quantise as specification
from isobit.kernels.spec.pointwise import rms_norm, swiglu_backward
from isobit.kernels.spec.pointwise import swiglu as swiglu_on_cpu
from isobit.kernels.triton.device_functions import padded_size
from isobit.kernels.triton.pointwise import swiglu_backward_bf16
from isobit.kernels.triton.quantise import QuantRows, four_sigmoids, swiglu
from isobit.kernels.triton.transpose import transpose_blocks
from isobit.precision.flow import Site
from isobit.precision.quant_tensor import BLOCK, QuantTensor, ScaleKind, block_sizes, num_blocks
from isobit.proof.cases import plain_swiglu
from tests.gpu.kernels import (
    PRODUCTS,
    gradient_both,
    publish_blocks,
    quantise_both,
    quantise_gradient,
    quantise_rows,
    quantise_tokens,
    rms_norm_quantise,
    swiglu_backward_quantise,
    swiglu_both,
    swiglu_quantise,
    swiglu_tokens,
)
from tests.gpu.operands import (
    KINDS,
    MATRICES,
    assert_gradient,
    assert_rows,
    assert_tokens,
    assert_whole_blocks,
    bf16,
    every_bf16,
    wild,
)
from tests.kernels.comparison import bits, same

COLUMNS = (16, 80, 128, 384, 576, 960, 1040, 1536, 4096, 12288)
TOKENS = (1, 67, 127, 128, 129, 300)
GATES: tuple[Gate, ...] = get_args(Gate)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("columns", COLUMNS)
def test_rows_and_tokens(kind: ScaleKind, columns: int) -> None:
    for tokens in TOKENS:
        assert_quantised(wild(tokens, columns), kind)


@pytest.mark.parametrize("kind", KINDS)
def test_every_bf16_number(kind: ScaleKind) -> None:
    for x in every_bf16():
        assert_quantised(x, kind)


def assert_quantised(x: torch.Tensor, kind: ScaleKind) -> None:
    """By the kernels of one grouping, and of both."""
    on_gpu = x.cuda()
    by_row, by_token = quantise_both(on_gpu, kind)
    for made in (quantise_rows(on_gpu, kind), by_row):
        assert_rows(made, x, kind)
    for made in (quantise_tokens(on_gpu, kind), by_token):
        assert_tokens(made, x, kind)


@pytest.mark.parametrize("columns", [128, 896, 4096, 5120])
def test_rms_norm_quantises_its_own_rounded_output_and_rows_do_not_depend_on_the_batch(
    columns: int,
) -> None:
    h = torch.randn(70, columns).bfloat16().cuda()
    x = torch.randn(70, columns).bfloat16().cuda()
    weight = torch.randn(columns).bfloat16().cuda()
    new, norm, quantised = rms_norm_quantise(h, x, weight, 1e-6, keep=True)
    assert norm is not None and quantised is not None
    assert torch.equal(new, h + x)
    # Rollout does not keep the norm, training does.
    _, nothing, without = rms_norm_quantise(h, x, weight, 1e-6)
    assert nothing is None and same(without, quantised)
    assert_rows(quantised, norm, "power_of_two")
    exact = torch.nn.functional.rms_norm(new.double(), (columns,), weight.double(), 1e-6)
    yardstick = torch.nn.functional.rms_norm(new, (columns,), weight, 1e-6).double()
    assert (norm.double() - exact).norm() <= 1.05 * (yardstick - exact).norm()
    cpu = rms_norm(new.cpu(), weight.cpu(), 1e-6)
    assert (norm.cpu() != cpu).float().mean() < 1e-3  # sums in another order, rounded to BF16
    for rows in (slice(0, 1), slice(5, 6), slice(13, 40), slice(69, 70)):
        alone, alone_norm, alone_quantised = rms_norm_quantise(
            h[rows], x[rows], weight, 1e-6, keep=True
        )
        assert alone_quantised is not None and alone_norm is not None
        assert torch.equal(alone, new[rows]) and torch.equal(alone_norm, norm[rows])
        assert same(alone_quantised, QuantRows(quantised.values[rows], quantised.scales[rows]))


@triton.jit
def _sigmoids_kernel(numbers, short, plain, count: tl.constexpr):
    """sigmoid and silu of BF16 numbers, as the kernels compute them and by their definitions."""
    i = tl.program_id(0) * 128 + tl.arange(0, 128)
    x = tl.load(numbers + i).to(tl.float32)
    tl.store(short + i, 0.25 * four_sigmoids(x))
    tl.store(short + count + i, four_sigmoids(x) * (0.25 * x))
    tl.store(plain + i, 1.0 / (1.0 + tl.exp(-x)))
    tl.store(plain + count + i, x / (1.0 + tl.exp(-x)))


def test_the_short_sigmoid_has_the_bits_of_the_plain_one() -> None:
    x = every_bf16()[0].cuda()
    short, plain = (torch.empty(2, x.numel(), device="cuda") for _ in range(2))
    launch = _sigmoids_kernel[(x.numel() // 128,)]
    launch(x, short, plain, x.numel(), num_warps=4, enable_fp_fusion=False)  # pyright: ignore
    assert torch.equal(short.isnan(), plain.isnan())
    assert torch.equal(*(torch.where(y.isnan(), 0, y).view(torch.int32) for y in (short, plain)))


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("columns", [128, 384, 12288])
def test_swiglu_against_the_specification(columns: int, gate: Gate) -> None:
    gate_up = (3 * torch.randn(50, 2 * columns)).bfloat16()
    ours = swiglu_quantise(gate_up.cuda(), gate=gate)
    expected = specification.quantise_rows(swiglu_on_cpu(gate_up, gate))
    assert ours.values.shape == expected.values.shape
    different = ours.values.view(torch.uint8).cpu() != expected.values.view(torch.uint8)
    # The GPU's exp rounds differently, and so, rarely, does the BF16 that is quantised.
    assert different.float().mean() < 2e-3
    unquantised = swiglu(gate_up.cuda(), gate)
    assert_rows(ours, unquantised, "power_of_two")
    assert (unquantised.cpu() != swiglu_on_cpu(gate_up, gate)).float().mean() < 2e-3
    alone = swiglu_quantise(gate_up[7:8].cuda(), gate=gate)
    assert torch.equal(bits(alone.values), bits(ours.values)[7:8])


def hidden_pairs(tokens: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Gates and ups, [tokens, 2 columns], tame and wild."""
    tame = (3 * torch.randn(tokens, 2 * columns)).bfloat16()
    return tame.cuda(), wild(tokens, 2 * columns).cuda()


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("columns", COLUMNS)
def test_fused_quantisers(kind: ScaleKind, columns: int, gate: Gate) -> None:
    weight = torch.randn(columns).bfloat16().cuda()
    for tokens in TOKENS:
        h, x = wild(tokens, columns).cuda(), torch.randn(tokens, columns).bfloat16().cuda()
        _, norm, made = rms_norm_quantise(h, x, weight, 1e-6, kind, keep=True)
        assert norm is not None and made is not None
        assert_rows(made, norm, kind)
        for gate_up in hidden_pairs(tokens, columns):
            y = swiglu(gate_up, gate)
            kept = torch.empty_like(y)
            by_row, by_token = swiglu_both(gate_up, kind, gate)
            for rows in (
                swiglu_quantise(gate_up, kind, gate=gate),
                swiglu_quantise(gate_up, kind, kept, gate),
                by_row,
            ):
                assert_rows(rows, y, kind)
            assert same(kept, y)
            for by_tokens in (by_token, swiglu_tokens(gate_up, kind, gate)):
                assert_tokens(by_tokens, y, kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("parts", "k"), MATRICES)
def test_output_gradients(kind: ScaleKind, parts: tuple[int, ...], k: int) -> None:
    for tokens in (1, 67, 300):
        dy = wild(tokens, sum(parts))
        assert_gradient(quantise_gradient(dy.cuda(), parts, kind), dy, parts, kind)
        by_row, by_token = gradient_both(dy.cuda(), parts, kind)
        assert_gradient(by_row, dy, parts, kind)
        assert_tokens(by_token, dy, kind)


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("columns", COLUMNS)
def test_gradients_of_swiglu(kind: ScaleKind, columns: int, gate: Gate) -> None:
    for tokens in TOKENS:
        dy = torch.randn(tokens, columns).bfloat16().cuda()
        for gate_up in hidden_pairs(tokens, columns):
            d = swiglu_backward_bf16(dy, gate_up, gate=gate)
            by_row, by_token = swiglu_backward_quantise(dy, gate_up, kind, gate)
            assert_gradient(by_row, d, (columns, columns), kind)
            assert_tokens(by_token, d, kind)
        if columns % BLOCK == 0:
            tame, _ = hidden_pairs(tokens, columns)
            d = swiglu_backward_bf16(dy, tame, gate=gate)
            beside = QuantRows.empty(tokens, 2 * columns, d.device)
            to = beside.written(PRODUCTS.as_bytes)
            assert torch.equal(swiglu_backward_bf16(dy, tame, to, kind, gate), d)
            assert_rows(beside, d, kind)


def plain_gated(gate_up: torch.Tensor, gate: Gate) -> torch.Tensor:
    x, up = gate_up.chunk(2, -1)
    if gate == "gelu_tanh":
        return functional.gelu(x, approximate="tanh") * up
    if gate == "silu":
        return plain_swiglu(gate_up)
    x, up = x.clamp(max=SWIGLU_LIMIT), up.clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT)
    return x * torch.sigmoid(SWIGLU_ALPHA * x) * (up + 1)


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("columns", [128, 896, 12288])  # 896: a row that is no power of two
def test_swiglu_backward_against_fp64_and_the_specification(columns: int, gate: Gate) -> None:
    dy, gate_up = torch.randn(50, columns).bfloat16(), (3 * torch.randn(50, 2 * columns)).bfloat16()
    # Exp overflows, or vanishes.
    gate_up[0, :9] = torch.tensor([-200.0, -100.0, -50.0, 0.0, -0.0, 20.0, 50.0, 100.0, 200.0])
    ours = swiglu_backward_bf16(dy.cuda(), gate_up.cuda(), gate=gate).cpu()
    exact = gate_up.double().requires_grad_()
    plain_gated(exact, gate).backward(dy.double())
    assert exact.grad is not None
    error = (ours.double() - exact.grad).abs()
    # One rounding to BF16, and d gate's cancellation where the function is least: of SiLU at -1.28.
    allowed = 1e-6 if gate == "silu" else 1e-5
    assert (error <= 2**-8 * exact.grad.abs() + allowed).all()
    site = Site("gate_up_proj", "linear", "bf16", dgrad="bf16", wgrad="bf16")
    on_cpu = swiglu_backward(dy, gate_up, site, gate).rows
    assert isinstance(on_cpu, torch.Tensor)
    assert (ours != on_cpu).float().mean() < 2e-3  # the GPU's exp and division round differently
    alone = swiglu_backward_bf16(dy[7:8].cuda(), gate_up[7:8].cuda(), gate=gate)
    assert torch.equal(alone.cpu(), ours[7:8])


@pytest.mark.parametrize("kind", KINDS)
def test_groups_do_not_depend_on_the_rest_of_the_batch(kind: ScaleKind) -> None:
    dy, gate_up = torch.randn(640, 512).bfloat16().cuda(), hidden_pairs(640, 512)[0]
    part = slice(256, 384)
    for whole, alone in (
        (swiglu_both(gate_up, kind), swiglu_both(gate_up[part], kind)),
        (
            swiglu_backward_quantise(dy, gate_up, kind),
            swiglu_backward_quantise(dy[part], gate_up[part], kind),
        ),
    ):
        by_row, by_token = whole
        assert same(alone[0], QuantRows(by_row.values[part], by_row.scales[part]))
        assert same(alone[1], QuantRows(by_token.values[:, part], by_token.scales[:, 2:3]))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("parts", "k"), MATRICES)
def test_published_bytes(kind: ScaleKind, parts: tuple[int, ...], k: int) -> None:
    n = sum(parts)
    weight = QuantTensor.empty_blocks(n, k, torch.device("cuda"), parts)
    weight.values.view(torch.uint8).zero_()
    changed = torch.empty(weight.scales.shape, dtype=torch.int32, device="cuda")
    strange = torch.randn(n, k) * torch.exp(6 * torch.randn(n, k))
    strange[-1, -1], strange[0, 0], strange[n // 2, 3] = torch.nan, torch.inf, 0.0
    rows = torch.tensor(block_sizes(parts))
    block_of_row = torch.arange(len(rows)).repeat_interleave(rows)
    for master in (strange, torch.randn(n, k), torch.randn(n, k)):
        before = bits(weight.values)
        publish_blocks(master.cuda(), weight, kind, changed)
        expected = specification.quantise_blocks(master.bfloat16(), kind, parts)
        assert torch.equal(bits(weight.values), bits(expected.values))
        assert torch.equal(bits(weight.scales), bits(expected.scales))
        row, column = (before != bits(expected.values)).nonzero().unbind(1)
        ones, differs = torch.ones(len(row), dtype=torch.int32), torch.zeros_like(changed.cpu())
        differs.index_put_((block_of_row[row], column // BLOCK), ones, accumulate=True)
        assert torch.equal(changed.cpu(), differs)


@pytest.mark.parametrize(("parts", "k"), [*MATRICES, ((4096,), 12288), ((128,), 128)])
def test_a_transposed_weight_is_in_whole_blocks(parts: tuple[int, ...], k: int) -> None:
    """Whatever its bytes are."""
    weight = QuantTensor.empty_blocks(sum(parts), k, torch.device("cuda"), parts)
    weight.values.view(torch.uint8).random_(0, 256)
    weight.scales.normal_()
    turned = transpose_blocks(weight)
    assert turned.values.shape == (k, padded_size(parts))
    assert turned.values.is_contiguous() and turned.scales.is_contiguous()
    assert torch.equal(turned.scales, weight.scales.t())
    blocks = bits(weight.values).t().split(block_sizes(parts), 1)
    assert_whole_blocks(bits(turned.values), blocks, torch.ones(k, len(blocks), dtype=torch.bool))


def test_scales_of_a_short_group_are_in_the_layout_of_the_gemms() -> None:
    made = quantise_rows(bf16(5, 576))
    assert made.scales.shape == (5, num_blocks(576)) and made.scales.stride() == (1, 8)
