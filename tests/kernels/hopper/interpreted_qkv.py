"""Run in Triton's interpreter by test_interpreted.py: the bits from the qkv GEMM to attention and
back are the specification's.  The interpreter cuts numbers off; here it rounds as torch does.
"""

# pyright: reportArgumentType=false, reportGeneralTypeIssues=false
# (Triton's types know neither plain numbers for constants nor what a kernel calls)

import numpy as np
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter

from isobit.kernels.hopper.attention import TILE, PagedKeys
from isobit.kernels.hopper.device_functions import hadamard
from isobit.kernels.hopper.qkv import encode_packed, encode_paged, gather_pages
from isobit.kernels.hopper.qkv_backward import qkv_backward
from isobit.kernels.operands import QkvGradients, QkvTransform, RopeTable
from isobit.kernels.spec import qkv as specification
from isobit.kernels.spec.qkv import Heads
from isobit.kernels.spec.quantise import hadamard as exact_hadamard
from isobit.precision.quant_tensor import E4M3

LAYOUTS = [(3, 1, 64), (2, 1, 128)]
TOKENS, POSITIONS = 7, 50
FORMATS = {
    tl.float32: (torch.float32, torch.int32),
    tl.bfloat16: (torch.bfloat16, torch.int16),
    tl.float16: (torch.float16, torch.int16),
    tl.float8e4nv: (E4M3, torch.uint8),
}
"""With integers of the same width."""


def convert(numbers: np.ndarray, source: tl.dtype, target: tl.dtype, _: object) -> np.ndarray:
    """``numbers`` in another format, as the interpreter keeps them."""
    (given, bits), (wanted, made) = FORMATS[source], FORMATS[target]
    x = torch.from_numpy(np.ascontiguousarray(numbers)).contiguous()
    return (x.view(bits).view(given).to(wanted).view(made)).numpy().view(f"u{target.itemsize}")


def random_vectors(*shape: int) -> torch.Tensor:
    """Of all sizes, one of them zero."""
    x = torch.randn(shape) * torch.exp(4 * torch.randn(*shape[:-1], 1))
    x[2, 1] = 0.0
    return x.bfloat16()


def make(layout: tuple[int, int, int], is_e4m3: bool) -> QkvTransform:
    heads, keys, dim = layout
    frequencies = 10000.0 ** -(torch.arange(dim // 2, dtype=torch.float64) / (dim // 2))
    rope = RopeTable.build(frequencies, POSITIONS)
    bias = random_vectors(heads + 2 * keys, 2, dim)[:, 0].reshape(-1)
    return QkvTransform(
        *layout, rope.cos, rope.sin, 1e-6, None, None, bias.contiguous(), hadamard=is_e4m3
    )


@triton.jit
def _hadamard_kernel(x, y, count: tl.constexpr, half: tl.constexpr):
    at = tl.arange(0, count)[:, None] * (2 * half) + tl.arange(0, half)[None, :]
    y1, y2 = hadamard(tl.load(x + at), tl.load(x + at + half), count, half)
    tl.store(y + at, y1)
    tl.store(y + at + half, y2)


def check_hadamard() -> None:
    for half in (32, 64):
        x = torch.randn(8, 2 * half) * torch.exp(5 * torch.randn(8, 2 * half))
        x[3, 7], x[4, 9] = torch.nan, torch.inf
        y = torch.empty_like(x)
        _hadamard_kernel[(1,)](x, y, 8, half)
        expected = exact_hadamard(x, 2 * half)
        assert torch.equal(y.isnan(), expected.isnan()) and y[3].isnan().all()
        assert torch.equal(y.nan_to_num(), expected.nan_to_num())


def check_forward(layout: tuple[int, int, int], is_e4m3: bool) -> None:
    """Packed, and in pages that are gathered again."""
    transform, (heads, keys, dim) = make(layout, is_e4m3), layout
    qkv = random_vectors(TOKENS, heads + 2 * keys, dim).view(TOKENS, -1)
    positions = torch.randint(0, POSITIONS, (TOKENS,))
    rows = RopeTable(transform.cos, transform.sin).rows(positions)
    made = specification.transform_qkv(0, qkv, transform, rows)
    q, k, v = (Heads.encode(x, "e4m3") if is_e4m3 else None for x in made)
    queries, packed = encode_packed(qkv, transform, positions, "e4m3" if is_e4m3 else "bf16")
    if q is None or k is None or v is None:
        found = queries.values, packed.keys, packed.values
        assert all(map(torch.equal, found, made))
        return
    for ours, exact in ((queries.values, q), (packed.keys, k), (packed.values.to(E4M3), v)):
        assert torch.equal(ours.view(torch.uint8), exact.values.view(torch.uint8))
    scales, key_scales, value_scales = queries.scales, packed.key_scales, packed.value_scales
    assert scales is not None and key_scales is not None and value_scales is not None
    assert torch.equal((scales.view(torch.int32) >> 23).to(torch.uint8), q.scales)
    assert torch.equal(key_scales, k.scales) and torch.equal(value_scales, v.scales)

    values = torch.zeros(2, 2, keys, TILE * dim, dtype=torch.uint8).unbind()
    pages = PagedKeys(
        values[0].view(2, keys, TILE, dim).view(E4M3),
        torch.zeros(2, keys, TILE, dtype=torch.uint8),
        values[1].view(2, keys, dim, TILE).view(E4M3),
        torch.zeros(2, keys, TILE, dtype=torch.uint8),
    )
    slots = torch.arange(TOKENS) + TILE - 3  # across the end of a page
    again = encode_paged(qkv, transform, positions, slots, pages)
    assert torch.equal(again.values.view(torch.uint8), queries.values.view(torch.uint8))
    length = torch.tensor([TILE - 3 + TOKENS], dtype=torch.int32)
    table = torch.tensor([[0, 1]], dtype=torch.int32)
    total = int(length)
    got = gather_pages(pages, table, torch.zeros_like(length), length, total, total)
    assert torch.equal(got.keys[-TOKENS:].view(torch.uint8), packed.keys.view(torch.uint8))
    assert torch.equal(got.values[-TOKENS:], packed.values)


def check_backward(layout: tuple[int, int, int], is_e4m3: bool) -> None:
    transform, (heads, keys, dim) = make(layout, is_e4m3), layout
    qkv = random_vectors(TOKENS, heads + 2 * keys, dim).view(TOKENS, -1)
    positions = torch.randint(0, POSITIONS, (TOKENS,))
    counts = [heads, keys, keys]
    whole = random_vectors(TOKENS, sum(counts), dim)
    dq, dk, dv = (x.contiguous() for x in whole.split(counts, 1))
    sums = [torch.zeros(qkv.shape[1]) for _ in range(2)]
    ours, exact = (
        backward(dq, dk, dv, qkv, transform, positions, QkvGradients(None, None, bias))
        for backward, bias in zip((qkv_backward, specification.qkv_backward), sums, strict=True)
    )
    assert torch.equal(ours, exact)
    torch.testing.assert_close(*sums)


def main() -> None:
    interpreter._convert_float = convert
    torch.manual_seed(0)
    check_hadamard()
    for layout in LAYOUTS:
        for is_e4m3 in (False, True):
            check_forward(layout, is_e4m3)
            check_backward(layout, is_e4m3)
