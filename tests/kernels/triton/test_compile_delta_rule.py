"""The gated delta rule compiles for sm_80 in 99 KiB, at the sizes of Qwen3.5 9B, its PTX assembles
for every card since, and all its products are chains of ``fma`` in FP32.
"""

import re
from typing import Any

import pytest
import triton
import triton.language as tl

from isobit.kernels.triton import (
    delta_factors,
    delta_gates,
    delta_rows,
    delta_rule,
    delta_rule_rollout,
    hybrid,
    pointwise,
)
from isobit.kernels.triton.delta_factors import FEW_ROWS
from isobit.kernels.triton.delta_rows import CHUNK
from isobit.kernels.triton.delta_rule import FORMS, RuleForm
from isobit.kernels.triton.delta_rule_rollout import FEW, MANY, RowForm
from tests.kernels.hopper.ahead_of_time import Compiled
from tests.kernels.hopper.disassembly import disassembled
from tests.kernels.triton.assembled import assemble, assert_assembles, compile_portable

pytestmark = pytest.mark.usefixtures("generations")

TYPES = {
    **dict.fromkeys(("X", "A", "B", "CONVOLUTION", "A_LOG", "DT_BIAS", "INPUTS", "OUT"), "*bf16"),
    **dict.fromkeys(("OWNER", "POSITION", "COUNT", "TOKEN", "READ", "WRITTEN", "WORK"), "*i32"),
    **dict.fromkeys(("Q", "K", "V", "DECAY", "BETA", "KEYS", "UPDATES", "DECAYS"), "*fp32"),
    **dict.fromkeys(("STATES", "FACTORS", "TOTALS", "SUMS"), "*fp32"),
    **dict.fromkeys(("DY", "GATE", "WEIGHT", "DX", "D_GATE"), "*bf16"),
    **dict.fromkeys(("ROUTED", "SHARED", "D_SHARED"), "*bf16"),
    **dict.fromkeys(("tokens", "count", "rows_of_block", "place", "chunks"), "i32"),
    "STATE": "*i32",
    "epsilon": "fp32",
}
HEADS = {"H": 32, "KH": 16, "DK": 128, "DV": 128}
OF_CARRIES = "READ", "KEYS"
SPILLED = {CHUNK: {86: 16, 89: 16}}
"""Bytes of a thread by the rows of a program, and by generation."""


@triton.jit
def _product_kernel(
    a, b, out, rows: tl.constexpr, columns: tl.constexpr, depth: tl.constexpr
) -> None:
    m, n = tl.arange(0, rows)[:, None], tl.arange(0, columns)[None, :]
    k = tl.arange(0, depth)
    left, right = tl.load(a + m * depth + k[None, :]), tl.load(b + k[:, None] * columns + n)
    acc = tl.dot(left, right, tl.load(out + m * columns + n), input_precision="ieee")
    tl.store(out + m * columns + n, acc)


@pytest.mark.parametrize(("rows", "warps"), [(1, 1), (16, 4)])
def test_a_product_is_one_chain_an_element(rows: int, warps: int) -> None:
    """It begins with what is added to and takes the numbers of K one by one, whatever the number of
    rows: each operand has one place in all chains.  With one row it is seen that they ascend.
    """
    depth, of_thread = 32, rows // warps
    constants = {"rows": rows, "columns": 32, "depth": depth}
    types: dict[str, str] = dict.fromkeys(("a", "b", "out"), "*fp32")
    ptx = compile_portable(_product_kernel, types, constants, warps).ptx
    place = dict[str, int]()  # of a sum in its chain
    operands = dict[str, int]()
    for made, a, b, before in re.findall(r"fma\.rn\.f32\s+(%r\d+), (%\w+), (%\w+), (%\w+);", ptx):
        place[made] = place.get(before, -1) + 1
        assert all(operands.setdefault(one, place[made]) == place[made] for one in (a, b))
    assert list(place.values()).count(depth - 1) == of_thread == len(place) // depth
    if rows == 1:
        loads = re.findall(r"ld\.shared\.v4\.b32\s+\{(.*?)\}, \[global_smem\+(\d+)\]", ptx)
        ascending = [names for names, _ in sorted(loads, key=lambda load: int(load[1]))]
        assert [operands[one] for one in ", ".join(ascending).split(", ")] == list(range(depth))


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("form", "in_training"), [*((form, False) for form in FORMS), (FORMS[-1], True)]
)
def test_walk(form: RuleForm, in_training: bool) -> None:
    """Each product and each step of a chain is one ``fma``, which PTX keeps apart from what is
    rounded twice; nothing is added by tensor cores, whose sums belong to a generation.
    """
    constants: dict[str, Any] = HEADS | dict.fromkeys(OF_CARRIES if in_training else ("STATE",))
    constants |= {"GROUP": form.rows, "ROWS": form.rows, "BV": form.columns, "BK": form.depth}
    constants |= {"MADE": form.made}
    made = compile_portable(
        delta_rule._walk_kernel, TYPES, constants, form.warps, num_stages=form.stages
    )
    assert_chains(made)
    threads = 32 * form.warps
    chains = (2 * form.depth + 16 + form.depth) * form.rows * form.columns / threads
    solved = 16 * 15 // 2 * max(1, form.columns // threads)
    of_state = 16 * form.made * form.columns / threads
    assert made.ptx.count("fma.rn.f32") == chains + solved + of_state
    assert_assembles(made, {} if in_training else SPILLED.get(form.rows))


