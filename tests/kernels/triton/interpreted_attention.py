"""Run in Triton's interpreter by test_interpreted.py, in the builds of Hopper and of every card:
attention agrees with the specification up to the rounding of its sums, and a query has the same
bits decoded over pages, in a chunk and in a packed batch.

The interpreter multiplies as numpy does, in an order that depends on shapes.  Here products are
added up as tensor cores do, in steps of 16 numbers of K.
"""

# pyright: reportArgumentType=false, reportGeneralTypeIssues=false
# (Triton's types know neither plain numbers for constants nor what a kernel calls)

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

from isobit.kernels.hopper.attention import HOPPER
from isobit.kernels.spec.attention import TILE as EXACT_TILE
from isobit.kernels.spec.attention import KeyTile, attend
from isobit.kernels.spec.qkv import Heads, factors, stack_heads
from isobit.kernels.triton import attention, attention_decode
from isobit.kernels.triton.attention import (
    PORTABLE,
    Build,
    PackedKeys,
    PagedKeys,
)
from isobit.kernels.triton.attention_decode import decode_attention
from isobit.kernels.triton.attention_prefill import prefill_attention
from isobit.kernels.triton.heads import PAGE_TOKENS
from isobit.precision.quant_tensor import DTYPES, Format
from tests.kernels.comparison import same
from tests.kernels.triton.interpreted_qkv import convert

HEADS, KEYS = 4, 2
FORMATS: tuple[Format, ...] = ("e4m3", "int8", "bf16")
STEP = 16


def assembly(_: object, asm: str, constraints: str, values: list[Any], *options: object) -> Any:
    """The inline assembly of these kernels: INT8 -> FP16, and a seal."""
    if "mov.b32 $0, $1" in asm:
        return SimpleNamespace(get_result=lambda _: values[0])
    assert "f16x2" in asm
    wide = values[0].data.view(np.int8).astype(np.float16)
    return SimpleNamespace(get_result=lambda _: interpreter.TensorHandle(wide, tl.float16))


def _in_steps(_: object, a: Any, b: Any, d: Any, *how: object) -> Any:
    if a.dtype == tl.int8:
        made = np.matmul(a.data.astype(np.int32), b.data.astype(np.int32)) + d.data
        return interpreter.TensorHandle(made, d.dtype.scalar)
    left, right = (_wide(x) for x in (a, b))
    total = d.data
    for first in range(0, left.shape[1], STEP):
        step = np.zeros(total.shape)
        for k in range(first, first + STEP):
            step += left[:, k, None] * right[None, k]
        total = (total + step).astype(np.float32)
    return interpreter.TensorHandle(total, d.dtype.scalar)


def _wide(x: Any) -> np.ndarray:
    if x.data.dtype == np.float16:
        return x.data.astype(np.float64)
    return convert(x.data, x.dtype, tl.float32, None).view(np.float32).astype(np.float64)


_si_to_fp = interpreter.InterpreterBuilder.create_si_to_fp


def _to_float(builder: Any, x: Any, wanted: Any) -> Any:
    """Integers, which the interpreter does not round to BF16 but takes for its bits."""
    if wanted.scalar != tl.bfloat16:
        return _si_to_fp(builder, x, wanted)
    made = convert(x.data.astype(np.float32), tl.float32, tl.bfloat16, None)
    return interpreter.TensorHandle(made, tl.bfloat16)


def prepare() -> None:
    interpreter._convert_float = convert
    builder: Any = interpreter.InterpreterBuilder
    builder.create_inline_asm = assembly
    builder.create_dot = _in_steps
    builder.create_si_to_fp = _to_float
    torch.manual_seed(0)


