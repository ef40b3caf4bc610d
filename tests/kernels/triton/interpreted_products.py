"""Run in Triton's interpreter by test_interpreted.py: products in BF16 and E4M3, forward and
backward, dense and of experts, are exact where FP32 holds their sums, whatever the number of rows;
operands are the specification's.
"""

from dataclasses import replace
from typing import Any, get_args

import torch
import triton
import triton.language as tl
from torch.nn.functional import pad
from triton.runtime import interpreter

from isobit.kernels.operands import Gate, LinearInput, LinearWeight
from isobit.kernels.spec import linear as specification
from isobit.kernels.spec import pointwise as spec_pointwise
from isobit.kernels.spec.experts import one_expert
from isobit.kernels.spec.quantise import decode_e4m3, quantise_int8
from isobit.kernels.triton import (
    experts,
    grouped_gemm,
    int8_backward,
    linear,
    pointwise,
    quantise,
    token_groups,
)
from isobit.kernels.triton.dispatch import Dispatch, GroupedRows, gather, make_dispatch
from isobit.kernels.triton.gemm import bf16_gemm_nn, bf16_gemm_nt
from isobit.kernels.triton.grouped_gemm import ExpertMatrices, grouped_gemm_nt
from isobit.kernels.triton.products import PortableProducts
from isobit.kernels.triton.quantise import QuantRows, publish
from isobit.kernels.triton.transpose import transpose_experts
from isobit.kernels.triton.wgrad import bf16_gemm_tn
from isobit.precision.flow import Site
from isobit.precision.quant_tensor import BLOCK, Format, Int8Rows, QuantTensor, block_sizes
from tests.kernels.comparison import relative_error, same
from tests.kernels.hopper.interpreted_adapters import dot as dot_of_bf16
from tests.kernels.hopper.interpreted_int8 import _four_sigmoids
from tests.kernels.hopper.interpreted_int8_backward import turned
from tests.kernels.triton.interpreted_e4m3 import prepare as prepare_e4m3
from tests.kernels.triton.interpreted_gluon import interpret

GATES: tuple[Gate, ...] = get_args(Gate)


def prepare() -> None:
    prepare_e4m3()
    builder: Any = interpreter.InterpreterBuilder
    if builder.create_dot is not dot:
        builder.create_dot = dot
    interpret(token_groups, pointwise, widen=lambda x: x.to(tl.float32))
    pointwise.four_sigmoids = quantise.four_sigmoids = _four_sigmoids
    torch.manual_seed(0)


@triton.jit
def amax_bits(x, axis: tl.constexpr):
    """By integers, whose maximum the interpreter takes at once."""
    return tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis)


_dot = interpreter.InterpreterBuilder.create_dot


def dot(builder: Any, a: Any, b: Any, sums: Any, *options: Any) -> Any:
    if a.dtype.scalar == tl.bfloat16:
        return dot_of_bf16(builder, a, b, sums, *options)
    return _dot(builder, a, b, sums, *options)


def integers(*shape: int, most: int = 3) -> torch.Tensor:
    return torch.randint(-most, most + 1, shape).bfloat16()


def fp64(x: QuantRows) -> torch.Tensor:
    scales = x.scales.double().repeat_interleave(BLOCK, 1)
    return decode_e4m3(x.values).double() * scales[:, : x.values.shape[1]]


def site_of(parts: tuple[int, ...], format: Format) -> Site:
    backward: Any = None if format == "bf16" else format
    return Site("qkv_proj", "linear", format, "power_of_two", backward, backward, parts)


