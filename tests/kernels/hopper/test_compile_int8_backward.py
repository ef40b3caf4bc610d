"""The kernels of DGrad and WGrad in INT8 compile for sm_90: Hadamard transforms in registers, wide
accesses, and products of INT8.
"""

import pytest
from triton.experimental.gluon._runtime import GluonASTSource

from isobit.kernels.hopper import int8_backward
from isobit.kernels.triton import int8_backward as operands
from tests.kernels.hopper.ahead_of_time import compile_for_hopper

TYPES = {
    **dict.fromkeys(("VALUES", "MADE"), "*i8"),
    **dict.fromkeys(("SCALES", "OUT_SCALES", "FACTORS", "SUMS"), "*fp32"),
    **dict.fromkeys(("LEFT_SCALE", "RIGHT_SCALE"), "*fp32"),
    **dict.fromkeys(("m", "n", "blocks", "tiles", "tokens", "rows", "out_row"), "i32"),
    **dict.fromkeys(("AMAX", "EXPERTS", "STARTS"), "*i32"),
    "X": "*bf16",
}
TILE = "tensordesc<i8[128, 128]>"


@pytest.mark.parametrize("name", ["_turned_amax_kernel", "_turned_kernel"])
def test_a_turned_matrix(name: str) -> None:
    constants = {"PART": 4096, "K": 4096, "LEVELS": 7, "OVER_ROWS": 7}
    made = compile_for_hopper(
        getattr(operands, name), TYPES | {"OUT": "*i8"}, constants, 4,
        source=GluonASTSource, multiples=("out_row",), maxima=True,
    )  # fmt: skip
    assert made.programs >= 2  # for one that loads while another computes
    assert made.wide_loads
    assert "shfl" not in made.ptx  # both transforms stay in a thread


@pytest.mark.few(1)
@pytest.mark.parametrize("absent", [{"EXPERTS": None}, {}])
def test_columns(absent: dict[str, None]) -> None:
    constants = {"C": 4096, "ROW": 4096} | absent
    kernels = (
        (operands._column_amax_kernel, 4, 4), (operands._columns_kernel, 8, 2),
    )  # fmt: skip
    for kernel, warps, programs in kernels:
        types = TYPES | {"OUT": "*i8"}
        made = compile_for_hopper(kernel, types, constants, warps, maxima=True)
        assert made.wide_loads
        assert made.programs >= programs


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("parts", "groups"),
    [
        (0, None), (0, "STARTS"), (1, None), (1, "EXPERTS"), (2, None), (2, "EXPERTS"), (3, None),
    ],
)  # fmt: skip
def test_products(parts: int, groups: str | None) -> None:
    """DGrad of so many parts, and WGrad, which adds to FP32."""
    types = {"LEFT": TILE, "RIGHT": TILE, "OUT": "*bf16" if parts else "*fp32"}
    absent = dict.fromkeys({"EXPERTS", "STARTS"} - {groups})
    if parts < 2:
        absent["SUMS"] = None
    constants = {"PARTS": max(1, parts), "PART_1": 32, "PART_2": 40, "TILE": 128, "BAND": 16}
    made = compile_for_hopper(
        int8_backward._product_kernel, TYPES | types, constants | absent, 4,
        num_stages=3, multiples="n",
    )  # fmt: skip
    assert "wgmma.mma_async.sync.aligned.m64n128k32.s32.s8.s8" in made.ptx
    assert made.programs == 2
