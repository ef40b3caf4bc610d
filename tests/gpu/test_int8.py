"""INT8 on a GPU: values, scales and products of the specification, whatever the batch and however a
product is cut up; gradients as near as the format allows; one function in rollout and training.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import get_args

import pytest
import torch

from isobit.config.precision import Preset
from isobit.kernels.backend import backend_of
from isobit.kernels.hopper.int8 import Dots, Persistent, Tiles
from isobit.kernels.operands import Gate, HeadWeight, LinearInput, LinearWeight, Operand
from isobit.kernels.routing import Routing
from isobit.kernels.spec import head as head_specification
from isobit.kernels.spec import linear as linear_specification
from isobit.kernels.spec import quantise as specification
from isobit.kernels.spec.experts import one_expert
from isobit.kernels.triton import pointwise
from isobit.kernels.triton.dispatch import gather, make_dispatch
from isobit.kernels.triton.grouped_gemm import ExpertMatrices
from isobit.kernels.triton.quantise import (
    publish_head,
    publish_rows,
    quantise_int8,
    rms_norm_int8,
    swiglu,
    swiglu_int8,
)
from isobit.models.policy import Policy
from isobit.precision.flow import Site
from isobit.precision.quant_tensor import Format, Int8Rows, ScaleKind, block_sizes
from isobit.proof.verify import VerifyOptions, verify_policy
from tests.gpu.kernels import (
    GPU,
    IS_HOPPER,
    add_rms_norm,
    cut_up,
    grouped_gemm_nt,
    int8_gemm_nt,
    linear_input,
    output_gradient,
    publish,
    quantise_tokens,
    republish,
    swiglu_backward,
    swiglu_input,
    swiglu_rows,
    transpose_experts,
    transposed_weight,
)
from tests.gpu.operands import (
    BF16_ROUNDING,
    KINDS,
    TENSOR_CORE,
    assert_whole_blocks,
    bf16,
    every_bf16,
    random_master,
)
from tests.int8_products import EXPECTED, PRODUCTS, digests
from tests.kernels.comparison import bits, relative_error, same

linear, dgrad, wgrad = GPU.linear, GPU.dgrad, GPU.wgrad
experts, experts_saving = GPU.experts, GPU.experts_saving

MakePolicy = Callable[..., Policy]

COLUMNS = (1, 7, 16, 80, 128, 576, 896, 1040, 1536, 4096, 5120, 12288, 28672)
MATRICES = [
    ((576, 192, 192), 576),  # SmolLM2-135M's q, k and v
    ((576,), 1536),
    ((1040, 1040), 576),
    ((256, 128, 72), 80),
    ((384, 512), 1024),
]
SIZES = [(1536, 1024), (257, 896), (1001, 960), (100, 200), (7, 77), (4096, 12288), (24576, 4096)]
ROWS = (1, 2, 7, 16, 17, 33, 64, 65, 100, 128, 129, 257, 300)


def site(parts: tuple[int, ...] = (), kind: ScaleKind = "power_of_two") -> Site:
    return Site("qkv_proj", "linear", "int8", kind, "e4m3", "e4m3", parts)


def on_cpu(x: Operand) -> Int8Rows:
    assert isinstance(x, Int8Rows)
    return Int8Rows(x.values.cpu(), x.scales.cpu())


def wild(rows: int, columns: int) -> torch.Tensor:
    """Magnitudes over many orders; rows of zeros, of tiny numbers, and some that are not finite."""
    x = (torch.randn(rows, columns) * torch.exp(5 * torch.randn(rows, columns))).bfloat16()
    x[0], x[rows // 4], x[rows // 3] = -0.0, torch.randn(columns) * 1e-30, 3e38
    x[rows // 2, -1], x[rows - 1, 0] = torch.inf, torch.nan
    return x


def published(parts: tuple[int, ...], k: int, kind: ScaleKind = "power_of_two") -> LinearWeight:
    made = site(parts, kind)
    return LinearWeight(made, publish(made, random_master(sum(parts), k)))


def of_host(weight: LinearWeight) -> LinearWeight:
    return LinearWeight(weight.site, on_cpu(weight.matrix))


@pytest.mark.parametrize("columns", COLUMNS)
def test_rows(columns: int) -> None:
    for rows in (1, 67, 300):
        x = wild(rows, columns)
        assert same(quantise_int8(x.cuda()), specification.quantise_int8(x))


def test_every_bf16_number() -> None:
    for case in every_bf16():
        for columns in (1, 16, 128):
            rows = case.view(-1, columns)
            assert same(quantise_int8(rows.cuda()), specification.quantise_int8(rows))


@pytest.mark.parametrize("columns", COLUMNS)
def test_norm_is_quantised_as_it_is_rounded_whether_kept_or_not(columns: int) -> None:
    weight = torch.randn(columns).bfloat16().cuda()
    h, x = torch.randn(70, columns).bfloat16().cuda(), wild(70, columns).cuda()
    new, norm, made = rms_norm_int8(h, x, weight, 1e-6, keep=True)
    assert norm is not None
    torch.testing.assert_close(new, h + x, rtol=0, atol=0, equal_nan=True)
    assert same(made, specification.quantise_int8(norm.cpu()))
    for rows in (slice(0, 70), slice(5, 6), slice(13, 40)):
        other, nothing, without = rms_norm_int8(h[rows], x[rows], weight, 1e-6, keep=False)
        assert nothing is None
        assert torch.equal(other.view(torch.int16), new[rows].view(torch.int16))
        assert same(without, Int8Rows(made.values[rows], made.scales[rows]))


@pytest.mark.parametrize("gate", get_args(Gate))
@pytest.mark.parametrize("columns", COLUMNS)
def test_swiglu_is_quantised_as_it_is_rounded(columns: int, gate: Gate) -> None:
    for gate_up in (3 * torch.randn(50, 2 * columns), wild(50, 2 * columns)):
        gate_up = gate_up.bfloat16().cuda()
        made = swiglu_int8(gate_up, gate=gate)
        assert same(made, specification.quantise_int8(swiglu(gate_up, gate).cpu()))
        alone = swiglu_int8(gate_up[7:8], gate=gate)
        assert same(alone, Int8Rows(made.values[7:8], made.scales[7:8]))


@pytest.mark.parametrize("wgrad_format", ["e4m3", "bf16"])
def test_inputs_with_what_wgrad_reads(wgrad_format: Format) -> None:
    made_site, columns = replace(site(), wgrad=wgrad_format), 576
    x, gate_up = bf16(300, columns), bf16(300, 2 * columns)
    weight, y = torch.ones(columns, device="cuda").bfloat16(), swiglu(gate_up)
    normed = add_rms_norm(x, None, weight, 1e-6, made_site, save=True)
    assert normed.norm is not None and normed.input is not None
    given = [
        (linear_input(x, made_site, save=True), x),
        (normed.input, normed.norm),
        (swiglu_input(gate_up, made_site, save=True), y),
    ]
    for made, read in given:
        assert same(made.read, specification.quantise_int8(read.cpu()))
        assert made.saved is not None
        if wgrad_format == "bf16":
            assert isinstance(made.saved, torch.Tensor) and torch.equal(made.saved, read)
            continue
        expected = quantise_tokens(read)
        assert not isinstance(made.saved, torch.Tensor)
        assert same(made.saved, expected)
    for without in (linear_input(x, made_site), swiglu_input(gate_up, made_site)):
        assert without.saved is None
    alone = add_rms_norm(x, None, weight, 1e-6, made_site)
    assert alone.norm is None and alone.input is not None
    assert same(alone.input.read, normed.input.read)


@pytest.mark.parametrize(("n", "k"), SIZES)
def test_products_are_the_specifications_in_every_batch(n: int, k: int) -> None:
    weight, x = published((n,), k), bf16(max(ROWS), k)
    whole = linear(linear_input(x, weight.site).read, weight)
    some = slice(None) if n * k < 2e6 else slice(0, 20)
    read = specification.quantise_int8(x[some].cpu())
    assert torch.equal(whole[some].cpu(), linear_specification.linear(read, of_host(weight)))
    for m in ROWS:
        assert torch.equal(linear(linear_input(x[:m], weight.site).read, weight), whole[:m]), m
        last = linear_input(x[-m:], weight.site).read
        assert torch.equal(linear(last, weight), whole[-m:]), m


def grouped(x: Operand, routing: Routing, weight: LinearWeight) -> torch.Tensor:
    count = routing.logits.shape[1]
    dispatch = make_dispatch(routing.experts, count)
    made = grouped_gemm_nt(gather(x, dispatch), ExpertMatrices.of(weight, count), dispatch)
    return made[dispatch.places.long()]


@pytest.mark.parametrize("name", list(PRODUCTS))
def test_digests_made_on_a_cpu(name: str) -> None:
    """SHA-256 of operands and products."""
    backend = backend_of(torch.device("cuda", torch.cuda.current_device()))
    assert digests(name, backend, grouped) == EXPECTED[name]


def test_a_large_batch_has_the_bits_of_a_small_one() -> None:
    for n, k in ((6144, 4096), (1000, 576), (4096, 12288)):
        weight, x = published((n,), k), bf16(8192, k)
        whole = linear(linear_input(x, weight.site).read, weight)
        for rows in (slice(0, 1), slice(4000, 4100), slice(8191, 8192), slice(1024, 3072)):
            one = linear_input(x[rows], weight.site).read
            assert torch.equal(linear(one, weight), whole[rows])


@pytest.mark.parametrize(("n", "k"), [(1536, 1024), (257, 912), (300, 1040)])
def test_products_do_not_depend_on_how_they_are_cut_up(n: int, k: int) -> None:
    weight = published((n,), k).matrix
    assert isinstance(weight, Int8Rows)
    for m in (1, 3, 8, 60, 300):
        x = quantise_int8(bf16(m, k))
        exact = int8_gemm_nt(x, weight, cut_up(m, n, k))
        for rows in (2, 8):
            assert m > 8 or torch.equal(int8_gemm_nt(x, weight, Dots(rows)), exact)
        for splits in (1, 2, 8):
            for block_m in (16, 32, 64):
                for block_n, depth in ((16, 512), (32, 256), (64, 128)):
                    cut = Tiles(block_m, block_n, splits, 3, swaps=True, depth=depth)
                    assert torch.equal(int8_gemm_nt(x, weight, cut), exact), cut
            for block_m, block_n in ((64, 64), (64, 128), (128, 128)):
                assert (
                    not IS_HOPPER
                    or splits > 1
                    or torch.equal(int8_gemm_nt(x, weight, Persistent(block_m, block_n, 3)), exact)
                )
            for block_m in (64, 128):
                cut = Tiles(block_m, 128, splits, 3, swaps=False)
                assert torch.equal(int8_gemm_nt(x, weight, cut), exact), cut


def test_largest_sums() -> None:
    """127 * 127 * K of either sign, and those that are rounded to FP32 halfway."""
    m, n, k = 5, 300, 12288
    for sign in (1, -1):
        x = torch.full((m, k), 127, dtype=torch.int8)
        w = torch.full((n, k), 127 * sign, dtype=torch.int8)
        w[torch.arange(n), torch.arange(n)] = 1
        scales = torch.rand(m), torch.rand(n)
        left, right = Int8Rows(x, scales[0]), Int8Rows(w, scales[1])
        exact = linear_specification.linear(left, LinearWeight(site(), right))
        left, right = (Int8Rows(one.values.cuda(), one.scales.cuda()) for one in (left, right))
        ours = int8_gemm_nt(left, right)
        assert torch.equal(ours.cpu(), exact)


def test_a_row_that_is_not_finite_is_alone() -> None:
    weight, x = published((300,), 576), bf16(70, 576)
    finite = linear(linear_input(x, weight.site).read, weight)
    x[3, 5], x[9, 7] = torch.nan, torch.inf
    made = linear(linear_input(x, weight.site).read, weight)
    others = [row for row in range(70) if row not in (3, 9)]
    assert made[[3, 9]].isnan().all() and torch.equal(made[others], finite[others])


@pytest.mark.parametrize("columns", [80, 576, 4096, 12288])
def test_publishing(columns: int) -> None:
    weight = LinearWeight(site(), publish(site(), torch.ones(300, columns, device="cuda")))
    matrix = weight.matrix
    assert isinstance(matrix, Int8Rows)
    places = matrix.values.data_ptr(), matrix.scales.data_ptr()
    strange = wild(300, columns).float() * (1 + 1e-3 * torch.randn(300, columns))
    for master in (strange, torch.randn(300, columns), torch.randn(300, columns)):
        before = matrix.values.cpu()
        changed = republish(weight, master.cuda())
        exact = specification.publish(site(), master)
        assert isinstance(exact, Int8Rows)
        assert same(matrix, exact)
        assert same(publish(site(), master.cuda()), exact)
        assert changed.dtype == torch.int64
        assert int(changed) == int((before != exact.values).sum()) > 0
        assert int(republish(weight, master.cuda())) == 0
        counted = torch.empty(300, dtype=torch.int32, device="cuda")
        publish_rows(torch.zeros_like(master).cuda(), matrix, counted)
        assert torch.equal(counted.cpu(), (exact.values != 0).sum(1).int())
    assert places == (matrix.values.data_ptr(), matrix.scales.data_ptr())
    for first, last in ((0, 100), (100, 300)):
        republish(weight.rows(first, last), strange[first:last].cuda())
    assert same(matrix, specification.publish(site(), strange))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("parts", "k"), MATRICES)
def test_what_dgrad_multiplies_by_is_the_specifications(
    parts: tuple[int, ...], k: int, kind: ScaleKind
) -> None:
    for broken in (False, True):
        master = torch.randn(sum(parts), k, device="cuda")
        if broken:
            master[-1, -1] = torch.nan
        matrix = publish(site(parts), master)
        assert isinstance(matrix, Int8Rows)
        turned = transposed_weight(matrix, parts, kind)
        wide = specification.dequantise_int8(on_cpu(matrix))
        exact = specification.quantise_blocks(wide, kind, parts)
        assert same(turned.scales, exact.scales.t())
        blocks = bits(exact.values).t().split(block_sizes(parts), 1)
        everywhere = torch.ones(k, len(blocks), dtype=torch.bool)
        assert_whole_blocks(bits(turned.values), blocks, everywhere)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("parts", "k"), MATRICES)
def test_dgrad(parts: tuple[int, ...], k: int, kind: ScaleKind) -> None:
    weight = published(parts, k, kind)
    in_blocks = linear_specification.in_e4m3(of_host(weight))
    exact_weight = linear_specification.dequantised(in_blocks).double()
    for m in (1, 100, 257):
        dy = bf16(m, sum(parts))
        rows = output_gradient(dy, weight.site).rows
        ours = dgrad(rows, weight)
        assert ours.shape == (m, k) and ours.dtype == torch.bfloat16
        expected = specification.quantise_rows(dy.cpu(), kind, parts)
        read = linear_specification.dequantise_rows(expected).double()
        assert relative_error(ours, read @ exact_weight) < BF16_ROUNDING
        theirs = linear_specification.dgrad(expected, of_host(weight))
        exact = dy.cpu().double() @ exact_weight
        assert relative_error(ours, exact) < 1.02 * relative_error(theirs, exact)
        assert torch.equal(ours, dgrad(rows, weight))


@pytest.mark.parametrize("wgrad_format", ["e4m3", "bf16"])
def test_wgrad(wgrad_format: Format) -> None:
    parts, k = MATRICES[0]
    made_site = replace(site(parts), wgrad=wgrad_format)
    x, dy = bf16(300, k), bf16(300, sum(parts))
    saved, d = linear_input(x, made_site, save=True).saved, output_gradient(dy, made_site)
    assert saved is not None
    start = torch.randn(sum(parts), k, device="cuda")
    grad, product = start.clone(), torch.zeros_like(start)
    wgrad(d.tokens, saved, grad, made_site)
    wgrad(d.tokens, saved, product, made_site)
    host = linear_specification.output_gradient(dy.cpu(), made_site).tokens
    theirs = linear_specification.input_saved(x.cpu(), made_site)
    wide = [linear_specification.dequantise_tokens(one).double() for one in (host, theirs)]
    assert relative_error(product, wide[0].t() @ wide[1]) < TENSOR_CORE
    assert wgrad_format == "bf16" or torch.equal(grad, start + product)  # a finished sum


@pytest.mark.parametrize("kind", KINDS)
def test_gradient_of_swiglu(kind: ScaleKind) -> None:
    made_site, columns = site((576, 576), kind), 576
    dy, gate_up = bf16(200, columns), bf16(200, 2 * columns)
    ours = swiglu_backward(dy, gate_up, made_site)
    theirs = swiglu_backward(dy, gate_up, replace(made_site, forward="e4m3"))
    for mine, other in ((ours.rows, theirs.rows), (ours.tokens, theirs.tokens)):
        assert not isinstance(mine, torch.Tensor) and not isinstance(other, torch.Tensor)
        assert torch.equal(mine.values.view(torch.uint8), other.values.view(torch.uint8))
        assert torch.equal(mine.scales, other.scales)


@pytest.mark.parametrize("columns", [12288, 576, 40])
def test_gradient_of_swiglu_in_int8(columns: int) -> None:
    """One kernel makes what two do."""
    made_site = replace(site((columns, columns)), dgrad="int8", wgrad="int8")
    dy, gate_up = bf16(200, columns), bf16(200, 2 * columns)
    dy[7], dy[9, 1], gate_up[11, 2] = 0.0, torch.nan, torch.inf
    ours = swiglu_backward(dy, gate_up, made_site)
    theirs = output_gradient(pointwise.swiglu_backward_bf16(dy, gate_up), made_site)
    assert same(ours.rows, theirs.rows)
    assert same(ours.tokens, theirs.tokens)


@pytest.mark.parametrize(
    ("count", "top_k", "width", "hidden"), [(16, 4, 256, 512), (6, 3, 80, 320), (128, 8, 768, 2048)]
)
def test_experts(count: int, top_k: int, width: int, hidden: int) -> None:
    """Each one's rows are those of a linear of its own, and no token sees the others."""
    gate_up, down = published((width,) * (2 * count), hidden), published((hidden,) * count, width)
    tokens = 300
    x, logits = bf16(tokens, hidden), torch.randn(tokens, count, device="cuda")
    chosen = logits.argsort(1, descending=True)[:, :top_k].int()
    routing = Routing(chosen.contiguous(), torch.rand(tokens, top_k, device="cuda"), logits)
    read = linear_input(x, gate_up.site).read
    dispatch = make_dispatch(routing.experts, count)
    matrices = [ExpertMatrices.of(weight, count) for weight in (gate_up, down)]
    made = grouped_gemm_nt(gather(read, dispatch), matrices[0], dispatch)
    outer = grouped_gemm_nt(swiglu_rows(made, dispatch, "int8", False), matrices[1], dispatch)
    turned = transpose_experts(matrices[0], gate_up.site)
    assert turned.scales is not None and isinstance(read, Int8Rows)
    for index in range(0, count, max(1, count // 6)):
        own, narrow = (one_expert(weight, index, count)[0] for weight in (gate_up, down))
        token, rank = (routing.experts == index).nonzero().unbind(1)
        rows = dispatch.places[token, rank].long()
        inner = linear(Int8Rows(read.values[token], read.scales[token]), own)
        assert torch.equal(made[rows], inner)
        assert torch.equal(outer[rows], linear(swiglu_int8(inner), narrow))
        assert isinstance(own.matrix, Int8Rows)
        alone = transposed_weight(own.matrix, own.site.parts)
        assert torch.equal(turned.values[index].view(torch.uint8), alone.values.view(torch.uint8))
        assert torch.equal(turned.scales[index], alone.scales)
    whole = experts(read, routing, gate_up, down)
    assert whole.isfinite().all()
    for m in (1, 7, 64, 257):
        part = Routing(routing.experts[:m], routing.weights[:m], routing.logits[:m])
        given = LinearInput(linear_input(x[:m], gate_up.site).read, x[:m])
        assert torch.equal(experts(given.read, part, gate_up, down), whole[:m])
        assert torch.equal(experts_saving(given, part, gate_up, down)[0], whole[:m])


def test_no_log_probability_differs(shape: str, make_policy: MakePolicy) -> None:
    preset: Preset = "int8-linear"
    options = VerifyOptions(prompts=10, samples=3, max_new_tokens=24)
    result = verify_policy(make_policy(shape, preset), options)
    assert result.comparison.tokens_differing == 0 and result.missing == ()
    assert result.comparison.routings_differing == 0
    assert result.comparison.tokens_compared > 10_000


HEAD = Site("lm_head", "head", "int8")


@pytest.mark.parametrize(
    ("drawn", "rows", "columns"), [(99, 128, 256), (5001, 5100, 576), (5001, 5001, 1000)]
)
def test_an_int8_head_has_the_specifications_logits_in_every_batch(
    drawn: int, rows: int, columns: int
) -> None:
    """FP32 logits: one sum of integers and two multiplications."""
    generator = torch.Generator("cuda").manual_seed(rows)
    table = torch.randn(rows, columns, device="cuda", generator=generator).bfloat16()
    hidden = torch.randn(300, columns, device="cuda", generator=generator).bfloat16()
    made = publish_head(HEAD, torch.zeros_like(table))
    assert made.int8 is not None
    again = publish_head(HEAD, table, made)
    assert again.int8 is not None and again.int8.values is made.int8.values
    exact = specification.publish_head(HEAD, table.cpu())
    assert exact.int8 is not None
    assert same(again.int8, exact.int8)
    wanted = head_specification.head_logits(hidden.cpu(), exact, drawn)
    for count in (1, 7, 64, 129, 300):
        assert torch.equal(GPU.head_logits(hidden[:count], again, drawn).cpu(), wanted[:count])


def test_gradients_of_an_int8_head_are_the_tables_at_its_own_logits() -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    table = (torch.randn(5001, 512, device="cuda", generator=generator) / 8).bfloat16()
    hidden = torch.randn(200, 512, device="cuda", generator=generator).bfloat16()
    d = torch.randn(200, device="cuda", generator=generator)
    targets, temperatures = torch.arange(200, device="cuda") * 17, torch.full((200,), 0.7).cuda()
    weight = publish_head(HEAD, table)
    p = torch.softmax(GPU.head_logits(hidden, weight).double() / 0.7, 1)
    d_logits = (torch.nn.functional.one_hot(targets, 5001) - p) * d.double()[:, None] / 0.7
    grad = torch.zeros(5001, 512, device="cuda")
    made = GPU.token_log_probs_backward(hidden, weight, targets, temperatures, d, grad)
    for ours, wanted in ((made, d_logits @ table.double()), (grad, d_logits.t() @ hidden.double())):
        assert (ours.double() - wanted).norm() < 4e-3 * wanted.norm()
    of_table = GPU.token_log_probs(hidden, HeadWeight(table), targets, temperatures)[0]
    assert not torch.equal(GPU.token_log_probs(hidden, weight, targets, temperatures)[0], of_table)
