"""Run in Triton's interpreter by test_interpreted.py: decode over pages and prefill of packed
sequences agree with the specification in 8 bits, up to the rounding of their sums.
"""

# pyright: reportArgumentType=false, reportGeneralTypeIssues=false
# (Triton's types know neither plain numbers for constants nor what a kernel calls)

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

from isobit.kernels.hopper.attention import (
    TILE,
    PackedKeys,
    PagedKeys,
    decode_attention,
    prefill_attention,
)
from isobit.kernels.spec.attention import TILE as EXACT_TILE
from isobit.kernels.spec.attention import KeyTile, attend
from isobit.kernels.spec.qkv import Heads, factors, stack_heads
from isobit.precision.quant_tensor import Format
from tests.kernels.hopper.interpreted_qkv import convert

HEADS, KEYS, DIM = 4, 2, 64
LENGTH = 2 * TILE + 44


def halves(_: object, asm: str, constraints: str, values: list[Any], *options: object) -> Any:
    """The one inline assembly of these kernels: INT8 -> FP16."""
    assert "f16x2" in asm
    wide = values[0].data.view(np.int8).astype(np.float16)
    return SimpleNamespace(get_result=lambda _: interpreter.TensorHandle(wide, tl.float16))


def exact(q: Heads, k: Heads, v: Heads, window: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Packed heads of one sequence -> the specification's output [T, H, D], log-sum-exp [T, H]."""
    tokens = q.values.shape[0]
    queries = q.map(lambda x: x.view(1, tokens, KEYS, -1, *x.shape[2:]).movedim(1, 3).contiguous())
    pair = stack_heads(*(heads.map(lambda x: x[None].movedim(1, 2)) for heads in (k, v)))

    def tile_at(j: int, _: slice, width: int) -> KeyTile:
        first = j * EXACT_TILE
        return KeyTile.build(pair.map(lambda x: x[:, :, :, first : first + width].contiguous()))

    made = attend(queries, torch.arange(1, tokens + 1)[None], tile_at, window)
    output = made.output.movedim(3, 1).reshape(tokens, HEADS, DIM)
    return output, made.log_sum_exp.movedim(3, 1).reshape(tokens, HEADS)


def paged(x: torch.Tensor, transposed: bool = False) -> torch.Tensor:
    """[T, G, ...] -> pages in reverse order, zeros beyond the end."""
    raw = x.view(torch.uint8) if x.element_size() == 1 else x
    pages = torch.zeros(-(-len(x) // TILE) * TILE, *x.shape[1:], dtype=raw.dtype)
    pages[: len(x)] = raw
    made = pages.view(-1, TILE, *x.shape[1:]).transpose(1, 2).flip(0)
    return (made.transpose(2, 3) if transposed else made).contiguous().view(x.dtype)


def check(format: Format, window: int | None) -> None:
    shapes = (HEADS, KEYS, KEYS)
    # Heads whose sizes differ by token, so that scales do.
    q, k, v = (
        torch.randn(LENGTH, n, DIM) * torch.exp(size * torch.randn(LENGTH, n, 1))
        for n, size in zip(shapes, (0.3, 0.3, 2.0), strict=True)
    )
    heads = [Heads.encode(x.bfloat16(), format) for x in (q, k, v)]
    values = [x.values for x in heads]
    q_scales, k_scales, v_scales = factors(heads[0].scales), heads[1].scales, heads[2].scales
    wanted, wanted_lse = exact(heads[0], heads[1], heads[2], window)
    packed = PackedKeys(values[1], k_scales, values[2].half(), v_scales)
    pages = PagedKeys(
        paged(values[1]), paged(k_scales), paged(values[2], transposed=True), paged(v_scales)
    )
    count, start = (torch.tensor([n], dtype=torch.int32) for n in (LENGTH, 0))
    output, sums = prefill_attention(
        values[0], q_scales, packed, start, count, start, count, LENGTH, LENGTH, window
    )
    close(output, wanted, sums, wanted_lse)
    table = torch.arange(-(-LENGTH // TILE) - 1, -1, -1, dtype=torch.int32)[None]
    for last in (0, 30, TILE, LENGTH - 1):
        row = slice(last, last + 1)
        got, lse = decode_attention(
            values[0][row], q_scales[row], pages, table,
            torch.tensor([last + 1], dtype=torch.int32), LENGTH, window,
        )  # fmt: skip
        close(got, wanted[row], lse, wanted_lse[row])
        if format == "int8":  # where q . k is exact in numpy's order, too
            assert torch.equal(lse, sums[row])


def close(
    got: torch.Tensor, wanted: torch.Tensor, lse: torch.Tensor, wanted_lse: torch.Tensor
) -> None:
    error = (got.float() - wanted).norm() / wanted.norm()
    assert error < 3e-3, error  # of the output in BF16
    torch.testing.assert_close(lse, wanted_lse, rtol=1e-5, atol=1e-4)


def main() -> None:
    interpreter._convert_float = convert
    builder: Any = interpreter.InterpreterBuilder
    builder.create_inline_asm = halves
    torch.manual_seed(0)
    for format in ("e4m3", "int8"):
        for window in (None, 100):
            check(format, window)
