"""Attention compiles for sm_80 in 99 KiB, its PTX assembles for every card since, and decode and
prefill multiply in one order.
"""

import re
from typing import Any

import pytest
import torch
import triton

from isobit.kernels.triton import attention, attention_decode, attention_prefill
from isobit.kernels.triton.attention import PORTABLE
from isobit.kernels.triton.heads import HEAD_SIZES, PAGE_TOKENS
from tests.kernels.hopper.ahead_of_time import Compiled
from tests.kernels.hopper.disassembly import disassembled, spills_in_loops
from tests.kernels.hopper.test_compile import TYPES
from tests.kernels.triton import assembled
from tests.kernels.triton.assembled import (
    SHARED,
    assemble,
    assert_assembles,
    assert_multiplies_by,
    compile_portable,
)

pytestmark = pytest.mark.usefixtures("generations")

VALUES = {"bf16": "*bf16", "int8": "*i8", "e4m3": "*u8"}
DTYPES = {"bf16": torch.bfloat16, "int8": torch.int8, "e4m3": torch.float8_e4m3fn}
HALF = {
    kind: f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32" for kind in ("f16", "bf16")
}
INTEGER = "mma.sync.aligned.m16n8k32.row.col.satfinite.s32.s8.s8.s32"
PRODUCTS = {"bf16": {HALF["bf16"]}, "int8": {INTEGER, HALF["f16"]}, "e4m3": {HALF["f16"]}}
EVERY = [(format, dim) for format in VALUES for dim in HEAD_SIZES]
VARIANTS = [("one", 0), ("in order", 4096)]
"""How parts of keys are computed, and a window."""
SPILLED = {64: 16, 96: 144, 128: 144}
"""Bytes of a thread in prefill, by the size of a head: Q, the products of a tile and the sums of 16
queries fill its 255 registers, and what the loop does not change waits in memory.
"""
SPILLED_IN_PARTS = {
    "bf16": {64: 16, 96: 680, 128: 712, 256: 440},
    "e4m3": {64: 224, 96: 944, 128: 968},
    "int8": {64: 688, 96: 1856, 128: 1648},
}
"""The same of several parts of keys: the sums of those before wait while one is computed."""
SPILLED_IN_LOOPS = {("e4m3", 96): 24}
"""Loads and stores of these in a loop over tiles: 8 elsewhere, and here without a window."""
SPILLED_IN_INT8 = {64: 376, 96: 768, 128: 784}
"""The same in tiles of 128 keys, whose products alone are 64 registers, and as many their weights:
some wait in memory in the loop too, for which decode takes 0.6 to 0.7 of its time.
"""
STACK = 800  # of sm_80, what is spilled and its padding
SPILLED_BY_DECODE = {64: 56, 96: 8, 128: 8}
"""Where ptxas prefers five or four programs a multiprocessor to a few more registers."""


def shape(
    format: str, dim: int, parts: str, window: int, sinks: bool
) -> tuple[dict[str, str], dict[str, Any]]:
    """Types, and what decode and prefill have in common."""
    scale = "*u8" if format == "e4m3" else "*fp32"
    constants: dict[str, Any] = {
        "H": 32, "G": 8, "D": dim, "WIDTH": triton.next_power_of_2(dim), "PART": attention.PART,
        "TILE": PORTABLE.form(DTYPES[format], dim).tile,
        "SCALED": format != "bf16", "WINDOW": window,
    }  # fmt: skip
    constants |= {} if sinks else {"SINKS": None}
    if format == "bf16":
        constants |= dict.fromkeys(("Q_SCALE", "K_SCALE", "V_SCALE"))
    types = TYPES | dict.fromkeys("QKV", VALUES[format])
    return types | dict.fromkeys(("K_SCALE", "V_SCALE"), scale), constants


def decode(
    format: str, dim: int, parts: str = "one", window: int = 0, sinks: bool = False
) -> Compiled:
    types, constants = shape(format, dim, parts, window, sinks)
    form = PORTABLE.form(DTYPES[format], dim)
    constants |= {"PAGE": PAGE_TOKENS, "N": 16, "STAGES": form.decode_stages, "SEALS": True}
    constants |= {"PARTS": parts}
    return compile_portable(
        attention_decode._decode_kernel, types, constants, form.decode_warps,
        num_stages=form.decode_stages, maxnreg=form.decode_registers, most_stack=STACK,
    )  # fmt: skip


