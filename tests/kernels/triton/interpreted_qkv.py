"""Run in Triton's interpreter by test_interpreted.py: the bits from the qkv GEMM to attention and
back are the specification's.  The interpreter cuts numbers off; here it rounds as torch does.
"""

# pyright: reportArgumentType=false, reportGeneralTypeIssues=false
# (Triton's types know neither plain numbers for constants nor what a kernel calls)

from dataclasses import replace

import numpy as np
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter

from isobit.kernels.operands import QkvGradients, QkvTransform, RopeTable
from isobit.kernels.spec import qkv as specification
from isobit.kernels.spec.qkv import Heads, factors
from isobit.kernels.spec.quantise import hadamard as exact_hadamard
from isobit.kernels.triton.attention import SCALES, PagedKeys
from isobit.kernels.triton.device_functions import hadamard
from isobit.kernels.triton.heads import PAGE_TOKENS
from isobit.kernels.triton.qkv import encode_packed, encode_paged, gather_pages
from isobit.kernels.triton.qkv_backward import qkv_backward
from isobit.precision.quant_tensor import DTYPES, E4M3, Format
from tests.kernels.comparison import same

LAYOUTS = [(3, 1, 64), (2, 1, 96), (2, 1, 128), (2, 1, 256)]
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


def make(layout: tuple[int, int, int], format: Format) -> QkvTransform:
    heads, keys, dim = layout
    frequencies = 10000.0 ** -(torch.arange(dim // 2, dtype=torch.float64) / (dim // 2))
    rope = RopeTable.build(frequencies, POSITIONS)
    bias = random_vectors(heads + 2 * keys, 2, dim)[:, 0]
    bias[1] = 0.0  # so that a vector stays zero, whose signs the rotation makes
    return QkvTransform(
        *layout, rope.cos, rope.sin, 1e-6, None, None, bias.reshape(-1), hadamard=format != "bf16"
    )


@triton.jit
def _hadamard_kernel(x, y, count: tl.constexpr, half: tl.constexpr):
    at = tl.arange(0, count)[:, None] * (2 * half) + tl.arange(0, half)[None, :]
    y1, y2 = hadamard(tl.load(x + at), tl.load(x + at + half), count, half)
    tl.store(y + at, y1)
    tl.store(y + at + half, y2)


def check_hadamard() -> None:
    for half in (32, 64, 128):
        x = torch.randn(8, 2 * half) * torch.exp(5 * torch.randn(8, 2 * half))
        x[3, 7], x[4, 9] = torch.nan, torch.inf
        y = torch.empty_like(x)
        _hadamard_kernel[(1,)](x, y, 8, half)
        expected = exact_hadamard(x, 2 * half)
        assert torch.equal(y.isnan(), expected.isnan()) and y[3].isnan().all()
        assert torch.equal(y.nan_to_num(), expected.nan_to_num())


def check_forward(
    layout: tuple[int, int, int], format: Format, bad: float | None = None, as_bytes: bool = False
) -> None:
    """Packed, and in pages that are gathered again; perhaps with vectors that are not finite."""
    transform, (heads, keys, dim) = make(layout, format), layout
    qkv = random_vectors(TOKENS, heads + 2 * keys, dim)
    if bad is not None:
        qkv[3, 1, 7] = qkv[4, heads, 40] = qkv[5, -1, dim - 1] = bad
    qkv = qkv.view(TOKENS, -1)
    positions = torch.randint(0, POSITIONS, (TOKENS,))
    rows = RopeTable(transform.cos, transform.sin).rows(positions)
    made = specification.transform_qkv(0, qkv, transform, rows)
    queries, packed = encode_packed(qkv, transform, positions, format, as_bytes)
    if format == "bf16":
        found = queries.values, packed.keys, packed.values
        assert all(map(same, found, made))
        return
    q, k, v = (Heads.encode(x, format) for x in made)
    for ours, exact in (
        (queries.values, q),
        (packed.keys, k),
        (packed.values.to(DTYPES[format]), v),
    ):
        assert torch.equal(ours.view(torch.uint8), exact.values.view(torch.uint8))
    scales = torch.cat([factors(x.scales) for x in (q, k, v)], 1)
    found = queries.scales, packed.key_scales, packed.value_scales
    ours = torch.cat([factors(x) for x in found if x is not None], 1)
    assert torch.equal(ours.isnan(), scales.isnan()) and scales.isnan().any() == (bad is not None)
    assert torch.equal(ours.nan_to_num(), scales.nan_to_num())

    values = torch.zeros(2, 2, keys, PAGE_TOKENS * dim, dtype=torch.uint8).unbind()
    pages = PagedKeys(
        values[0].view(2, keys, PAGE_TOKENS, dim).view(DTYPES[format]),
        torch.zeros(2, keys, PAGE_TOKENS, dtype=SCALES[DTYPES[format]]),
        values[1].view(2, keys, dim, PAGE_TOKENS).view(DTYPES[format]),
        torch.zeros(2, keys, PAGE_TOKENS, dtype=SCALES[DTYPES[format]]),
    )
    slots = torch.arange(TOKENS) + PAGE_TOKENS - 3  # across the end of a page
    again = encode_paged(qkv, transform, positions, slots, pages, as_bytes)
    assert torch.equal(again.values.view(torch.uint8), queries.values.view(torch.uint8))
    length = torch.tensor([PAGE_TOKENS - 3 + TOKENS], dtype=torch.int32)
    table = torch.tensor([[0, 1]], dtype=torch.int32)
    total = int(length)
    got = gather_pages(pages, table, torch.zeros_like(length), length, total, total, as_bytes)
    for one, other in (
        (got.keys, packed.keys),
        (got.values, packed.values),
        *zip(
            (got.key_scales, got.value_scales),
            (packed.key_scales, packed.value_scales),
            strict=True,
        ),
    ):
        assert one is not None and other is not None
        assert torch.equal(one[-TOKENS:].view(torch.uint8), other.view(torch.uint8))


def check_tensor_scales(layout: tuple[int, int, int], as_bytes: bool) -> None:
    """Given scales, of which one is 0, and the maxima of packed vectors, of pages, and in BF16."""
    (heads, keys, dim), slots = layout, torch.arange(TOKENS) + PAGE_TOKENS - 3
    slots[5] = -1
    given = torch.tensor([124, 0, 126], dtype=torch.uint8)
    transform = replace(make(layout, "e4m3"), scale_bytes=given)
    qkv = random_vectors(TOKENS, heads + 2 * keys, dim)
    qkv[1] *= 2.0**9
    qkv[3, 1, 7] = torch.nan
    qkv = qkv.view(TOKENS, -1)
    positions = torch.randint(0, POSITIONS, (TOKENS,))
    rows = RopeTable(transform.cos, transform.sin).rows(positions)
    exact = replace(transform, maxima=torch.zeros(3))
    made = specification.transform_qkv(0, qkv, exact, rows)
    expected = [
        Heads.encode(x, "e4m3", byte)
        for x, byte in zip(made, specification.fixed_bytes(exact), strict=True)
    ]
    assert any((one.values.view(torch.uint8) & 0x7F == 0x7E).sum() > 1 for one in expected)
    ours = replace(transform, maxima=torch.zeros(3))
    queries, packed = encode_packed(qkv, ours, positions, "e4m3", as_bytes)
    found = (queries.values, packed.keys, packed.values.to(E4M3))
    for one, other in zip(found, expected, strict=True):
        finite = other.scales < 255  # the sign of a NaN is the interpreter's own
        assert torch.equal(one.view(torch.uint8)[finite], other.values.view(torch.uint8)[finite])
        assert one.float()[~finite].isnan().all()
    scales = (queries.scales, packed.key_scales, packed.value_scales)
    for one, other in zip(scales, expected, strict=True):
        assert one is not None
        theirs = factors(other.scales) if one.dtype == torch.float32 else other.scales
        assert torch.equal(one.nan_to_num(), theirs.nan_to_num())
    assert ours.maxima is not None and exact.maxima is not None
    assert torch.equal(ours.maxima, exact.maxima) and exact.maxima.isfinite().all()

    plain = replace(transform, hadamard=False, maxima=torch.zeros(3))
    encode_packed(qkv, plain, positions, "bf16", as_bytes)
    assert torch.equal(plain.maxima, exact.maxima)

    values = torch.zeros(2, 2, keys, PAGE_TOKENS * dim, dtype=torch.uint8).unbind()
    pages = PagedKeys(
        values[0].view(2, keys, PAGE_TOKENS, dim).view(E4M3),
        torch.zeros(2, keys, PAGE_TOKENS, dtype=torch.uint8),
        values[1].view(2, keys, dim, PAGE_TOKENS).view(E4M3),
        torch.zeros(2, keys, PAGE_TOKENS, dtype=torch.uint8),
    )
    in_pages = replace(transform, maxima=torch.zeros(3))
    again = encode_paged(qkv, in_pages, positions, slots, pages, as_bytes)
    assert torch.equal(again.values.view(torch.uint8), queries.values.view(torch.uint8))
    page, offset = slots[slots >= 0] // PAGE_TOKENS, slots[slots >= 0] % PAGE_TOKENS
    k, v = (x.view(torch.uint8) for x in (pages.keys, pages.values))
    assert torch.equal(k[page, :, offset], packed.keys.view(torch.uint8)[slots >= 0])
    theirs = expected[2].values.view(torch.uint8)[slots >= 0]
    assert torch.equal(v[page, :, :, offset], theirs)
    written = torch.zeros(3)
    specification.raise_maxima(written, *(x[slots >= 0] for x in made))
    assert torch.equal(in_pages.maxima, written)


def check_norms(layout: tuple[int, int, int]) -> None:
    """Sums of squares may round differently, and what follows from them."""
    heads, keys, dim = layout
    q_norm, k_norm = (1 + 0.3 * torch.randn(2, dim)).bfloat16()
    transform = replace(make(layout, "bf16"), q_norm=q_norm, k_norm=k_norm)
    qkv = random_vectors(TOKENS, heads + 2 * keys, dim).view(TOKENS, -1)
    positions = torch.randint(0, POSITIONS, (TOKENS,))
    rows = RopeTable(transform.cos, transform.sin).rows(positions)
    queries, packed = encode_packed(qkv, transform, positions, "bf16")
    made = specification.transform_qkv(0, qkv, transform, rows)
    for ours, exact in zip((queries.values, packed.keys, packed.values), made, strict=True):
        assert (ours != exact).float().mean() < 1e-2
        assert (ours.float() - exact.float()).abs().max() <= exact.abs().max() * 2.0**-8

    counts = [heads, keys, keys]
    whole = torch.randn(TOKENS, sum(counts), dim).bfloat16()
    dq, dk, dv = (x.contiguous() for x in whole.split(counts, 1))
    sums = [[torch.zeros(dim), torch.zeros(dim), torch.zeros(qkv.shape[1])] for _ in range(2)]
    ours, exact = (
        backward(dq, dk, dv, qkv, transform, positions, QkvGradients(*grads))
        for backward, grads in zip((qkv_backward, specification.qkv_backward), sums, strict=True)
    )
    assert (ours != exact).float().mean() < 1e-2
    torch.testing.assert_close(ours, exact, rtol=2.0**-7, atol=1e-5)
    for one, other in zip(*sums, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def check_backward(layout: tuple[int, int, int], format: Format) -> None:
    transform, (heads, keys, dim) = make(layout, format), layout
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
        for format in ("bf16", "e4m3", "int8"):
            check_forward(layout, format)
            check_backward(layout, format)
        check_forward(layout, "e4m3", as_bytes=True)
        check_norms(layout)
        for as_bytes in (False, True):
            check_tensor_scales(layout, as_bytes)
        for bad in (torch.nan, torch.inf):
            check_forward(layout, "int8", bad)


def quick() -> None:
    """Heads whose size is no power of two."""
    interpreter._convert_float = convert
    torch.manual_seed(0)
    check_forward((2, 1, 96), "int8")
    check_forward((2, 1, 96), "bf16")
    check_backward((2, 1, 96), "int8")
