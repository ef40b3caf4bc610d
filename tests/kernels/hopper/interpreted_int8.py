"""Run in Triton's interpreter by test_interpreted.py: INT8 values, scales and products are the
specification's.
"""

from dataclasses import replace

import torch
import triton
import triton.language as tl
from triton.runtime import interpreter

from isobit.kernels.hopper.grouped_gemm import grouped_gemm_nt, suits_deep_gemm
from isobit.kernels.hopper.int8 import Dots, Persistent, Tiles, int8_gemm_nt
from isobit.kernels.hopper.products import HopperProducts
from isobit.kernels.operands import LinearWeight
from isobit.kernels.spec import linear as linear_specification
from isobit.kernels.spec import quantise as specification
from isobit.kernels.spec.experts import one_expert
from isobit.kernels.triton import int8 as portable
from isobit.kernels.triton import pointwise, quantise
from isobit.kernels.triton.dispatch import gather, make_dispatch
from isobit.kernels.triton.experts import swiglu_rows
from isobit.kernels.triton.grouped_gemm import ExpertMatrices
from isobit.kernels.triton.linear import linear, output_gradient
from isobit.kernels.triton.quantise import (
    publish,
    quantise_int8,
    republish,
    rms_norm_int8,
    swiglu,
    swiglu_int8,
)
from isobit.kernels.triton.transpose import transpose_experts, transposed_weight
from isobit.precision.flow import Site
from isobit.precision.quant_tensor import Int8Rows, ScaleKind, block_sizes
from tests.kernels.comparison import same
from tests.kernels.triton.interpreted_qkv import convert

SITE = Site("qkv_proj", "linear", "int8", dgrad="e4m3", wgrad="e4m3")


@triton.jit
def _four_sigmoids(x):
    """The plain expression: the interpreter knows no instructions."""
    return 4.0 / (1.0 + tl.exp(-x))


@triton.jit
def _dot4(a, b, c):
    """The four products of two words, one by one."""
    for byte in range(4):
        left = (a << (24 - 8 * byte)) >> 24
        c += left * ((b << (24 - 8 * byte)) >> 24)
    return c


def wild(rows: int, columns: int) -> torch.Tensor:
    """BF16 of all sizes; a row of zeros, some that are tiny, and some that are not finite."""
    x = (torch.randn(rows, columns) * torch.exp(4 * torch.randn(rows, columns))).bfloat16()
    x[0], x[1] = 0.0, torch.randn(columns) * 1e-30
    x[2, 0], x[3, -1] = torch.nan, torch.inf
    x[4] = 3e38  # its sums are infinite, except of one number
    return x


def check_quantisers(columns: int) -> None:
    x = wild(7, columns)
    assert same(quantise_int8(x), specification.quantise_int8(x))
    h, weight = wild(7, columns), torch.randn(columns).bfloat16()
    new, norm, made = rms_norm_int8(h, x, weight, 1e-6, keep=True)
    assert norm is not None
    assert same(made, specification.quantise_int8(norm))
    again, nothing, without = rms_norm_int8(h, x, weight, 1e-6, keep=False)
    assert nothing is None
    assert same(again, new)
    assert same(without, made)
    gate_up = torch.cat([wild(7, columns), torch.randn(7, columns).bfloat16()], 1)
    assert same(swiglu_int8(gate_up), specification.quantise_int8(swiglu(gate_up)))
    made_site = replace(SITE, dgrad="int8", wgrad="int8", parts=(columns, columns))
    dy = wild(7, columns)
    made = pointwise.swiglu_backward(dy, gate_up, made_site)
    exact = output_gradient(pointwise.swiglu_backward_bf16(dy, gate_up), made_site)
    assert same(made.rows, exact.rows)
    assert same(made.tokens, exact.tokens)


def check_products(columns: int) -> None:
    """However they are cut up."""
    weight = specification.publish(SITE, torch.randn(70, columns))
    assert isinstance(weight, Int8Rows)
    x = specification.quantise_int8(torch.randn(19, columns).bfloat16())
    exact = linear_specification.linear(x, LinearWeight(SITE, weight))
    for cut in (Tiles(16, 64, 1, 1, swaps=True), Tiles(32, 64, 2, 1, swaps=True)):
        assert torch.equal(int8_gemm_nt(x, weight, cut), exact)
    for cut in (Tiles(64, 128, 1, 1, swaps=False), Tiles(64, 128, 4, 1, swaps=False)):
        assert torch.equal(int8_gemm_nt(x, weight, cut), exact)
    assert torch.equal(linear(HopperProducts, x, LinearWeight(SITE, weight)), exact)
    assert torch.equal(int8_gemm_nt(x, weight, Tiles(32, 16, 1, 1, True, 512, 2)), exact)
    for rows in (slice(5, 6), slice(7, 10), slice(9, 17)):
        some = Int8Rows(x.values[rows], x.scales[rows])
        assert torch.equal(linear(HopperProducts, some, LinearWeight(SITE, weight)), exact[rows])
    if columns % 16 == 0:
        few = Int8Rows(x.values[:3], x.scales[:3])
        assert torch.equal(int8_gemm_nt(few, weight, Dots(8, words=128)), exact[:3])
        assert torch.equal(int8_gemm_nt(x, weight, Persistent(64, 64, 1)), exact)


