"""The kernels of DGrad and WGrad in INT8 compile for sm_90: Hadamard transforms in registers, wide
accesses, and products of INT8.
"""

import pytest
from triton.experimental.gluon._runtime import GluonASTSource

from isobit.kernels.hopper import int8_backward
from tests.kernels.hopper.ahead_of_time import compile_for_hopper

TYPES = {
    **dict.fromkeys(("VALUES", "MADE"), "*i8"),
    **dict.fromkeys(("SCALES", "OUT_SCALES", "FACTORS", "TOTAL", "GRAD"), "*fp32"),
    **dict.fromkeys(("DY_SCALE", "W_SCALE", "X_SCALE"), "*fp32"),
    **dict.fromkeys(("m", "n", "k", "first", "blocks", "tokens", "out_row"), "i32"),
    "AMAX": "*i32",
    "X": "*bf16",
}
TILE = "tensordesc<i8[128, 128]>"


@pytest.mark.parametrize("name", ["_turned_amax_kernel", "_turned_kernel"])
def test_a_turned_matrix(name: str) -> None:
    constants = {"PART": 4096, "K": 4096, "LEVELS": 7, "OVER_ROWS": 7}
    made = compile_for_hopper(
        getattr(int8_backward, name), TYPES | {"OUT": "*i8"}, constants, 4,
        source=GluonASTSource, multiples=("out_row",), maxima=True,
    )  # fmt: skip
    assert made.programs >= 2  # for one that loads while another computes
    assert made.wide_loads
    assert "shfl" not in made.ptx  # both transforms stay in a thread


def test_columns() -> None:
    constants = {"C": 4096, "ROW": 4096}
    for kernel in (int8_backward._column_amax_kernel, int8_backward._columns_kernel):
        made = compile_for_hopper(kernel, TYPES | {"OUT": "*i8"}, constants, 8, maxima=True)
        assert made.wide_loads
        assert made.programs >= 2


@pytest.mark.parametrize(("adds", "ends"), [(False, True), (False, False), (True, True)])
def test_dgrad(adds: bool, ends: bool) -> None:
    types = {"DY": TILE, "W": TILE, "OUT": "*bf16"}
    constants = {"ADDS": adds, "ENDS": ends, "TILE": 128, "BAND": 16}
    made = compile_for_hopper(
        int8_backward._dgrad_kernel, TYPES | types, constants, 4, num_stages=3, multiples="nk"
    )
    assert "wgmma.mma_async.sync.aligned.m64n128k32.s32.s8.s8" in made.ptx
    assert made.programs == 2


def test_wgrad() -> None:
    types = {"DY": TILE, "X": TILE}
    made = compile_for_hopper(
        int8_backward._wgrad_kernel, TYPES | types, {"TILE": 128, "BAND": 16}, 4,
        num_stages=3, multiples="nk",
    )  # fmt: skip
    assert "wgmma.mma_async.sync.aligned.m64n128k32.s32.s8.s8" in made.ptx
    assert made.programs == 2
