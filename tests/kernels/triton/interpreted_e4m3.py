"""Run in Triton's interpreter by test_interpreted.py: E4M3 as bytes, for every byte and every
number of BF16; quantisers have the specification's bytes and scales, and products its bits where
FP32 holds the sums of a block.
"""

# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportCallIssue=false
# pyright: reportIndexIssue=false
# (Triton's types know neither plain numbers for constants nor launches)

import torch
import triton
import triton.language as tl

from isobit.kernels.operands import LinearWeight
from isobit.kernels.spec import linear as specification_of_linear
from isobit.kernels.spec import quantise as specification
from isobit.kernels.spec.quantise import SHIFT, decode_e4m3
from isobit.kernels.triton import linear, quantise
from isobit.kernels.triton.e4m3 import decoded, rounded
from isobit.kernels.triton.products import PortableProducts
from isobit.kernels.triton.quantise import QuantRows, publish, republish
from isobit.precision.flow import Site
from isobit.precision.quant_tensor import E4M3, E4M3_MAX, QuantTensor, ScaleKind
from tests.kernels.comparison import same
from tests.kernels.triton.interpreted_linear import prepare as prepare_integers


@triton.jit
def _differing(a, b):
    """The interpreter knows no instructions: one by one."""
    return (a != b).to(tl.int32)


def prepare() -> None:
    prepare_integers()
    quantise._differing = _differing


@triton.jit
def _decode_kernel(x, out, size: tl.constexpr):
    place = tl.arange(0, size)
    tl.store(out + place, decoded(tl.load(x + place)))


@triton.jit
def _round_kernel(x, out, size: tl.constexpr):
    place = tl.arange(0, size)
    tl.store(out + place, rounded(tl.load(x + place)))


def check_bytes() -> None:
    every = torch.arange(256).to(torch.uint8)
    made = torch.empty(256, dtype=torch.float16)
    _decode_kernel[(1,)](every, made, 256)
    assert same(made.float() * SHIFT, decode_e4m3(every.view(E4M3)))
    finite = ~every.view(E4M3).float().isnan()
    assert torch.equal(made.float()[finite] * SHIFT, every.view(E4M3).float()[finite])
    assert not made[finite].isnan().any() and int(finite.sum()) == 254


def check_rounding() -> None:
    """All numbers of BF16, their neighbours in FP32, and what lies between two codes."""
    bf16 = torch.arange(1 << 16).to(torch.int32) << 16
    codes = torch.arange(127).to(torch.uint8).view(E4M3).float()
    between = torch.stack([codes[:-1], (codes[:-1] + codes[1:]) / 2, codes[1:]]).view(torch.int32)
    between = torch.cat([between.flatten() + step for step in (-1, 0, 1)])
    for step in (-1, 0, 1):
        x = torch.cat([bf16 + step, between, between | -(1 << 31)]).view(torch.float32)
        size = triton.next_power_of_2(len(x))
        x = torch.nn.functional.pad(x, (0, size - len(x)))
        made = torch.empty(size, dtype=torch.uint8)
        _round_kernel[(1,)](x, made, size)
        exact = x.clamp(-E4M3_MAX, E4M3_MAX).to(E4M3).view(torch.uint8).masked_fill(x.isnan(), 0x7F)
        assert torch.equal(made, exact)


def site_of(parts: tuple[int, ...], scales: ScaleKind) -> Site:
    return Site("qkv_proj", "linear", "e4m3", scales, "e4m3", "e4m3", parts)


def check_quantisers(parts: tuple[int, ...], columns: int, scales: ScaleKind) -> None:
    """Of numbers of all sizes, tiny ones and such that are not finite."""
    x = (torch.randn(7, columns) * torch.exp(4 * torch.randn(7, columns))).bfloat16()
    x[0], x[1] = 0.0, x[1] * 1e-30
    x[2, 0], x[3, -1] = torch.nan, torch.inf
    site = site_of(parts, scales)
    read = linear.linear_input(x, site, as_bytes=True).read
    assert same(read, specification.quantise_rows(x, scales))
    master = torch.randn(sum(parts), columns) * torch.exp(3 * torch.randn(sum(parts), 1))
    before = publish(site, torch.ones_like(master), as_bytes=True)
    assert same(before, specification.publish(site, torch.ones_like(master)))
    master[1, 1] = torch.nan
    exact, weight = specification.publish(site, master), LinearWeight(site, before)
    assert isinstance(before, QuantTensor) and isinstance(exact, QuantTensor)
    old = before.values.view(torch.uint8).clone()
    changed = republish(weight, master, as_bytes=True)
    assert same(weight.matrix, exact)
    assert int(changed) == int((old != exact.values.view(torch.uint8)).sum())


def check_product(parts: tuple[int, ...], columns: int, tokens: int) -> None:
    """Of integers, in tiles of several sizes: a row has the same bits in each."""
    site = site_of(parts, "power_of_two")
    x = torch.randint(-15, 16, (tokens, columns)).float()
    x *= torch.exp2(torch.randint(-9, 9, (tokens, 1)).float())
    master = torch.randint(-15, 16, (sum(parts), columns)).float()
    weight = LinearWeight(site, specification.publish(site, master))
    read = linear.linear_input(x.bfloat16(), site, as_bytes=True).read
    quantised = specification.quantise_rows(x.bfloat16())
    assert same(read, quantised) and isinstance(read, QuantRows)
    exact = specification_of_linear.linear(quantised, weight)
    for rows in (slice(3, 4), slice(2, tokens // 2), slice(0, tokens)):
        some = QuantRows(read.values[rows], read.scales[rows])
        assert torch.equal(linear.linear(PortableProducts, some, weight), exact[rows])


def quick() -> None:
    prepare()
    check_bytes()
    check_rounding()
    check_product((8,), 136, 18)


def whole() -> None:
    quick()
    for scales in ("power_of_two", "fp32"):
        check_quantisers((128, 30), 140, scales)
    check_product((128, 40), 520, 130)
