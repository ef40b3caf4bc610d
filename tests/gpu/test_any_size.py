"""Matrices whose sizes are no multiples of 128 on a GPU: the specification's bytes, rows that do
not depend on the batch, parts multiplied as if each stood alone, and gradients as near as the
format allows.
"""

import pytest
import torch

from isobit.kernels.hopper.device_functions import padded_size
from isobit.kernels.hopper.gemm import (
    BackEnd,
    bf16_gemm_nt,
    fp8_gemm_nt,
    why_not_deep_gemm,
)
from isobit.kernels.hopper.linear import (
    dgrad,
    fp8_gemm_tn,
    linear,
    linear_input,
    output_gradient,
    transpose_blocks,
    wgrad,
)
from isobit.kernels.hopper.pointwise import swiglu_backward_bf16, swiglu_backward_quantise
from isobit.kernels.hopper.quantise import (
    QuantRows,
    publish,
    publish_blocks,
    quantise_gradient,
    quantise_rows,
    republish,
    rms_norm_quantise,
    swiglu,
    swiglu_quantise,
)
from isobit.kernels.hopper.token_groups import (
    gradient_both,
    quantise_both,
    quantise_tokens,
    swiglu_both,
    swiglu_tokens,
)
from isobit.kernels.operands import LinearWeight
from isobit.kernels.spec import linear as linear_specification
from isobit.kernels.spec import quantise as specification
from isobit.kernels.spec.linear import fp8_gemm_nt as gemm_specification
from isobit.precision.flow import Site
from isobit.precision.quant_tensor import BLOCK, QuantTensor, ScaleKind, block_sizes, num_blocks

KINDS: list[ScaleKind] = ["power_of_two", "fp32"]
BACK_ENDS: list[BackEnd] = (
    ["triton", "scaled_mm"] if why_not_deep_gemm() else ["triton", "scaled_mm", "deep_gemm"]
)
INVARIANT = [(b, k) for b in BACK_ENDS for k in KINDS if (b, k) != ("scaled_mm", "fp32")]
WGRAD_BACK_ENDS: list[BackEnd] = ["triton"] if why_not_deep_gemm() else ["deep_gemm", "triton"]
COLUMNS = (16, 80, 576, 960, 1040, 1536)
ROWS = (1, 7, 64, 129, 500)
MATRICES = [
    ((576, 192, 192), 576),  # SmolLM2-135M's q, k and v
    ((960, 320, 320), 960),  # and those of 360M
    ((576,), 1536),
    ((1040, 1040), 576),
    ((256, 128, 72), 80),  # one grid until the last part
    ((8, 136, 256, 40), 1040),
]
TENSOR_CORE = 2e-3  # of a norm: FP8 tensor cores keep 14 bits within a group
BF16_ROUNDING = 3e-3  # 1.7e-3, and the above


def bits(x: torch.Tensor) -> torch.Tensor:
    """On the host, as integers: a NaN equals itself."""
    return x.contiguous().view(torch.uint8 if x.itemsize == 1 else torch.int32).cpu()


def assert_rows(ours: QuantRows, x: torch.Tensor, kind: ScaleKind) -> None:
    expected = specification.quantise_rows(x.cpu(), kind)
    assert torch.equal(bits(ours.values), bits(expected.values))
    assert torch.equal(bits(ours.scales), bits(expected.scales))


def assert_tokens(ours: QuantRows, x: torch.Tensor, kind: ScaleKind) -> None:
    expected = specification.quantise_tokens(x.cpu(), kind)
    assert torch.equal(bits(ours.values)[:, : x.shape[0]], bits(expected.values.t()))
    assert torch.equal(bits(ours.scales), bits(expected.scales.t()))


