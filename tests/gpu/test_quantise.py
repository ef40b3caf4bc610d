"""The GPU's quantisers give the CPU's bytes, for every value that there is; the fused ones give
those of their parts.
"""

import pytest
import torch
import triton
import triton.language as tl

from isobit.kernels.hopper.quantise import (
    QuantRows,
    four_sigmoids,
    quantise_rows,
    rms_norm_quantise,
    silu,
    swiglu,
    swiglu_quantise,
)
from isobit.kernels.spec import quantise as specification
from isobit.kernels.spec.pointwise import rms_norm
from isobit.kernels.spec.pointwise import swiglu as swiglu_on_cpu
from isobit.precision.quant_tensor import ScaleKind

KINDS: list[ScaleKind] = ["power_of_two", "fp32"]


def assert_same(ours: QuantRows, x: torch.Tensor, kind: ScaleKind) -> None:
    """Byte for byte what the specification makes of x, on the CPU."""
    expected = specification.quantise_rows(x.cpu(), kind)
    assert torch.equal(ours.values.view(torch.uint8).cpu(), expected.values.view(torch.uint8))
    assert torch.equal(ours.scales.cpu().view(torch.int32), expected.scales.view(torch.int32))


def every_bf16() -> torch.Tensor:
    """All 65,536 BF16 numbers, NaN and infinities among them, in random groups of 128."""
    bits = torch.randperm(65536, generator=torch.Generator().manual_seed(0)).to(torch.int32)
    return bits.to(torch.uint16).view(torch.bfloat16).view(512, 128)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("columns", [128, 384, 1024, 12288])
def test_rows(kind: ScaleKind, columns: int) -> None:
    x = (torch.randn(67, columns) * torch.exp(6 * torch.randn(67, columns))).bfloat16()
    x[3], x[4, ::2], x[5, 7], x[6, 9], x[7, :128] = 0.0, -0.0, torch.inf, torch.nan, 1e-12
    x[8] = torch.randn(columns) * 1e-38
    assert_same(quantise_rows(x.cuda(), kind), x, kind)


@pytest.mark.parametrize("kind", KINDS)
def test_every_bf16_number(kind: ScaleKind) -> None:
    x = every_bf16()
    finite = torch.where(x.isfinite(), x, torch.zeros_like(x))
    for case in (x, finite, torch.where(finite.abs() < 1, finite, torch.zeros_like(x))):
        assert_same(quantise_rows(case.cuda(), kind), case, kind)


@pytest.mark.parametrize("columns", [128, 896, 4096, 5120])
def test_rms_norm_quantises_its_own_rounded_output_and_rows_do_not_depend_on_the_batch(
    columns: int,
) -> None:
    h, x, weight = (
        torch.randn(70, columns).bfloat16().cuda(),
        torch.randn(70, columns).bfloat16().cuda(),
        torch.randn(columns).bfloat16().cuda(),
    )
    new, norm, quantised = rms_norm_quantise(h, x, weight, 1e-6, keep=True)
    assert norm is not None and quantised is not None
    assert torch.equal(new, h + x)
    _, nothing, without = rms_norm_quantise(
        h, x, weight, 1e-6
    )  # rollout does not keep the norm, training does
    assert nothing is None and without is not None and torch.equal(without.scales, quantised.scales)
    assert torch.equal(without.values.view(torch.uint8), quantised.values.view(torch.uint8))
    assert_same(quantised, norm, "power_of_two")
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
        assert torch.equal(
            alone_quantised.values.view(torch.uint8), quantised.values.view(torch.uint8)[rows]
        )
        assert torch.equal(alone_quantised.scales, quantised.scales[rows])


@triton.jit
def _sigmoids_kernel(numbers, short, plain, count: tl.constexpr):
    """sigmoid and silu of BF16 numbers, as the kernels compute them and by their definitions."""
    i = tl.program_id(0) * 128 + tl.arange(0, 128)
    x = tl.load(numbers + i).to(tl.float32)
    tl.store(short + i, 0.25 * four_sigmoids(x))
    tl.store(short + count + i, silu(x))
    tl.store(plain + i, 1.0 / (1.0 + tl.exp(-x)))
    tl.store(plain + count + i, x / (1.0 + tl.exp(-x)))


def test_the_short_sigmoid_has_the_bits_of_the_plain_one() -> None:
    x = every_bf16().cuda()
    short, plain = (torch.empty(2, x.numel(), device="cuda") for _ in range(2))
    launch = _sigmoids_kernel[(x.numel() // 128,)]
    launch(x, short, plain, x.numel(), num_warps=4, enable_fp_fusion=False)  # pyright: ignore
    assert torch.equal(short.isnan(), plain.isnan())
    assert torch.equal(*(torch.where(y.isnan(), 0, y).view(torch.int32) for y in (short, plain)))


@pytest.mark.parametrize("columns", [128, 384, 12288])
def test_swiglu_against_the_specification(columns: int) -> None:
    gate_up = (3 * torch.randn(50, 2 * columns)).bfloat16()
    ours = swiglu_quantise(gate_up.cuda())
    expected = specification.quantise_rows(swiglu_on_cpu(gate_up))
    assert ours.values.shape == expected.values.shape
    different = ours.values.view(torch.uint8).cpu() != expected.values.view(torch.uint8)
    assert (
        different.float().mean() < 2e-3
    )  # the GPU's exp rounds differently, and so, rarely, does the BF16 that is quantised
    unquantised = swiglu(gate_up.cuda())
    assert_same(ours, unquantised, "power_of_two")
    assert (unquantised.cpu() != swiglu_on_cpu(gate_up)).float().mean() < 2e-3
    alone = swiglu_quantise(gate_up[7:8].cuda())
    assert torch.equal(alone.values.view(torch.uint8), ours.values.view(torch.uint8)[7:8])
