"""DGrad and WGrad on the GPU against FP64 over the very operands that they multiply; they repeat
and add up in place.
"""

import pytest
import torch

from isobit.kernels.hopper.gemm import BackEnd, fp8_gemm_nt, why_not_deep_gemm
from isobit.kernels.hopper.linear import (
    bf16_gemm_nn,
    bf16_gemm_tn,
    fp8_gemm_nn,
    fp8_gemm_tn,
    transpose_blocks,
)
from isobit.kernels.hopper.quantise import QuantRows, publish_blocks, quantise_rows
from isobit.kernels.hopper.token_groups import quantise_both, quantise_tokens
from isobit.kernels.operands import LinearWeight
from isobit.kernels.spec import linear as specification
from isobit.kernels.spec.quantise import publish
from isobit.precision.flow import Site
from isobit.precision.quant_tensor import BLOCK, QuantTensor, ScaleKind

KINDS: list[ScaleKind] = ["power_of_two", "fp32"]
BACK_ENDS: list[BackEnd] = ["triton"] if why_not_deep_gemm() else ["deep_gemm", "triton"]
TENSOR_CORE = 2e-3  # of a norm: FP8 tensor cores keep 14 bits within a group
BF16_ROUNDING = 3e-3  # 1.7e-3, and the above
SHAPES = [
    (128, 256),
    (896, 384),
    (1536, 1024),
]  # N, K: never square, since a square hides a transposed operand


def published(n: int, k: int, kind: ScaleKind = "power_of_two") -> QuantTensor:
    weight = QuantTensor.empty_blocks(n, k, torch.device("cuda"))
    publish_blocks(
        torch.randn(n, k, device="cuda") * torch.exp(2 * torch.randn(n, 1, device="cuda")),
        weight,
        kind,
    )
    return weight


def bf16(rows: int, columns: int) -> torch.Tensor:
    return (
        torch.randn(rows, columns, device="cuda")
        * torch.exp(torch.randn(rows, columns, device="cuda"))
    ).bfloat16()


def rows_fp64(x: QuantRows) -> torch.Tensor:
    """What the GEMM reads."""
    return x.values.double() * x.scales.double().repeat_interleave(BLOCK, 1)


def blocks_fp64(w: QuantTensor) -> torch.Tensor:
    return w.values.double() * w.scales.double().repeat_interleave(BLOCK, 0).repeat_interleave(
        BLOCK, 1
    )