@pytest.mark.exhaustive  # which is compiled in a fifth of the others' time
@pytest.mark.parametrize(
    ("rows", "in_training"), [(CHUNK, True), (CHUNK, False), (FEW_ROWS, False)]
)
def test_factors(rows: int, in_training: bool) -> None:
    form = delta_factors.FORMS[rows]
    constants: dict[str, Any] = {name: size for name, size in HEADS.items() if name != "DV"}
    constants |= {"HEADS": 2, "ROWS": rows, "BK": form.depth}
    constants |= dict.fromkeys(("READ", "KEYS", "DECAYS")) if in_training else {}
    made = compile_portable(
        delta_factors._factors_kernel, TYPES, constants, form.warps, num_stages=1
    )
    assert_chains(made)
    steps = 2 * form.depth * rows * CHUNK / (32 * form.warps)
    assert made.ptx.count("fma.rn.f32") == steps
    assert_assembles(made)


def assert_chains(made: Compiled) -> None:
    """FP32 without tensor cores, each operation rounded as it is written."""
    assert "mma" not in made.ptx
    assert not re.search(r"\b(?:mul|add|sub|fma)\.f32|\bfma\.rn\.ftz\.f32", made.ptx)


@pytest.mark.few(1)
@pytest.mark.parametrize("form", [FEW, MANY])
def test_a_row(form: RowForm) -> None:
    """Its threads share nothing but factors, by shuffles, and have enough registers for what they
    read of S0, keys, k and q at once.
    """
    kernel, columns = delta_rule_rollout._row_kernel, form.columns // 32  # of a thread
    constants: dict[str, Any] = HEADS | {"BV": form.columns, "DEPTH": form.depth}
    made = compile_portable(kernel, TYPES, constants, 1, num_stages=1, maxnreg=form.registers)
    assert_chains(made)
    assert made.shared == 0 and "bar.sync" not in made.ptx
    steps = form.depth * (CHUNK // 32 * 2 + columns * 2 + 1) + (16 * 2 + 1) * columns
    assert made.ptx.count("fma.rn.f32") == steps
    assert_assembles(made)
    in_front = disassembled(assemble(made.ptx, 90).cubin).partition("FFMA")[0]
    assert len(re.findall(r"\bLDG\.", in_front)) > 32


def test_the_state_of_a_chunk_that_begins() -> None:
    constants: dict[str, Any] = {name: size for name, size in HEADS.items() if name != "KH"}
    rows, sequences = delta_rule_rollout.BEGUN_ROWS, delta_rule_rollout.SEQUENCES
    constants |= {"BV": 128, "BK": rows, "SEQUENCES": sequences}
    kernel = delta_rule_rollout._begin_kernel
    made = compile_portable(kernel, TYPES, constants, 8, num_stages=1, most_stack=8)
    assert_chains(made)
    assert made.ptx.count("fma.rn.f32") >= 16 * rows * 128 // 256
    assert_assembles(made, {120: 8, 121: 8})


@pytest.mark.few(1)
@pytest.mark.parametrize(("in_training", "tokens"), [(False, 8192), (True, 8), (True, 8192)])
def test_rows(in_training: bool, tokens: int) -> None:
    vectors = delta_rows.vectors_at_once(tokens, 128, not in_training)
    constants: dict[str, Any] = HEADS | {"WIDTH": 4, "LEVELS": 7, "VECTORS": vectors}
    by_place = tokens >= delta_rows.MANY_TOKENS
    constants |= {"ROOT": 128**-0.5, "STEP": 1 if by_place else 4, "PLACE": 8192 if by_place else 1}
    constants |= dict.fromkeys(("READ", "WRITTEN", "INPUTS")) if in_training else {}
    made = compile_portable(delta_rows._rows_kernel, TYPES, constants, 4)
    assert "fma" not in made.ptx
    assert made.wide_loads and made.wide_stores
    assert not (by_place and "ld.global.b16" in made.ptx)
    assert_assembles(made, {} if in_training else {100: 4, 103: 4})


def test_steps_and_gates() -> None:
    width, rows, warps = pointwise.layout(128)
    norm = {"D": 128, "WIDTH": width, "ROWS": rows}
    of_row, rows_of_program, warps_of_row = pointwise.layout(2048)
    row = {"C": 2048, "WIDTH": of_row, "ROWS": rows_of_program}
    for kernel, constants, warps_of_kernel in (
        (delta_rows._steps_kernel, {"H": 32, "SIZE": delta_rows.STEPS}, 4),
        (delta_gates._gated_norm_kernel, norm, warps),
        (delta_gates._gated_norm_backward_kernel, norm, warps),
        (delta_gates._gated_norm_backward_kernel, norm | {"SUMS": None}, warps),
        (hybrid._sigmoid_kernel, {"WIDTH": 1024}, 4),
        (hybrid._sigmoid_backward_kernel, {"WIDTH": 1024}, 4),
        (hybrid._add_kernel, row, warps_of_row),
        (hybrid._add_backward_kernel, row, warps_of_row),
    ):
        of_shared = {"GATE": "*fp32", "D_GATE": "*fp32"} if "C" in constants else {}
        types = TYPES | of_shared
        assert_assembles(compile_portable(kernel, types, constants, warps_of_kernel))
