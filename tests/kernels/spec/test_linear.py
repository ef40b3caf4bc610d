"""The linear's operands and its three products beside the cases of ``test_cases.py``, and numbers
that are not finite in them.
"""

import pytest
import torch

from isobit.kernels.operands import LinearWeight
from isobit.kernels.spec import linear as linear_module
from isobit.kernels.spec.linear import (
    dequantised,
    dgrad,
    fp8_gemm_nt,
    grid_gemm_nt,
    integer_product,
    linear,
    linear_input,
    output_gradient,
    wgrad,
)
from isobit.kernels.spec.quantise import publish, quantise_blocks, quantise_rows, snap_rows
from isobit.precision.flow import Site
from isobit.precision.quant_tensor import DTYPES, Format, QuantTensor, ScaleKind

N, K = 384, 256


def make(
    forward: Format, scales: ScaleKind = "power_of_two", wgrad: Format | None = None
) -> LinearWeight:
    site = Site("w", "linear", forward, scales, dgrad=forward, wgrad=wgrad or forward)
    return LinearWeight(site, publish(site, torch.randn(N, K)))


def backward(
    weight: LinearWeight, x: torch.Tensor, dy: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """dX and dW, through the operands of the weight's site."""
    saved, read = linear_input(x, weight.site, save=True).saved, output_gradient(dy, weight.site)
    assert saved is not None
    grad = torch.zeros(N, K)
    wgrad(read.tokens, saved, grad, weight.site)
    return dgrad(read.rows, weight), grad


def cosine(a: torch.Tensor, b: torch.Tensor) -> float:
    # Torch's cosine_similarity has an epsilon that swallows gradients of 1e-12.
    a, b = a.double(), b.double()
    return float((a * b).sum() / (a.norm() * b.norm()))


@pytest.mark.parametrize("scales", ["power_of_two", "fp32"])
@pytest.mark.parametrize("size", [1.0, 1e-12])
def test_fp8_gradients_against_the_exact_backward_of_the_same_forward(
    scales: ScaleKind, size: float
) -> None:
    weight, x = make("e4m3", scales), torch.randn(300, K).bfloat16()
    dy = (torch.randn(300, N) * size).bfloat16()
    dx, dw = backward(weight, x, dy)
    assert (dx.dtype, dw.dtype) == (torch.bfloat16, torch.float32)
    assert cosine(dx, dy.double() @ dequantised(weight).double()) >= 0.9985
    assert cosine(dw, dy.double().t() @ x.double()) >= 0.9985
    assert not torch.equal(dw, dy.float().t() @ x.float()), "WGrad did not quantise its operands"


def test_the_forward_is_the_exact_gemm_of_its_operands() -> None:
    x = torch.randn(60, K)
    quantised, plain = make("e4m3"), make("fp32")
    assert isinstance(quantised.matrix, QuantTensor) and isinstance(plain.matrix, torch.Tensor)
    read = linear_input(x.bfloat16(), quantised.site).read
    expected = fp8_gemm_nt(quantise_rows(x.bfloat16()), quantised.matrix).bfloat16()
    assert torch.equal(linear(read, quantised), expected)
    read = linear_input(x, plain.site).read
    assert torch.equal(linear(read, plain), grid_gemm_nt(snap_rows(x), plain.matrix))


@pytest.mark.parametrize("forward", ["e4m3", "bf16", "fp32"])
def test_what_is_saved_changes_no_bit_of_what_is_read(forward: Format) -> None:
    weight = make(forward)
    x = torch.randn(200, K).to(DTYPES["fp32" if forward == "fp32" else "bf16"])
    plain, both = (linear_input(x, weight.site, save) for save in (False, True))
    assert plain.saved is None and both.saved is not None
    assert torch.equal(linear(plain.read, weight), linear(both.read, weight))


def test_wgrad_may_stay_in_bf16_with_the_same_forward() -> None:
    torch.manual_seed(0)
    mixed = make("e4m3", wgrad="bf16")
    torch.manual_seed(0)
    pure = make("e4m3")
    x, dy = torch.randn(200, K).bfloat16(), torch.randn(200, N).bfloat16()
    first, second = (linear(linear_input(x, one.site).read, one) for one in (mixed, pure))
    assert torch.equal(first, second)
    (dx, dw), (pure_dx, pure_dw) = backward(mixed, x, dy), backward(pure, x, dy)
    assert torch.equal(dx, pure_dx) and not torch.equal(dw, pure_dw)
    assert torch.equal(dw, dy.float().t() @ x.float())


def test_products_on_the_grid_are_exact() -> None:
    """Any order of the 128 terms of a block gives the same bits."""
    order = torch.cat([torch.randperm(128), 128 + torch.randperm(128)])
    a, b = snap_rows(torch.randn(40, 256)), snap_rows(torch.randn(60, 256))
    assert torch.equal(
        grid_gemm_nt(a, b), grid_gemm_nt(a[:, order].contiguous(), b[:, order].contiguous())
    )


def test_snapping_keeps_bf16_that_lies_within_15_bits_of_the_largest() -> None:
    x = torch.randn(50, 128).bfloat16()
    near = x.abs() >= x.abs().amax(-1, keepdim=True) * 2.0**-14
    assert torch.equal(snap_rows(x)[near], x[near])
    assert snap_rows(x).dtype == torch.bfloat16
    tiny = torch.zeros(1, 128)
    tiny[0, 0], tiny[0, 1] = 1.0, 2.0**-24
    assert snap_rows(tiny)[0, :2].tolist() == [1.0, 0.0]


def test_nan_and_infinity_reach_the_output() -> None:
    x, w = torch.randn(3, 128), torch.randn(128, 128)
    x[1, 5] = torch.inf
    x[2, 5] = torch.nan
    for y in (
        fp8_gemm_nt(quantise_rows(x), quantise_blocks(w)),
        grid_gemm_nt(snap_rows(x), snap_rows(w)),
    ):
        assert y[0].isfinite().all()
        assert not y[1].isfinite().any() and y[2].isnan().all()


@pytest.mark.parametrize("columns", [1, 1024, 1025, 2047, 3000])
@pytest.mark.parametrize("smallest", [100, 127])
def test_sums_of_int8_are_exact_and_rounded_once(
    columns: int, smallest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also the largest sums, where FP32 could not hold all of the columns at a time."""
    generator = torch.Generator().manual_seed(0)
    a = torch.randint(smallest, 128, (7, columns), generator=generator, dtype=torch.int8)
    b = torch.cat([a[:4], -a[4:]])
    exact = (a.long()[:, None] * b.long()).sum(-1)
    for has_instructions in (False, True):
        monkeypatch.setattr(linear_module, "has_int8_products", lambda has=has_instructions: has)
        assert torch.equal(integer_product(a, b), exact.float())
