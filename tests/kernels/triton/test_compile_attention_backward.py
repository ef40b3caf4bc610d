"""The backward of attention compiles for sm_80 in 99 KiB, and its PTX assembles for every card
since.
"""

import re
from typing import Any

import pytest
import triton

from isobit.kernels.triton import attention_backward
from isobit.kernels.triton.heads import HEAD_SIZES
from tests.kernels.hopper.ahead_of_time import Compiled
from tests.kernels.triton.assembled import (
    SHARED,
    assert_assembles,
    assert_multiplies_by,
    compile_portable,
)

pytestmark = pytest.mark.usefixtures("generations")

TYPES = {
    **dict.fromkeys(("Q", "K", "V", "DO", "DQ", "DK", "DV", "O", "SINKS"), "*bf16"),
    **dict.fromkeys(("Q_OUT", "K_OUT", "V_OUT", "DO_OUT"), "*bf16"),
    **dict.fromkeys(("STATS", "K_SCALE", "Q_SCALE", "LSE", "K_SCALE_OUT", "V_SCALE"), "*fp32"),
    "SUMS": "*fp32",
    **dict.fromkeys(("START", "LENGTH", "PADDED_START"), "*i32"),
    **dict.fromkeys(("c", "scale"), "fp32"),
    **dict.fromkeys(("padded_tokens", "tokens"), "i32"),
}
PRODUCT = "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"
SPILLED = {96: 128, 128: 128, 256: 8}
"""Bytes of a thread in the keys' kernel, by the size of a head: dK, dV, K, V and the products of a
tile fill its 255 registers.
"""
STACK = 24  # of sm_80, what is spilled and its padding


def shape(dim: int, int8: bool) -> dict[str, Any]:
    block = attention_backward.BLOCK.value
    row = triton.next_power_of_2(dim)
    return {"H": 32, "G": 8, "D": dim, "ROW": row, "WIDTH": 2 * block if int8 else block}


def keys_or_queries(which: str, dim: int, int8: bool, window: int) -> Compiled:
    how = attention_backward.walk(dim)
    owned, walked = ("KEYS", "QUERIES") if which == "keys" else ("QUERIES", "KEYS")
    constants = shape(dim, int8) | {owned: how.owned, walked: how.walked}
    constants |= {"STAGES": how.stages, "WINDOW": window} | ({} if int8 else {"K_SCALE": None})
    kernel = getattr(attention_backward, f"_{which}_kernel")
    return compile_portable(
        kernel, TYPES, constants, how.warps, num_stages=how.stages, fuses=True,
        most_stack=STACK if which == "keys" and dim > 64 else 0,
    )  # fmt: skip


@pytest.mark.few(1)
@pytest.mark.parametrize("which", ["keys", "queries"])
@pytest.mark.parametrize("dim", HEAD_SIZES)
@pytest.mark.parametrize(("int8", "window"), [(False, 4096), (True, 0)])
def test_products(which: str, dim: int, int8: bool, window: int) -> None:
    made = keys_or_queries(which, dim, int8, window)
    assert set(re.findall(r"\bmma\.sync\S*|\bwgmma\S*", made.ptx)) == {PRODUCT}
    assert "cp.async.cg.shared.global" in made.ptx
    most = SPILLED.get(dim, 0) if which == "keys" else 0
    assert_assembles(made, dict.fromkeys(SHARED, most))


@pytest.mark.exhaustive
def test_machine_code() -> None:
    assert_multiplies_by(keys_or_queries("keys", 128, False, 0), "HMMA.16816.F32.BF16")


@pytest.mark.exhaustive
def test_sinks() -> None:
    constants = {"H": 64, "D": 64, "ROW": 64, "N": attention_backward.GROUP.value}
    made = compile_portable(attention_backward._sinks_kernel, TYPES, constants, 4, fuses=True)
    assert made.wide_loads
    assert_assembles(made)


@pytest.mark.few(1)
@pytest.mark.parametrize("dim", HEAD_SIZES)
@pytest.mark.parametrize(
    ("qk", "v", "scale"),
    [("*bf16", "*bf16", None), ("*u8", "*fp16", "*u8"), ("*i8", "*fp16", "*fp32")],
)
def test_prepare(dim: int, qk: str, v: str, scale: str | None) -> None:
    types = TYPES | {"Q": qk, "K": qk, "V": v}
    constants = shape(dim, qk == "*i8") | ({} if qk == "*i8" else {"K_SCALE_OUT": None})
    if scale is None:
        constants |= dict.fromkeys(("Q_SCALE", "K_SCALE", "V_SCALE"))
    else:
        types |= dict.fromkeys(("K_SCALE", "V_SCALE"), scale)
    warps = 4 if dim <= 128 else 8
    made = compile_portable(attention_backward._prepare_kernel, types, constants, warps, fuses=True)
    assert made.wide_loads and made.wide_stores
    assert_assembles(made)