def assert_gradient(
    ours: QuantRows, dy: torch.Tensor, parts: tuple[int, ...], kind: ScaleKind
) -> None:
    """The specification's bytes, each part in whole blocks with zeros behind."""
    expected = specification.quantise_rows(dy.cpu(), kind, parts)
    assert torch.equal(bits(ours.scales), bits(expected.scales))
    values, theirs = bits(ours.values), bits(expected.values).split(block_sizes(parts), 1)
    assert values.shape == (dy.shape[0], padded_size(parts))
    finite = expected.scales.isfinite()
    for i, block in enumerate(theirs):
        whole = values[:, BLOCK * i : BLOCK * (i + 1)]
        assert torch.equal(whole[:, : block.shape[1]], block)
        assert not whole[finite[:, i], block.shape[1] :].any()


def wild(rows: int, columns: int) -> torch.Tensor:
    """Magnitudes over many orders, zeros of both signs, an infinity and a NaN at the very edge."""
    x = (torch.randn(rows, columns) * torch.exp(6 * torch.randn(rows, columns))).bfloat16()
    x[:, 0], x[:, 1], x[:, 2] = 0.0, -0.0, 1e-38
    x[rows // 2, 5], x[rows - 1, columns - 1] = torch.inf, torch.nan
    return x


def bf16(rows: int, columns: int) -> torch.Tensor:
    spread = torch.exp(torch.randn(rows, columns, device="cuda"))
    return (torch.randn(rows, columns, device="cuda") * spread).bfloat16()


def published(
    parts: tuple[int, ...], k: int, kind: ScaleKind = "power_of_two"
) -> tuple[QuantTensor, torch.Tensor]:
    """A weight, and its master."""
    n = sum(parts)
    master = torch.randn(n, k, device="cuda") * torch.exp(2 * torch.randn(n, 1, device="cuda"))
    weight = QuantTensor.empty_blocks(n, k, master.device, parts)
    publish_blocks(master, weight, kind)
    return weight, master


def fp64(x: QuantRows) -> torch.Tensor:
    """What a GEMM reads, its last group short or whole."""
    scales = x.scales.double().repeat_interleave(BLOCK, 1)
    return x.values.double() * scales[:, : x.values.shape[1]]


def relative(ours: torch.Tensor, exact: torch.Tensor) -> float:
    return float((ours.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("columns", COLUMNS)
def test_quantisers_of_rows_and_tokens(kind: ScaleKind, columns: int) -> None:
    for rows in (1, 67, 300):
        x = wild(rows, columns)
        assert_rows(quantise_rows(x.cuda(), kind), x, kind)
        by_row, by_token = quantise_both(x.cuda(), kind)
        assert_rows(by_row, x, kind)
        for made in (by_token, quantise_tokens(x.cuda(), kind)):
            assert_tokens(made, x, kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("columns", COLUMNS)
def test_fused_quantisers(kind: ScaleKind, columns: int) -> None:
    weight = torch.randn(columns).bfloat16().cuda()
    for rows in (1, 67):
        h, x = wild(rows, columns).cuda(), torch.randn(rows, columns).bfloat16().cuda()
        _, norm, made = rms_norm_quantise(h, x, weight, 1e-6, kind, keep=True)
        assert norm is not None and made is not None
        assert_rows(made, norm, kind)
        for gate_up in (3 * torch.randn(rows, 2 * columns), wild(rows, 2 * columns)):
            gate_up = gate_up.bfloat16().cuda()
            y = swiglu(gate_up)
            by_row, by_token = swiglu_both(gate_up, kind)
            assert_rows(swiglu_quantise(gate_up, kind), y, kind)
            assert_rows(by_row, y, kind)
            assert_tokens(by_token, y, kind)
            assert_tokens(swiglu_tokens(gate_up, kind), y, kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("parts", "k"), MATRICES)
def test_output_gradients(kind: ScaleKind, parts: tuple[int, ...], k: int) -> None:
    for rows in (1, 67, 300):
        dy = wild(rows, sum(parts))
        assert_gradient(quantise_gradient(dy.cuda(), parts, kind), dy, parts, kind)
        by_row, by_token = gradient_both(dy.cuda(), parts, kind)
        assert_gradient(by_row, dy, parts, kind)
        assert_tokens(by_token, dy, kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("columns", COLUMNS)
def test_gradients_of_swiglu(kind: ScaleKind, columns: int) -> None:
    for rows in (1, 300):
        dy = torch.randn(rows, columns).bfloat16().cuda()
        for gate_up in (3 * torch.randn(rows, 2 * columns), wild(rows, 2 * columns)):
            gate_up = gate_up.bfloat16().cuda()
            d = swiglu_backward_bf16(dy, gate_up)
            by_row, by_token = swiglu_backward_quantise(dy, gate_up, kind)
            assert_gradient(by_row, d, (columns, columns), kind)
            assert_tokens(by_token, d, kind)


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


@pytest.mark.parametrize(("parts", "k"), MATRICES)
def test_a_transposed_weight_is_in_whole_blocks(parts: tuple[int, ...], k: int) -> None:
    weight, _ = published(parts, k)
    turned = transpose_blocks(weight)
    assert turned.values.shape == (k, padded_size(parts))
    assert torch.equal(turned.scales, weight.scales.t())
    values, blocks = bits(turned.values), bits(weight.values).t().split(block_sizes(parts), 1)
    for i, block in enumerate(blocks):
        whole = values[:, BLOCK * i : BLOCK * (i + 1)]
        assert torch.equal(whole[:, : block.shape[1]], block)
        assert not whole[:, block.shape[1] :].any()


@pytest.mark.parametrize(("back_end", "kind"), INVARIANT)
@pytest.mark.parametrize(("parts", "k"), MATRICES)
def test_rows_do_not_depend_on_the_batch(
    back_end: BackEnd, kind: ScaleKind, parts: tuple[int, ...], k: int
) -> None:
    x, (weight, _) = bf16(1024, k), published(parts, k, kind)
    whole = fp8_gemm_nt(quantise_rows(x, kind), weight, kind, back_end)
    for m in ROWS:
        made = fp8_gemm_nt(quantise_rows(x[:m], kind), weight, kind, back_end)
        assert torch.equal(made, whole[:m]), m


@pytest.mark.parametrize("back_end", BACK_ENDS)
@pytest.mark.parametrize(("parts", "k"), MATRICES)
def test_a_part_has_the_bits_that_it_has_alone(
    back_end: BackEnd, parts: tuple[int, ...], k: int
) -> None:
    weight, master = published(parts, k)
    for m in (1, 300):
        x = quantise_rows(bf16(m, k))
        whole = fp8_gemm_nt(x, weight, "power_of_two", back_end)
        assert torch.equal(whole, fp8_gemm_nt(x, weight, "power_of_two", "triton"))
        alone: list[torch.Tensor] = []
        for part in master.split(parts):
            one = QuantTensor.empty_blocks(len(part), k, part.device)
            publish_blocks(part.contiguous(), one)
            alone.append(fp8_gemm_nt(x, one, "power_of_two", back_end))
        assert torch.equal(whole, torch.cat(alone, 1))


@pytest.mark.parametrize("back_end", BACK_ENDS)
@pytest.mark.parametrize(("parts", "k"), MATRICES)
def test_values_against_the_specification(
    back_end: BackEnd, parts: tuple[int, ...], k: int
) -> None:
    x = bf16(129, k)
    weight, master = published(parts, k)
    exact = gemm_specification(
        specification.quantise_rows(x.cpu()),
        specification.quantise_blocks(master.bfloat16().cpu(), parts=parts),
    )
    ours = fp8_gemm_nt(quantise_rows(x), weight, "power_of_two", back_end).cpu()
    assert relative(ours, exact.double()) < BF16_ROUNDING


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("parts", "k"), MATRICES)
def test_dgrad(kind: ScaleKind, parts: tuple[int, ...], k: int) -> None:
    """Against FP64 over the very operands; and no worse than the specification's against dY W."""
    site = Site("qkv_proj", "linear", "e4m3", kind, "e4m3", "e4m3", parts)
    weight, master = published(parts, k, kind)
    on_gpu = LinearWeight(site, weight)
    published_on_cpu = specification.quantise_blocks(master.bfloat16().cpu(), kind, parts)
    on_cpu = LinearWeight(site, published_on_cpu)
    exact_weight = linear_specification.dequantised(on_cpu).double()
    for m in (1, 100, 257):
        dy = bf16(m, sum(parts))
        rows = output_gradient(dy, site).rows
        ours = dgrad(rows, on_gpu)
        assert ours.shape == (m, k) and ours.dtype == torch.bfloat16
        expected = specification.quantise_rows(dy.cpu(), kind, parts)
        read = linear_specification.dequantise_rows(expected).double()
        assert relative(ours.cpu(), read @ exact_weight) < BF16_ROUNDING
        theirs = linear_specification.dgrad(expected, on_cpu)
        exact = dy.cpu().double() @ exact_weight
        assert relative(ours.cpu(), exact) < 1.02 * relative(theirs, exact)
        assert torch.equal(ours, dgrad(rows, on_gpu))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("parts", "k"), MATRICES)
def test_wgrad(kind: ScaleKind, parts: tuple[int, ...], k: int) -> None:
    n = sum(parts)
    for tokens in (1, 300, 1000):
        dy, x = quantise_tokens(bf16(tokens, n), kind), quantise_tokens(bf16(tokens, k), kind)
        exact = fp64(dy) @ fp64(x).t()
        start = torch.randn(n, k, device="cuda")
        made: list[torch.Tensor] = []
        for back_end in WGRAD_BACK_ENDS:
            product, gradient = torch.zeros(n, k, device="cuda"), start.clone()
            fp8_gemm_tn(dy, x, product, back_end)
            assert relative(product, exact) < TENSOR_CORE
            fp8_gemm_tn(dy, x, gradient, back_end)
            assert torch.equal(gradient, start + product)  # a finished sum, added once
            made.append(product)
        if kind == "power_of_two":
            assert all(torch.equal(product, made[0]) for product in made)


def test_a_linear_with_its_backward_in_bf16_wgrad() -> None:
    parts, k = MATRICES[0]
    site = Site("qkv_proj", "linear", "e4m3", "power_of_two", "e4m3", "bf16", parts)
    master = torch.randn(sum(parts), k, device="cuda")
    weight = LinearWeight(site, publish(site, master))
    x, dy = bf16(77, k), bf16(77, sum(parts))
    given = linear_input(x, site, save=True)
    assert linear(given.read, weight).shape == dy.shape
    made = output_gradient(dy, site)
    assert given.saved is not None and made.tokens is dy
    grad = torch.zeros_like(master)
    wgrad(made.tokens, given.saved, grad)
    assert relative(grad, dy.double().t() @ x.double()) < 1e-5
    assert dgrad(made.rows, weight).shape == x.shape
    assert int(republish(weight, master)) == 0 < int(republish(weight, -master))


@pytest.mark.parametrize(("n", "k"), [(1000, 576), (49152, 576), (320, 960), (192, 576)])
def test_bf16_rows_do_not_depend_on_the_batch(n: int, k: int) -> None:
    x, weight = bf16(1024, k), bf16(n, k)
    for dtype in (torch.float32, torch.bfloat16):
        whole = bf16_gemm_nt(x, weight, dtype)
        for m in ROWS:
            assert torch.equal(bf16_gemm_nt(x[:m], weight, dtype), whole[:m]), m


def test_scales_of_a_short_group_are_in_the_layout_of_the_gemms() -> None:
    made = quantise_rows(bf16(5, 576))
    assert made.scales.shape == (5, num_blocks(576)) and made.scales.stride() == (1, 8)