def exact(
    q: Heads, k: Heads, v: Heads, window: int | None, sinks: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Packed heads of one sequence -> the specification's output [T, H, D], log-sum-exp [T, H]."""
    tokens = q.values.shape[0]
    queries = q.map(lambda x: x.view(1, tokens, KEYS, -1, *x.shape[2:]).movedim(1, 3).contiguous())
    pair = stack_heads(*(heads.map(lambda x: x[None].movedim(1, 2)) for heads in (k, v)))

    def tile_at(j: int, _: slice, width: int) -> KeyTile:
        first = j * EXACT_TILE
        return KeyTile.build(pair.map(lambda x: x[:, :, :, first : first + width].contiguous()))

    made = attend(queries, torch.arange(1, tokens + 1)[None], tile_at, window, sinks)
    output = made.output.movedim(3, 1).reshape(q.values.shape)
    return output, made.log_sum_exp.movedim(3, 1).reshape(tokens, HEADS)


def paged(x: torch.Tensor | None, transposed: bool = False) -> Any:
    """[T, G, ...] -> pages in reverse order, zeros beyond the end."""
    if x is None:
        return None
    raw = x.view(torch.uint8) if x.element_size() == 1 else x
    pages = torch.zeros(-(-len(x) // PAGE_TOKENS) * PAGE_TOKENS, *x.shape[1:], dtype=raw.dtype)
    pages[: len(x)] = raw
    made = pages.view(-1, PAGE_TOKENS, *x.shape[1:]).transpose(1, 2).flip(0)
    return (made.transpose(2, 3) if transposed else made).contiguous().view(x.dtype)


@dataclass
class Case:
    """One sequence: as the specification reads it, and as the kernels do."""

    heads: list[Heads]  # Q, K and V
    queries: torch.Tensor
    query_scales: torch.Tensor | None
    packed: PackedKeys
    pages: PagedKeys

    @classmethod
    def of(cls, heads: list[Heads], format: Format) -> "Case":
        q, k, v = (x.values for x in heads)
        if format == "bf16":
            q, k, v = (x.dequantised().bfloat16() for x in heads)
            pages = PagedKeys(paged(k), None, paged(v), None)
            return cls(heads, q, None, PackedKeys(k, None, v, None), pages)
        scales = heads[1].scales, heads[2].scales
        pages = PagedKeys(paged(k), paged(scales[0]), paged(v, transposed=True), paged(scales[1]))
        packed = PackedKeys(k, scales[0], v.half(), scales[1])
        return cls(heads, q, factors(heads[0].scales), packed, pages)

    @classmethod
    def random(cls, format: Format, length: int, dim: int) -> "Case":
        """Of heads whose sizes differ by token, so that scales do."""
        made = (
            torch.randn(length, n, dim) * torch.exp(size * torch.randn(length, n, 1))
            for n, size in zip((HEADS, KEYS, KEYS), (0.3, 0.3, 2.0), strict=True)
        )
        return cls.of([Heads.encode(x.bfloat16(), format) for x in made], format)

    def prefill(
        self, build: Build, window: int | None, first: int = 0, last: int | None = None,
        sinks: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """The queries of a chunk, behind a sequence of one token that is not looked at."""
        last = len(self.queries) if last is None else last
        rows = torch.tensor([0, *range(first, last)])
        counts, lengths = ([1, count] for count in (last - first, last))
        output, sums = prefill_attention(
            take(self.queries, rows), take(self.query_scales, rows), self.packed, ints([0, 1]),
            ints(counts), ints([0, 0]), ints(lengths), max(counts), last, window, sinks,
            build=build,
        )  # fmt: skip
        return output[1:], sums[1:]

    def decode(
        self,
        build: Build,
        window: int | None,
        rows: list[int],
        sinks: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens of the sequence, as so many sequences that share their pages."""
        pages = -(-len(self.queries) // PAGE_TOKENS)
        table = torch.arange(pages - 1, -1, -1, dtype=torch.int32).repeat(len(rows), 1)
        index = torch.tensor(rows)
        return decode_attention(
            take(self.queries, index), take(self.query_scales, index), self.pages, table,
            ints([row + 1 for row in rows]), len(self.queries), window, sinks, build=build,
        )  # fmt: skip


def take(x: Any, rows: torch.Tensor) -> Any:
    if x is None:
        return None
    return (x.view(torch.uint8) if x.element_size() == 1 else x)[rows].view(x.dtype)


def ints(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


SINKS = torch.tensor([-3.0, 0.5, 4.0, 20.0]).bfloat16()
"""From one that takes next to nothing to one that takes nearly all."""


def check(
    build: Build,
    format: Format,
    dim: int,
    window: int | None,
    length: int,
    sinks: torch.Tensor | None = None,
) -> None:
    case = Case.random(format, length, dim)
    q, k, v = case.heads
    wanted, wanted_sums = exact(q, k, v, window, sinks)
    output, sums = case.prefill(build, window, sinks=sinks)
    error = (output.float() - wanted).norm() / wanted.norm()
    assert error < 3e-3, error  # of the output in BF16
    if sinks is not None:  # whose heads differ in size
        heads = (output.float() - wanted).norm(dim=(0, 2)) / wanted.norm(dim=(0, 2))
        assert (heads < 3e-3).all(), heads
    torch.testing.assert_close(sums, wanted_sums, rtol=1e-5, atol=1e-4)
    rows = sorted({0, 30, 63, 64, length // 2, length - 2, length - 1} & set(range(length)))
    usual = attention_decode.MOST_APART
    for most in {usual, 0} if length > attention.PART else {usual}:  # parts apart, and in order
        attention_decode.MOST_APART = most
        decoded = case.decode(build, window, rows, sinks)
        assert all(map(torch.equal, decoded, (output[rows], sums[rows])))
    attention_decode.MOST_APART = usual
    first, last = length // 3 + 1, length - 3
    chunk = case.prefill(build, window, first, last, sinks)
    assert all(map(torch.equal, chunk, (output[first:last], sums[first:last])))


def check_parts(build: Build, format: Format) -> None:
    """Several of them, as a long sequence has."""
    whole = attention.PART
    attention.PART = PAGE_TOKENS
    check(build, format, 64, None, 2 * PAGE_TOKENS + 44, SINKS)
    check(build, format, 64, 100, 3 * PAGE_TOKENS + 5)
    attention.PART = whole


def check_what_is_not_a_number(format: Format) -> None:
    """Of a key's vector or a value's: every query that sees it, in both builds alike."""
    tile = PORTABLE.form(DTYPES[format], 64).tile
    place, length = tile + 6, tile + 36
    for which in (1, 2):
        case = Case.random(format, length, 64)
        clean = case.prefill(PORTABLE, None)
        heads = case.heads[which]
        if format == "bf16":
            heads.scales[place] = 255
        else:
            raw = heads.values.view(torch.uint8)
            raw[place] = 0x7F if format == "e4m3" else 0
            heads.scales[place] = 255 if format == "e4m3" else torch.nan
        case = Case.of(case.heads, format)
        made = case.prefill(PORTABLE, None)
        assert made[0][place:].isnan().all()
        assert all(same(x[:tile], y[:tile]) for x, y in zip(made, clean, strict=True))
        rows = [tile - 1, place, length - 1]
        decoded, _ = case.decode(PORTABLE, None, rows)
        assert not decoded[0].isnan().any() and decoded[1:].isnan().all()
        assert case.prefill(HOPPER, None)[0][place:].isnan().all()


def quick() -> None:
    prepare()
    check(PORTABLE, "e4m3", 96, 40, 100)
    check(PORTABLE, "int8", 64, 40, 100, SINKS)


def whole() -> None:
    prepare()
    for build in (HOPPER, PORTABLE):
        for format in FORMATS:
            check(build, format, 64, 100, 2 * PAGE_TOKENS + 44)
            check_parts(build, format)
    for format in FORMATS:
        for dim in (96, 128, 256):
            check(PORTABLE, format, dim, None, PAGE_TOKENS + 30)
        for dim in (96, 256):
            check(HOPPER, format, dim, 40, PAGE_TOKENS + 30)
        check(HOPPER, format, 64, 40, PAGE_TOKENS + 30, SINKS)
        check_what_is_not_a_number(format)