def check_bf16(m: int, n: int, k: int) -> None:
    """In tiles of every size, of matrices that are columns of larger ones."""
    a, b, wide = integers(m, k), integers(n, k), integers(m, k + 24)
    exact = a.double() @ b.double().t()
    turned_b = b.t().contiguous()
    for rows in (slice(0, m), slice(2, 3), slice(1, 1 + m // 2)):
        for dtype in (torch.bfloat16, torch.float32):
            assert torch.equal(bf16_gemm_nt(a[rows], b, dtype), exact[rows].to(dtype))
            assert torch.equal(bf16_gemm_nn(a[rows], turned_b, dtype), exact[rows].to(dtype))
    columns = wide[:, 8 : k + 8]
    assert torch.equal(bf16_gemm_nn(columns, turned_b).double(), rounded(columns, b))
    grad = torch.randint(-9, 10, (k, n)).float()
    dx, before = integers(m, n), grad.clone()
    bf16_gemm_tn(columns, dx, grad, 0.5)
    assert torch.equal(grad, before + 0.5 * (columns.float().t() @ dx.float()))


def rounded(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return (a.double() @ b.double().t()).bfloat16().double()


def check_e4m3_backward(
    parts: tuple[int, ...], columns: int, tokens: int, kinds: tuple[bool, ...] = (True, False)
) -> None:
    """Exact of integers; of other numbers as near to FP64 as the specification's FP32."""
    site = site_of(parts, "e4m3")
    for exactly in kinds:
        dy, x = (make(tokens, width, exactly) for width in (sum(parts), columns))
        master = make(sum(parts), columns, exactly).float()
        matrix = publish(site, master, as_bytes=True)
        assert isinstance(matrix, QuantTensor)
        weight = LinearWeight(site, matrix)
        made = linear.output_gradient(dy, site, as_bytes=True)
        exact = specification.output_gradient(dy, site)
        saved = linear.linear_input(x, site, save=True, as_bytes=True).saved
        assert isinstance(saved, QuantRows)
        assert isinstance(made.rows, QuantRows)
        assert isinstance(made.tokens, QuantRows)
        assert isinstance(exact.rows, QuantTensor)
        assert_tokens(made.tokens, exact.tokens)
        assert_tokens(saved, specification.input_saved(x, site))
        blocks = exact.rows.values.view(torch.uint8).split(block_sizes(parts), 1)
        in_blocks = torch.cat([pad(one, (0, -one.shape[1] % BLOCK)) for one in blocks], 1)
        assert torch.equal(made.rows.values.view(torch.uint8), in_blocks)
        assert same(made.rows.scales.contiguous(), exact.rows.scales)
        d_x = linear.dgrad(PortableProducts, made.rows, weight)
        true = specification.dequantise_rows(exact.rows).double()
        true = true @ specification.dequantised(weight).double()
        grad, theirs = torch.ones(sum(parts), columns), torch.ones(sum(parts), columns)
        linear.wgrad(PortableProducts, made.tokens, saved, grad, site)
        specification.wgrad(exact.tokens, specification.input_saved(x, site), theirs, site)
        exact_grad = 1 + fp64(made.tokens) @ fp64(saved).t()
        if exactly:
            assert torch.equal(d_x, true.bfloat16())
            assert torch.equal(grad, exact_grad.float())
        else:
            yardstick = specification.dgrad(exact.rows, weight)
            assert relative_error(d_x, true) <= 1.02 * relative_error(yardstick, true)
            assert relative_error(grad, exact_grad) <= 2 * relative_error(theirs, exact_grad)


def make(rows: int, columns: int, exactly: bool) -> torch.Tensor:
    """BF16: integers that E4M3 holds, times powers of two for each 128 rows, or any numbers."""
    if exactly:
        return integers(rows, columns, most=15)
    return (torch.randn(rows, columns) * torch.exp(3 * torch.randn(rows, columns))).bfloat16()


def assert_tokens(ours: QuantRows, theirs: Any) -> None:
    """The specification's groups of tokens, transposed, with zeros beyond the last token."""
    tokens = len(theirs.values)
    values = ours.values.view(torch.uint8)
    assert torch.equal(values[:, :tokens], theirs.values.view(torch.uint8).t())
    assert not values[:, tokens:].any()
    assert same(ours.scales.contiguous(), theirs.scales.t().contiguous())


def check_experts(format: Format, width: int, columns: int, tokens: int) -> None:
    """Each expert has the products of its own linear; the last has no tokens, and adds nothing."""
    count, parts = 3, (width, width)
    own, n = site_of(parts, format), 2 * width
    site = replace(own, parts=parts * count)
    matrix = publish(site, integers(count * n, columns, most=15).float(), as_bytes=True)
    dy, x = integers(tokens, n, most=15), integers(tokens, columns, most=15)
    dispatch = make_dispatch(torch.randint(0, count - 1, (tokens, 1)).int(), count)
    d_rows, rows = (gather(side, dispatch, pads=True).values for side in (dy, x))
    weight = LinearWeight(site, matrix)
    matrices = ExpertMatrices.of(weight, count)
    read = linear.linear_input(rows, own, save=True, as_bytes=True)
    made = grouped_gemm_nt(rows_of(read.read, dispatch), matrices, dispatch)
    gradient = linear.output_gradient(d_rows, own, as_bytes=True)
    if format == "int8":
        assert isinstance(matrix, Int8Rows)
        w_t = turned(matrix, parts, count)
        d_x = grouped_gemm.int8_dgrad(gradient.rows, w_t, dispatch)  # type: ignore[arg-type]
    else:
        w_t = transpose_experts(matrices, own, as_bytes=True)
        d_x = grouped_gemm_nt(rows_of(gradient.rows, dispatch), w_t, dispatch)
    before = torch.ones(count * n, columns)
    grad = before.clone()
    assert read.saved is not None
    linear.wgrad(PortableProducts, gradient.tokens, read.saved, grad, own, dispatch)
    assert dispatch.experts is not None
    labels = dispatch.experts[dispatch.places[:, 0].long()]
    for index in range(count):
        token = (labels == index).nonzero()[:, 0]
        place, its_own = dispatch.places[token, 0].long(), one_expert(weight, index, count)[0]
        its_own = replace(its_own, site=own)
        theirs, rows_of_it = before[index * n : (index + 1) * n], grad[index * n : (index + 1) * n]
        if not len(token):
            assert torch.equal(theirs, rows_of_it)
            continue
        alone = linear.linear_input(x[token], own, save=True, as_bytes=True)
        assert torch.equal(made[place], linear.linear(PortableProducts, alone.read, its_own))
        d_alone = linear.output_gradient(dy[token], own, as_bytes=True)
        if format == "int8":
            assert isinstance(its_own.matrix, Int8Rows)
            one = turned(its_own.matrix, parts)
            alone_d_x = int8_backward.dgrad(d_alone.rows, one)  # type: ignore[arg-type]
        else:
            alone_d_x = linear.dgrad(PortableProducts, d_alone.rows, its_own)
        assert torch.equal(d_x[place], alone_d_x)
        linear.wgrad(PortableProducts, d_alone.tokens, alone.saved, theirs, own)  # type: ignore[arg-type]
        assert torch.equal(rows_of_it, theirs)


def check_biases(width: int, tokens: int) -> None:
    """Each row gets its expert's, padding none; an expert's gradient is the sum of its rows."""
    count = 3
    chosen = torch.stack([torch.randperm(count - 1) for _ in range(tokens)]).int()
    dispatch = make_dispatch(chosen, count)
    assert dispatch.experts is not None
    labels, y = dispatch.experts.long(), make(dispatch.rows, width, exactly=False)
    used, bias = labels >= 0, make(count, width, exactly=False)
    wanted = y.clone()
    wanted[used] = (y[used].float() + bias[labels[used]].float()).bfloat16()
    weight = LinearWeight(site_of((width,), "bf16"), y, bias.flatten())
    assert torch.equal(experts._biased(y.clone(), weight, dispatch, chosen), wanted)
    d, grad = integers(dispatch.rows, width), torch.ones(count * width)
    experts._add_bias_gradient(d, dispatch, grad)
    sums = torch.stack([d[labels == index].float().sum(0) for index in range(count)])
    assert torch.equal(grad, 1 + sums.flatten())


def rows_of(x: Any, dispatch: Dispatch) -> GroupedRows:
    if isinstance(x, Int8Rows):
        return GroupedRows(x.values, x.scales[None, None])
    return GroupedRows.of(x)


def check_pointwise(columns: int, tokens: int) -> None:
    """Norm and gates, forward and backward, in E4M3 as bytes."""
    site = site_of((columns, columns), "e4m3")
    h, x, dy = (make(tokens, columns, exactly=False) for _ in range(3))
    gate_up, weight = make(tokens, 2 * columns, exactly=False), torch.randn(columns).bfloat16()
    normed = pointwise.add_rms_norm(h, x, weight, 1e-6, site, save=True, as_bytes=True)
    theirs = spec_pointwise.add_rms_norm(h, x, weight, 1e-6, site, save=True, keep=True)
    assert same(normed.h, theirs.h)
    true = normed.h.double()
    true = true / (true.square().mean(1, keepdim=True) + 1e-6).sqrt() * weight.double()
    assert normed.norm is not None
    assert theirs.norm is not None
    assert relative_error(normed.norm, true) <= 1.02 * relative_error(theirs.norm, true)
    assert normed.input is not None
    assert_read_and_saved(normed.input, normed.norm, site)
    for gate in GATES:
        rows = slice(None) if gate == "silu" else slice(3)
        check_gate(gate, gate_up[rows], dy[rows], site)


def check_gate(gate: Gate, gate_up: torch.Tensor, dy: torch.Tensor, site: Site) -> None:
    """As near to the specification as another exponential and division are, and quantised as it is
    rounded.
    """
    y, d = quantise.swiglu(gate_up, gate), pointwise.swiglu_backward_bf16(dy, gate_up, gate=gate)
    theirs = spec_pointwise.swiglu(gate_up, gate), spec_pointwise.swiglu_gradient(dy, gate_up, gate)
    for ours, exact in zip((y, d), theirs, strict=True):
        assert (ours != exact).sum() <= 4 + 2e-3 * exact.numel()
        assert relative_error(ours, exact) < 1e-3
    gated = pointwise.swiglu_input(gate_up, site, save=True, gate=gate, as_bytes=True)
    assert_read_and_saved(gated, y, site)
    for wgrad in ("e4m3", "bf16"):
        one = replace(site, wgrad=wgrad)
        made = pointwise.swiglu_backward(dy, gate_up, one, gate, as_bytes=True)
        wanted = linear.output_gradient(d, one, as_bytes=True)
        assert same(made.rows, wanted.rows)
        assert same(made.tokens, wanted.tokens)
    gate_up, dy, y, d = (x[:3] for x in (gate_up, dy, y, d))
    assert same(quantise.swiglu_int8(gate_up, gate=gate), quantise_int8(y))
    in_int8 = replace(site, dgrad="int8", wgrad="int8")
    made = pointwise.swiglu_backward(dy, gate_up, in_int8, gate, as_bytes=True)
    wanted = linear.output_gradient(d, in_int8, as_bytes=True)
    assert same(made.rows, wanted.rows)
    assert same(made.tokens, wanted.tokens)


def assert_read_and_saved(made: LinearInput, wide: torch.Tensor, site: Site) -> None:
    exact = specification.linear_input(wide, site, save=True)
    assert isinstance(made.read, QuantRows)
    assert isinstance(exact.read, QuantTensor)
    assert same(made.read.values, exact.read.values)
    assert same(made.read.scales.contiguous(), exact.read.scales)
    assert isinstance(made.saved, QuantRows)
    assert_tokens(made.saved, exact.saved)


def quick() -> None:
    """With maxima by integers, in a tenth of the time; the other functions take those of cards."""
    prepare()
    quantise.amax_bits = token_groups._amax_bits = amax_bits
    check_bf16(20, 40, 72)
    check_e4m3_backward((8,), 24, 5, (True,))
    check_biases(40, 70)


def whole() -> None:
    prepare()
    check_bf16(150, 136, 264)
    check_e4m3_backward((24, 8), 40, 30)
    check_e4m3_backward((136, 30), 140, 200)
    for columns, tokens in ((40, 5), (256, 140)):
        check_pointwise(columns, tokens)


def bf16_experts() -> None:
    _many_experts("bf16")


def e4m3_experts() -> None:
    _many_experts("e4m3")


def int8_experts() -> None:
    _many_experts("int8")


def _many_experts(format: Format) -> None:
    prepare()
    check_experts(format, 24, 40, 20)
    check_experts(format, 136, 130, 170)
