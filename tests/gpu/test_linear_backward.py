"""DGrad and WGrad on the GPU, for matrices of any size, against FP64 over the very operands that
they multiply; they repeat and add up in place.
"""

import pytest
import torch

from isobit.kernels.hopper.gemm import BackEnd
from isobit.kernels.operands import LinearWeight
from isobit.kernels.spec import linear as specification
from isobit.kernels.spec.quantise import quantise_blocks
from isobit.kernels.spec.quantise import quantise_rows as quantise_rows_on_cpu
from isobit.kernels.triton.quantise import QuantRows
from isobit.kernels.triton.transpose import transpose_blocks
from isobit.precision.flow import Site
from isobit.precision.quant_tensor import Format, ScaleKind
from tests.gpu.kernels import (
    DEEP_GEMM_AND_TRITON,
    GPU,
    bf16_gemm_nn,
    bf16_gemm_tn,
    fp8_gemm_nt,
    fp8_gemm_tn,
    linear_input,
    output_gradient,
    publish,
    quantise_tokens,
    republish,
)
from tests.gpu.operands import BF16_ROUNDING, KINDS, MATRICES, TENSOR_CORE, bf16, fp64, published
from tests.kernels.comparison import relative_error

linear, dgrad, wgrad = GPU.linear, GPU.dgrad, GPU.wgrad


def e4m3_site(
    parts: tuple[int, ...], kind: ScaleKind = "power_of_two", of_wgrad: Format = "e4m3"
) -> Site:
    return Site("qkv_proj", "linear", "e4m3", kind, "e4m3", of_wgrad, parts)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("parts", "k"), MATRICES)
def test_dgrad(kind: ScaleKind, parts: tuple[int, ...], k: int) -> None:
    """Against FP64 over the very operands; and no worse than the specification's against dY W."""
    site = e4m3_site(parts, kind)
    matrix, master = published(parts, k, kind)
    weight = LinearWeight(site, matrix)
    on_cpu = LinearWeight(site, quantise_blocks(master.bfloat16().cpu(), kind, parts))
    exact_weight = specification.dequantised(on_cpu).double()
    for m in (1, 100, 257):
        dy = bf16(m, sum(parts))
        rows = output_gradient(dy, site).rows
        ours = dgrad(rows, weight)
        assert ours.shape == (m, k) and ours.dtype == torch.bfloat16
        expected = quantise_rows_on_cpu(dy.cpu(), kind, parts)
        read = specification.dequantise_rows(expected).double()
        assert relative_error(ours, read @ exact_weight) < BF16_ROUNDING
        theirs, exact = specification.dgrad(expected, on_cpu), dy.cpu().double() @ exact_weight
        if m > 1:  # of a row of 80 numbers the errors say too little
            assert relative_error(ours, exact) < 1.02 * relative_error(theirs, exact)
        assert torch.equal(ours, dgrad(rows, weight))
        assert isinstance(rows, QuantRows)
        assert torch.equal(ours, fp8_gemm_nt(rows, transpose_blocks(matrix), kind))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("parts", "k"), [*MATRICES, ((128,), 128)])
def test_wgrad_adds_to_the_gradient(kind: ScaleKind, parts: tuple[int, ...], k: int) -> None:
    n = sum(parts)
    for tokens in (1, 128, 300, 1000, 4000):
        dy, x = quantise_tokens(bf16(tokens, n), kind), quantise_tokens(bf16(tokens, k), kind)
        exact, start = fp64(dy) @ fp64(x).t(), torch.randn(n, k, device="cuda")
        made: list[torch.Tensor] = []
        for back_end in DEEP_GEMM_AND_TRITON:
            product, gradient = torch.zeros(n, k, device="cuda"), start.clone()
            fp8_gemm_tn(dy, x, product, back_end)
            assert relative_error(product, exact) < TENSOR_CORE
            fp8_gemm_tn(dy, x, gradient, back_end)
            assert torch.equal(gradient, start + product)  # a finished sum, added once
            fp8_gemm_tn(dy, x, gradient, back_end)
            assert torch.equal(gradient, start + product + product)
            made.append(product)
        if kind == "power_of_two":
            assert all(torch.equal(product, made[0]) for product in made)


def test_a_linear_with_its_backward_in_bf16_wgrad() -> None:
    parts, k = MATRICES[0]
    site = e4m3_site(parts, of_wgrad="bf16")
    master = torch.randn(sum(parts), k, device="cuda")
    weight = LinearWeight(site, publish(site, master))
    x, dy = bf16(77, k), bf16(77, sum(parts))
    given = linear_input(x, site, save=True)
    assert linear(given.read, weight).shape == dy.shape
    made = output_gradient(dy, site)
    assert given.saved is not None and made.tokens is dy
    grad = torch.zeros_like(master)
    wgrad(made.tokens, given.saved, grad, site)
    assert relative_error(grad, dy.double().t() @ x.double()) < 1e-5
    assert dgrad(made.rows, weight).shape == x.shape
    assert int(republish(weight, master)) == 0 < int(republish(weight, -master))


@pytest.mark.parametrize("back_end", DEEP_GEMM_AND_TRITON)
def test_wgrad_repeats_at_a_training_shape(back_end: BackEnd) -> None:
    dy, x = quantise_tokens(bf16(8000, 6144)), quantise_tokens(bf16(8000, 4096))
    first = torch.zeros(6144, 4096, device="cuda")
    fp8_gemm_tn(dy, x, first, back_end)
    for _ in range(5):
        again = torch.zeros_like(first)
        fp8_gemm_tn(dy, x, again, back_end)
        assert torch.equal(again, first)
    assert relative_error(first, fp64(dy) @ fp64(x).t()) < TENSOR_CORE


@pytest.mark.parametrize("back_end", DEEP_GEMM_AND_TRITON)
def test_wgrad_keeps_a_nan_to_its_row(back_end: BackEnd) -> None:
    dy, x = bf16(300, 384), bf16(300, 256)
    dy[200, 300] = float("nan")
    grad = torch.zeros(384, 256, device="cuda")
    fp8_gemm_tn(quantise_tokens(dy), quantise_tokens(x), grad, back_end)
    assert grad[300].isnan().all() and grad.isnan().sum() == 256


def test_bf16() -> None:
    for tokens, n, k in ((1, 128, 256), (77, 40, 72), (300, 896, 384), (1000, 1536, 1024)):
        dy, x, weight = bf16(tokens, n), bf16(tokens, k), bf16(n, k)
        exact = dy.double() @ weight.double()
        assert relative_error(bf16_gemm_nn(dy, weight), exact) < BF16_ROUNDING
        start = torch.randn(n, k, device="cuda")
        gradient, again = start.clone(), start.clone()
        for grad in (gradient, again):
            bf16_gemm_tn(dy, x, grad)
        assert relative_error(gradient, start.double() + dy.double().t() @ x.double()) < 1e-5
        assert torch.equal(again, gradient)