def prefill(
    format: str, dim: int, parts: str = "one", window: int = 0, sinks: bool = False
) -> Compiled:
    types, constants = shape(format, dim, parts, window, sinks)
    form = PORTABLE.form(DTYPES[format], dim)
    constants |= {"NQ": form.queries, "STAGES": form.prefill_stages, "SPLIT": parts != "one"}
    types |= {} if format == "bf16" else {"V": "*fp16"}
    return compile_portable(
        attention_prefill._prefill_kernel, types, constants, form.prefill_warps,
        num_stages=form.prefill_stages, most_stack=STACK,
    )  # fmt: skip


def products(made: Compiled) -> dict[str, set[tuple[int, int]]]:
    """By the format of their sums and operands: how many neighbours of K a thread has of each."""
    found: dict[str, set[tuple[int, int]]] = {}
    for line in made.ttgir.splitlines():
        if " tt.dot " in line:
            left, right = re.findall(r"x([a-z]+\d+), #ttg\.dot_op<\{[^}]*kWidth = (\d)", line)
            assert left[0] == right[0]
            kind = "Q K" if re.search(r"tt\.dot \S+, \S+, %cst", line) else "P V"
            found.setdefault(f"{kind} {left[0]}", set()).add((int(left[1]), int(right[1])))
    return found


@pytest.mark.few(1)
@pytest.mark.parametrize(("parts", "window"), VARIANTS)
@pytest.mark.parametrize(("format", "dim"), EVERY)
def test_decode_and_prefill_multiply_alike(format: str, dim: int, parts: str, window: int) -> None:
    """By one instruction, with the same keys or numbers of a head in each of its steps."""
    some, many = (make(format, dim, parts, window) for make in (decode, prefill))
    for made in (some, many):
        assert set(re.findall(r"\bmma\.sync\S*|\bwgmma\S*", made.ptx)) == PRODUCTS[format]
        assert "cp.async.cg.shared.global" in made.ptx
    assert products(some) == products(many)
    assert len(products(some)) == 2 and all(len(one) == 1 for one in products(some).values())


@pytest.mark.few(1)
@pytest.mark.parametrize(("parts", "window"), VARIANTS)
@pytest.mark.parametrize(("format", "dim"), EVERY)
def test_every_card(format: str, dim: int, parts: str, window: int) -> None:
    most = dict.fromkeys(SHARED, SPILLED_BY_DECODE.get(dim, 0) if format == "bf16" else 0)
    assert_assembles(decode(format, dim, parts, window), most)
    assert_prefill_assembles(prefill(format, dim, parts, window), format, dim, parts)


def assert_prefill_assembles(made: Compiled, format: str, dim: int, parts: str) -> None:
    spilled = SPILLED_IN_INT8 if format == "int8" else SPILLED
    spilled = spilled if parts == "one" else SPILLED_IN_PARTS[format]
    assert_assembles(made, dict.fromkeys(SHARED, spilled.get(dim, 0)))
    for generation in {80, 90, 120} & set(assembled.GENERATIONS):
        in_loops = spills_in_loops(disassembled(assemble(made.ptx, generation).cubin))
        assert len(in_loops) == 2
        most = SPILLED_IN_LOOPS.get((format, dim), 8)
        assert format == "int8" or max(in_loops) <= most, (generation, in_loops)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("parts", "window"), [("one", 128), ("in order", 0)])
@pytest.mark.parametrize("format", VALUES)
def test_sinks(format: str, parts: str, window: int) -> None:
    """What they come to is behind the loop, whose products are the same."""
    some, many = (make(format, 64, parts, window, sinks=True) for make in (decode, prefill))
    assert products(some) == products(many)
    most = dict.fromkeys(SHARED, SPILLED_BY_DECODE[64] if format == "bf16" else 0)
    assert_assembles(some, most)
    assert_prefill_assembles(many, format, 64, parts)


@pytest.mark.exhaustive
def test_machine_code() -> None:
    for make in (decode, prefill):
        assert_multiplies_by(make("bf16", 128), "HMMA.16816.F32.BF16")


@pytest.mark.exhaustive
@pytest.mark.parametrize("dim", HEAD_SIZES)
def test_join(dim: int) -> None:
    constants = {"H": 32, "D": dim, "WIDTH": triton.next_power_of_2(dim), "PART": attention.PART}
    for sinks in ({}, {"SINKS": None}):
        more = {"WINDOW": 0, **sinks}
        assert_assembles(
            compile_portable(attention_decode._join_kernel, TYPES, constants | more, 1)
        )