def check_published(columns: int) -> None:
    master = wild(20, columns).float() + torch.randn(20, columns) * 1e-3
    exact = specification.publish(SITE, master)
    weight = LinearWeight(SITE, publish(SITE, torch.ones_like(master)))
    matrix, before = weight.matrix, specification.publish(SITE, torch.ones_like(master))
    assert isinstance(exact, Int8Rows)
    assert isinstance(matrix, Int8Rows)
    assert isinstance(before, Int8Rows)
    assert same(matrix, before)
    assert int(republish(weight, master)) == int((exact.values != before.values).sum())
    assert same(matrix, exact)


def check_transposed(parts: tuple[int, ...], columns: int, scales: ScaleKind) -> None:
    """What DGrad reads: the specification's E4M3, in whole blocks."""
    site = replace(SITE, parts=parts, scales=scales)
    master = torch.randn(sum(parts), columns) * torch.exp(3 * torch.randn(sum(parts), 1))
    master[3, 5] = torch.nan
    weight = publish(site, master)
    assert isinstance(weight, Int8Rows)
    made = transposed_weight(weight, parts, scales)
    assert_turned(made.values, made.scales, LinearWeight(site, weight))


def assert_turned(values: torch.Tensor, scales: torch.Tensor, weight: LinearWeight) -> None:
    """[K, N in whole blocks] is what the specification's DGrad multiplies by."""
    assert isinstance(weight.matrix, Int8Rows)
    wide, site = specification.dequantise_int8(weight.matrix), weight.site
    exact = specification.quantise_blocks(wide, site.scales, site.parts)
    assert torch.equal(scales.view(torch.int32), exact.scales.t().contiguous().view(torch.int32))
    blocks = exact.values.view(torch.uint8).t().split(block_sizes(site.parts), 1)
    for block, whole in zip(blocks, values.view(torch.uint8).split(128, 1), strict=True):
        assert torch.equal(whole[:, : block.shape[1]], block)
        assert not whole[:, block.shape[1] :].any()


def check_experts(width: int, columns: int) -> None:
    """Each has the rows of its own linear, forward and turned for DGrad."""
    count, top_k, tokens = 2, 1, 5
    parts = (width,) * (2 * count)
    site = replace(SITE, parts=parts, scales="fp32")
    weight = LinearWeight(site, publish(site, torch.randn(sum(parts), columns)))
    x = specification.quantise_int8(torch.randn(tokens, columns).bfloat16())
    chosen = torch.rand(tokens, count).argsort(1)[:, :top_k].int()
    dispatch = make_dispatch(chosen, count)
    matrices = ExpertMatrices.of(weight, count)
    assert not suits_deep_gemm(matrices)
    made = grouped_gemm_nt(gather(x, dispatch, pads=True), matrices, dispatch)
    places = dispatch.places.flatten().long()
    activation, plain = (swiglu_rows(made, dispatch, kind, pads=True) for kind in ("int8", None))
    exact = specification.quantise_int8(plain.values[places])
    assert activation.scales is not None
    assert same(Int8Rows(activation.values[places], activation.scales[0, 0, places]), exact)
    turned = transpose_experts(matrices, site)
    assert turned.scales is not None
    for index in range(count):
        own, _ = one_expert(weight, index, count)
        exact = linear_specification.linear(x, own)
        token, rank = (chosen == index).nonzero().unbind(1)
        assert torch.equal(made[dispatch.places[token, rank].long()], exact[token])
        assert_turned(turned.values[index], turned.scales[index], own)


def main() -> None:
    interpreter._convert_float = convert
    quantise.four_sigmoids = pointwise.four_sigmoids = _four_sigmoids
    portable._dot4 = _dot4
    torch.manual_seed(0)
    for columns in (1, 80, 576, 4224):
        check_quantisers(columns)
    for columns in (7, 80, 1152):
        check_products(columns)
    for columns in (7, 128):
        check_published(columns)
    check_transposed((128, 40), 80, "power_of_two")
    check_experts(40, 80)
