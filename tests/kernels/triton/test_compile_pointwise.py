"""Norm, SwiGLU, groups of tokens and W^T, in E4M3 as bytes and in INT8, compile for sm_80, and
their PTX assembles for every card since; kernels of Gluon have nothing of later generations.
"""

from typing import Any, get_args

import pytest
from triton.experimental.gluon._runtime import GluonASTSource

from isobit.kernels.operands import Gate
from isobit.kernels.triton import pointwise, quantise, token_groups, transpose
from tests.kernels.hopper.test_compile_backward import QUANTISED
from tests.kernels.triton.assembled import assert_assembles, compile_portable

pytestmark = pytest.mark.usefixtures("generations")

TYPES = {
    **dict.fromkeys(("X", "DY", "GATE_UP", "OUT", "H", "WEIGHT", "D_RESIDUAL", "DH"), "*bf16"),
    **dict.fromkeys(("NORM", "H_OUT", "KEPT"), "*bf16"),
    **dict.fromkeys(("VALUES", "ROW_VALUES", "TOKEN_VALUES", "OUT_VALUES"), "*u8"),
    **dict.fromkeys(("SCALES", "ROW_SCALES", "TOKEN_SCALES", "OUT_SCALES", "SUMS"), "*fp32"),
    **dict.fromkeys(("tokens", "scale_stride", "tokens_of_block"), "i32"),
    "AMAX": "*i32",
    "epsilon": "fp32",
}
GATES: tuple[Gate, ...] = get_args(Gate)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("name", "gate"),
    [*((name, "silu") for name in QUANTISED), *(("gated, tokens", gate) for gate in GATES[1:])],
)
def test_groups_of_tokens(name: str, gate: Gate) -> None:
    constants = QUANTISED[name]
    if constants["GATE"] is not None:
        constants = constants | {"GATE": gate}
    made = compile_portable(
        token_groups._quantise_kernel, TYPES, constants, token_groups.WARPS, source=GluonASTSource
    )
    assert made.wide_loads and "e4m3x2" not in made.ptx
    assert_assembles(made)


@pytest.mark.exhaustive
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize(("columns", "power_of_two"), [(12288, False), (576, True)])
def test_swiglu_backward_in_groups_of_tokens(columns: int, power_of_two: bool, gate: Gate) -> None:
    whole = -(-columns // 128) * 128
    constants = {"C": columns, "WHOLE": whole, "COLUMNS": 2 * columns, "GATE": gate}
    made = compile_portable(
        pointwise._swiglu_backward_quantise_kernel, TYPES,
        constants | {"POWER_OF_TWO": power_of_two}, token_groups.WARPS, source=GluonASTSource,
    )  # fmt: skip
    assert made.wide_loads
    assert_assembles(made)


@pytest.mark.few(1)
@pytest.mark.parametrize("in_int8", [False, True])
@pytest.mark.parametrize("columns", [128, 896, 4096, 8192])
def test_norm(columns: int, in_int8: bool) -> None:
    width = quantise.width_of_row(columns)
    constants: dict[str, Any] = {"C": columns, "WIDTH": width, "POWER_OF_TWO": True}
    constants |= dict.fromkeys(("ADD", "KEEP", "QUANTISE"), True)
    constants |= {"LEVELS": quantise.levels(columns) if in_int8 else None}
    types = TYPES | ({"VALUES": "*i8"} if in_int8 else {})
    made = compile_portable(quantise._rms_norm_kernel, types, constants, 8 if width >= 4096 else 4)
    # A row of 8192 numbers in INT8 is held by as many registers as two programs have there.
    assert_assembles(made, dict.fromkeys((86, 89), 4) if (columns, in_int8) == (8192, True) else {})


@pytest.mark.exhaustive
@pytest.mark.parametrize("columns", [128, 896, 4096, 8192])
def test_norm_backward(columns: int) -> None:
    width, rows, warps = pointwise.layout(columns)
    constants = {"C": columns, "WIDTH": width, "ROWS": rows}
    assert_assembles(compile_portable(pointwise._norm_kernel, TYPES, constants, warps))


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("columns", "gate"),
    [*((n, "silu") for n in (12288, 14336, 18944, 1536)), (10240, "gelu_tanh"),
     (2880, "clamped_silu")],
)  # fmt: skip
def test_swiglu_in_int8(columns: int, gate: Gate) -> None:
    chunk, launch = quantise.chunk_of_row(columns), quantise.launch_of_chunks(columns)
    chunks = {"C": columns, "CHUNK": chunk, "CHUNKS": -(-columns // chunk)}
    chunks |= {"LEVELS": quantise.levels(columns), "GATE": gate}
    for kernel, more in (
        (quantise._swiglu_int8_kernel, {}),
        (pointwise._swiglu_backward_int8_kernel, {"WHOLE": -(-columns // 128) * 128}),
    ):
        made = compile_portable(
            kernel, TYPES | {"VALUES": "*i8"}, chunks | more, launch["num_warps"],
            maxnreg=launch["maxnreg"],
        )  # fmt: skip
        assert_assembles(made)


@pytest.mark.few(1)
@pytest.mark.parametrize("gate", GATES)
def test_swiglu(gate: Gate) -> None:
    sizes: dict[str, Any] = {"C": 12288, "WIDTH": 1024}
    for kernel, constants in (
        (quantise._swiglu_kernel, sizes),
        (quantise._swiglu_quantise_kernel, {"C": 12288, "GROUPS": 8, "POWER_OF_TWO": True}),
        (pointwise._swiglu_backward_kernel, sizes | {"POWER_OF_TWO": True}),
        (
            pointwise._swiglu_backward_kernel,
            sizes | {"POWER_OF_TWO": True, "VALUES": None, "SCALES": None},
        ),
    ):
        made = compile_portable(kernel, TYPES, constants | {"GATE": gate}, 4)
        assert made.wide_loads
        assert_assembles(made)


@pytest.mark.exhaustive
def test_transposed() -> None:
    experts = {"N": 1536, "K": 2048, "PART": 768, "COLUMNS": 1536}
    dense: dict[str, Any] = {"K": 4096, "OUT_ROW": 24576, "OUT_BLOCKS": 192, "N": 24576}
    of_int8 = dense | {"PART": 12288, "LEVELS": 7, "POWER_OF_TWO": True, "BYTES": True}
    words = TYPES | dict.fromkeys(("VALUES", "OUT_VALUES"), "*i16")
    no_scales = dict.fromkeys(("SCALES", "OUT_SCALES"))
    for kernel, types, constants, warps in (
        (transpose._transpose_kernel, TYPES, dense, 4),
        (transpose._e4m3_kernel, TYPES | {"VALUES": "*i8"}, of_int8, 8),
        (transpose._transpose_experts_kernel, TYPES, experts, 4),
        (transpose._transpose_experts_kernel, words, experts | no_scales, 4),
    ):
        made = compile_portable(kernel, types, constants, warps)
        assert made.wide_loads and made.wide_stores
        assert_assembles(made)
