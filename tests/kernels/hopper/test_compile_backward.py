"""Quantisers of WGrad's operands and the transpose of a weight compile for sm_90."""

import re
from typing import Any

import pytest
from triton.experimental.gluon._runtime import GluonASTSource

from isobit.kernels.triton import pointwise, quantise, token_groups, transpose
from tests.kernels.hopper.ahead_of_time import E4M3, Compiled, compile_for_hopper

TYPES = {
    **dict.fromkeys(("X", "DY", "GATE_UP", "OUT"), "*bf16"),
    **dict.fromkeys(("ROW_VALUES", "TOKEN_VALUES"), E4M3),
    **dict.fromkeys(("SCALES", "ROW_SCALES", "TOKEN_SCALES", "OUT_SCALES"), "*fp32"),
    **dict.fromkeys(("VALUES", "OUT_VALUES"), "*u8"),
    **dict.fromkeys(("tokens", "scale_stride"), "i32"),
    "AMAX": "*i32",
}


def assert_strips(made: Compiled, loads: int, rows: int, tokens: int, power_of_two: bool) -> None:
    """Whole vectors in and out, 16 numbers a thread: loads of strips, strips stored as row groups,
    and as token groups; everything stays in registers.
    """
    assert made.count("LDG.E.128") == 2 * loads == made.count("LDG")
    assert made.count("STG.E.64") == 2 * rows and made.count("STG.E.128") == tokens
    assert made.count("STG") == 3 * rows + 2 * tokens  # with the scales
    assert "F2F" not in re.sub("F2FP", "", made.sass)  # BF16 by pairs
    assert "FMNMX.NAN" in made.sass and "cvt.rn.satfinite.e4m3x2.f32" in made.ptx
    assert ("div.rn.f32" in made.ptx) == (not power_of_two)


def quantise_columns(columns: int, gated: bool, rows: bool, power_of_two: bool) -> dict[str, Any]:
    """What a launch over a whole matrix is compiled with."""
    return {
        **dict.fromkeys(("C", "OUT", "OUT_ROW", "COLUMNS"), columns),
        "X_ROW": columns * (1 + gated), "GATE": "silu" if gated else None, "ROWS": rows,
        "POWER_OF_TWO": power_of_two,
    }  # fmt: skip


QUANTISED = {
    "the most of everything": quantise_columns(12288, gated=True, rows=True, power_of_two=False),
    "gated, tokens": quantise_columns(12288, gated=True, rows=False, power_of_two=True),
    "both": quantise_columns(12288, gated=False, rows=True, power_of_two=True),
    "tokens": quantise_columns(12288, gated=False, rows=False, power_of_two=False),
    "a row's last group": quantise_columns(576, gated=True, rows=True, power_of_two=True),
    "a part of a gradient": {
        **quantise_columns(192, gated=False, rows=True, power_of_two=True),
        **{"X_ROW": 960, "COLUMNS": 960, "OUT": 256, "OUT_ROW": 1152},
    },
}
"""Any two of what is gated, has rows, and has scales that are powers of two."""


@pytest.mark.few(1)
@pytest.mark.parametrize("name", QUANTISED)
def test_quantise(name: str) -> None:
    constants = QUANTISED[name]
    gate, rows, power_of_two = (constants[name] for name in ("GATE", "ROWS", "POWER_OF_TWO"))
    made = compile_for_hopper(
        token_groups._quantise_kernel, TYPES, constants, token_groups.WARPS, source=GluonASTSource
    )
    assert_strips(made, 4 if gate is None else 8, 4 * rows, 4, power_of_two)
    assert made.programs >= (5 if power_of_two else 4)


@pytest.mark.few(1)
@pytest.mark.parametrize(("columns", "power_of_two"), [(12288, False), (576, True)])
def test_swiglu_backward_quantise(columns: int, power_of_two: bool) -> None:
    made = compile_for_hopper(
        pointwise._swiglu_backward_quantise_kernel,
        TYPES,
        {
            "C": columns,
            "WHOLE": -(-columns // 128) * 128,
            "COLUMNS": 2 * columns,
            "POWER_OF_TWO": power_of_two,
            "GATE": "silu",
        },
        token_groups.WARPS,
        source=GluonASTSource,
    )
    assert_strips(made, 3 * 4, 2 * 4, 2 * 4, power_of_two)
    assert made.programs >= 3


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("quantises", "power_of_two"), [(False, True), (True, True), (True, False)]
)
def test_swiglu_backward(quantises: bool, power_of_two: bool) -> None:
    constants: dict[str, Any] = {"C": 12288, "WIDTH": 1024, "POWER_OF_TWO": power_of_two}
    constants |= {"GATE": "silu"}
    if not quantises:
        constants |= {"VALUES": None, "SCALES": None}
    types = TYPES | {"VALUES": E4M3}
    made = compile_for_hopper(pointwise._swiglu_backward_kernel, types, constants, 4)
    assert (made.wide_loads, made.wide_stores) == (3, 2)
    assert ("cvt.rn.satfinite.e4m3x2.f32" in made.ptx) == quantises


@pytest.mark.few(1)
@pytest.mark.parametrize("columns", [12288, 14336, 18944, 1536, 768])
def test_swiglu_backward_in_int8(columns: int) -> None:
    chunk = quantise.chunk_of_row(columns)
    constants = {"C": columns, "WHOLE": columns, "LEVELS": quantise.levels(columns)}
    constants |= {"CHUNK": chunk, "CHUNKS": -(-columns // chunk), "GATE": "silu"}
    launch = quantise.launch_of_chunks(columns)
    made = compile_for_hopper(
        pointwise._swiglu_backward_int8_kernel, TYPES | {"VALUES": "*i8"}, constants,
        launch["num_warps"], maxnreg=launch["maxnreg"],
    )  # fmt: skip
    assert made.programs >= (1 if columns > 14336 else 2)  # for one that loads while one computes
    assert made.wide_loads


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "sizes", [(24576, 4096, 24576, 192), (576, 1536, 640, 5), (192, 576, 1152, 9)]
)
def test_transpose(sizes: tuple[int, int, int, int]) -> None:
    names = ("N", "K", "OUT_ROW", "OUT_BLOCKS")
    constants: dict[str, int] = dict(zip(names, sizes, strict=True))
    made = compile_for_hopper(transpose._transpose_kernel, TYPES, constants, 4, fuses=True)
    assert (made.wide_loads, made.wide_stores) == (8, 8)