def relative(ours: torch.Tensor, exact: torch.Tensor) -> float:
    return float((ours.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize(("n", "k"), [*SHAPES, (4096, 12288), (128, 128)])
def test_transpose_blocks_moves_bytes(n: int, k: int) -> None:
    every = torch.randint(0, 256, (n, k), dtype=torch.uint8, device="cuda").view(
        torch.float8_e4m3fn
    )
    weight = QuantTensor(every, torch.randn(n // BLOCK, k // BLOCK, device="cuda"), "128x128")
    turned = transpose_blocks(weight)
    assert turned.values.is_contiguous() and turned.scales.is_contiguous()
    assert torch.equal(turned.values.view(torch.uint8), weight.values.view(torch.uint8).t())
    assert torch.equal(turned.scales, weight.scales.t())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_dgrad_against_fp64(kind: ScaleKind, n: int, k: int) -> None:
    weight = published(n, k, kind)
    for m in (1, 100, 257):
        dy = quantise_rows(bf16(m, n), kind)
        ours = fp8_gemm_nn(dy, weight, kind)
        assert ours.shape == (m, k) and ours.dtype == torch.bfloat16
        assert relative(ours, rows_fp64(dy) @ blocks_fp64(weight)) < BF16_ROUNDING
        assert torch.equal(ours, fp8_gemm_nn(dy, weight, kind))
        assert torch.equal(ours, fp8_gemm_nt(dy, transpose_blocks(weight), kind))


@pytest.mark.parametrize("back_end", BACK_ENDS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_wgrad_adds_to_the_gradient(back_end: BackEnd, kind: ScaleKind, n: int, k: int) -> None:
    for tokens in (1, 128, 300, 1000):
        dy, x = quantise_tokens(bf16(tokens, n), kind), quantise_tokens(bf16(tokens, k), kind)
        exact = rows_fp64(dy) @ rows_fp64(x).t()
        product = torch.zeros(n, k, device="cuda")
        fp8_gemm_tn(dy, x, product, back_end)
        assert relative(product, exact) < TENSOR_CORE
        start = torch.randn(n, k, device="cuda")
        gradient = start.clone()
        fp8_gemm_tn(dy, x, gradient, back_end)
        assert torch.equal(gradient, start + product)  # a finished sum, added once
        fp8_gemm_tn(dy, x, gradient, back_end)
        assert torch.equal(gradient, start + product + product)


@pytest.mark.parametrize("back_end", BACK_ENDS)
def test_wgrad_repeats_at_a_training_shape(back_end: BackEnd) -> None:
    dy, x = quantise_tokens(bf16(8000, 6144)), quantise_tokens(bf16(8000, 4096))
    first = torch.zeros(6144, 4096, device="cuda")
    fp8_gemm_tn(dy, x, first, back_end)
    for _ in range(5):
        again = torch.zeros_like(first)
        fp8_gemm_tn(dy, x, again, back_end)
        assert torch.equal(again, first)
    assert relative(first, (rows_fp64(dy) @ rows_fp64(x).t())) < TENSOR_CORE


@pytest.mark.skipif(len(BACK_ENDS) < 2, reason="needs DeepGEMM")
@pytest.mark.parametrize(
    ("n", "k"), [(128, 128), (384, 2048), (1536, 1024)]
)  # 384: half a program's rows are outside
def test_back_ends_of_wgrad_give_the_same_bits(n: int, k: int) -> None:
    for tokens in (1, 300, 4000):
        dy, x = quantise_tokens(bf16(tokens, n)), quantise_tokens(bf16(tokens, k))
        made = [torch.zeros(n, k, device="cuda") for _ in BACK_ENDS]
        for grad, back_end in zip(made, BACK_ENDS, strict=True):
            fp8_gemm_tn(dy, x, grad, back_end)
        assert torch.equal(*made)


@pytest.mark.parametrize("back_end", BACK_ENDS)
def test_wgrad_keeps_a_nan_to_its_row(back_end: BackEnd) -> None:
    dy, x = bf16(300, 384), bf16(300, 256)
    dy[200, 300] = float("nan")
    grad = torch.zeros(384, 256, device="cuda")
    fp8_gemm_tn(quantise_tokens(dy), quantise_tokens(x), grad, back_end)
    assert grad[300].isnan().all() and grad.isnan().sum() == 256


def test_bf16() -> None:
    for tokens, n, k in ((1, 128, 256), (77, 40, 72), (300, 896, 384), (1000, 1536, 1024)):
        dy, x, weight = bf16(tokens, n), bf16(tokens, k), bf16(n, k)
        assert relative(bf16_gemm_nn(dy, weight), dy.double() @ weight.double()) < BF16_ROUNDING
        exact = dy.double().t() @ x.double()
        start = torch.randn(n, k, device="cuda")
        gradient = start.clone()
        bf16_gemm_tn(dy, x, gradient)
        assert relative(gradient, start.double() + exact) < 1e-5
        again = start.clone()
        bf16_gemm_tn(dy, x, again)
        assert torch.equal(again, gradient)


@pytest.mark.parametrize("kind", KINDS)
def test_both_gradients_are_those_of_the_cpu(kind: ScaleKind) -> None:
    """From the same master and the same BF16 dY and X: the two differ by the GPU's rounding of its
    sums and of dX alone.
    """
    site = Site("qkv_proj", "linear", "e4m3", kind, "e4m3", "e4m3")
    master, dy, x = torch.randn(384, 256), bf16(200, 384).cpu(), bf16(200, 256).cpu()
    on_cpu = LinearWeight(site, publish(site, master))
    expected, saved = specification.output_gradient(dy, site), specification.input_saved(x, site)
    weight = QuantTensor.empty_blocks(384, 256, torch.device("cuda"))
    publish_blocks(master.cuda(), weight, kind)
    rows, by_token = quantise_both(dy.cuda(), kind)
    d_x = specification.dgrad(expected.rows, on_cpu)
    assert relative(fp8_gemm_nn(rows, weight, kind).cpu(), d_x.double()) < BF16_ROUNDING
    gradient, on_host = torch.zeros(384, 256, device="cuda"), torch.zeros(384, 256)
    fp8_gemm_tn(by_token, quantise_tokens(x.cuda(), kind), gradient)
    specification.wgrad(expected.tokens, saved, on_host)
    assert relative(gradient.cpu(), on_host.double()) < TENSOR_CORE
