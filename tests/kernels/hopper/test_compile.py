"""Attention compiles for sm_90 to the instructions that its exactness and speed rest on."""

from typing import Any

import pytest
import torch
import triton

from isobit.kernels.hopper.attention import form
from isobit.kernels.triton import attention, attention_decode, attention_prefill
from isobit.kernels.triton.heads import PAGE_TOKENS
from tests.kernels.hopper.ahead_of_time import E4M3, compile_for_hopper
from tests.kernels.hopper.disassembly import spills_in_loops

TYPES = {
    **dict.fromkeys(("Q_SCALE", "LSE", "PART_O", "PART_M", "PART_L"), "*fp32"),
    **dict.fromkeys(("TABLE", "LENGTH", "Q_START", "Q_COUNT", "K_START"), "*i32"),
    **dict.fromkeys(("table_stride", "max_parts"), "i32"),
    **dict.fromkeys(("O", "SINKS"), "*bf16"),
    "c": "fp32",
}
FORMS = {
    "fp8": (torch.float8_e4m3fn, {}, {"e4m3", "f16"}),
    "int8": (torch.int8, {}, {"s8", "f16"}),
    "bf16": (torch.bfloat16, dict.fromkeys(("Q_SCALE", "K_SCALE", "V_SCALE")), {"bf16"}),
}  # fmt: skip
"""Each with the dtype of K, the tensors that it lacks, and what it multiplies."""
VARIANTS = [
    (64, "in order", 0), (128, "one", 0), (128, "apart", 0), (128, "in order", 0),
    (128, "in order", 4096), (96, "apart", 0), (256, "one", 512), (256, "in order", 0),
]  # fmt: skip
"""Size of a head, how parts of keys are computed in decode, window."""
WAITING_IN_ONE = {"fp8": 16, "int8": 24, "bf16": 0}
WAITING = {"fp8": 136, "int8": 120, "bf16": 0}
"""Bytes that a thread has in memory while one part, or a further one, is computed."""

SPILLED_IN_PARTS = 488
"""Bytes of a thread in prefill: the sums of the parts before wait while one is computed."""
VALUES = {"fp8": E4M3, "int8": "*i8", "bf16": "*bf16"}


def types(name: str, paged: bool) -> dict[str, str]:
    """Of a form's Q, K and V and their scales; packed V is in FP16 unless it is in BF16."""
    value = VALUES[name] if paged or name == "bf16" else "*fp16"
    scale = "*u8" if name == "fp8" else "*fp32"
    made = {"Q": VALUES[name], "K": VALUES[name], "V": value}
    return TYPES | made | dict.fromkeys(("K_SCALE", "V_SCALE"), scale)


def shape(name: str, dim: int, **more: Any) -> dict[str, Any]:
    return {
        "H": 32, "G": 8, "D": dim, "WIDTH": triton.next_power_of_2(dim), "PART": attention.PART,
        "SCALED": name != "bf16", "SINKS": None, **more,
    }  # fmt: skip


@pytest.mark.few(1)
@pytest.mark.parametrize(("dim", "parts", "window"), VARIANTS)
@pytest.mark.parametrize("name", FORMS)
def test_decode(name: str, dim: int, parts: str, window: int) -> None:
    dtype, absent, products = FORMS[name]
    how = form(dtype, dim)
    waiting = WAITING if parts == "in order" else WAITING_IN_ONE
    constants = shape(
        name, dim, PAGE=PAGE_TOKENS, TILE=how.tile, N=16, STAGES=how.decode_stages, PARTS=parts,
        SEALS=False, WINDOW=window,
    )  # fmt: skip
    made = compile_for_hopper(
        attention_decode._decode_kernel, types(name, paged=True), constants | absent, 4,
        num_stages=how.decode_stages, maxnreg=how.decode_registers,
        # What does not change in the loop may wait there: four programs need it.
        most_stack=waiting[name] if dim in (96, 128) else 8 if parts == "in order" else 0,
    )  # fmt: skip
    assert made.products == products
    assert made.programs >= (2 if name == "bf16" else 4) // (2 if dim > 128 else 1)


@pytest.mark.few(1)
@pytest.mark.parametrize(("dim", "parts", "window"), VARIANTS)
@pytest.mark.parametrize("name", FORMS)
def test_prefill(name: str, dim: int, parts: str, window: int) -> None:
    split = parts != "one"
    dtype, absent, products = FORMS[name]
    how = form(dtype, dim)
    constants = shape(
        name, dim, TILE=how.tile, NQ=how.queries, STAGES=how.prefill_stages, SPLIT=split,
        WINDOW=window,
    )  # fmt: skip
    made = compile_for_hopper(
        attention_prefill._prefill_kernel, types(name, paged=False), constants | absent,
        how.prefill_warps, num_stages=how.prefill_stages,
        most_stack=SPILLED_IN_PARTS if split else 16,
    )  # fmt: skip
    assert made.products == products
    in_loops = spills_in_loops(made.sass)
    assert len(in_loops) == 2 and max(in_loops) <= 2, "the sums of earlier parts wait outside"
    assert made.sass.count("WARPGROUP.DEPBAR") <= made.sass.count("GMMA") // 4  # they overlap
    assert made.programs >= 8 // how.prefill_warps


def test_join() -> None:
    constants = {"H": 32, "D": 128, "WIDTH": 128, "PART": attention.PART, "WINDOW": 0}
    constants |= {"SINKS": None}
    compile_for_hopper(attention_decode._join_kernel, TYPES, constants, 1)
