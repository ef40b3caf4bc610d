"""Products in INT8 and their operands compile for sm_80, and their PTX assembles for every card
since.
"""

import re
from typing import Any

import pytest
from triton.experimental.gluon._runtime import GluonASTSource

from isobit.kernels.triton import int8, int8_backward, quantise
from isobit.kernels.triton.int8 import Dots, Tiles
from tests.kernels.hopper.ahead_of_time import Compiled
from tests.kernels.triton.assembled import (
    SHARED,
    assemble,
    assert_assembles,
    assert_multiplies_by,
    compile_portable,
)

pytestmark = pytest.mark.usefixtures("generations")

TYPES = {
    **dict.fromkeys(("X", "W", "VALUES", "OUT_VALUES"), "*i8"),
    **dict.fromkeys(("X_SCALE", "W_SCALE", "SCALES", "OUT_SCALES", "FACTORS"), "*fp32"),
    **dict.fromkeys(("BEFORE", "MASTER"), "*fp32"),
    **dict.fromkeys(("AMAX", "SUMS", "DY_AMAX", "X_AMAX", "CHANGED"), "*i32"),
    **dict.fromkeys((*"mnk", "out_row", "x_row", "rows", "tokens", "scale_stride"), "i32"),
    "OUT": "*bf16",
}
MULTIPLES = ("n", "k", "out_row")
PRODUCT = "mma.sync.aligned.m16n8k32.row.col.satfinite.s32.s8.s8.s32"

SIZES = [
    (5, 4096, 4096),
    (32, 24576, 4096),
    (33, 4096, 4096),
    (100, 6144, 4096),
    (300, 1001, 200),
    (512, 4096, 12288),
]
"""Every kind of tiles."""


def product(cut: Tiles, k: int, adds: bool = False, out: str = "*bf16") -> Compiled:
    constants: dict[str, Any] = {
        "BLOCK_M": cut.block_m, "BLOCK_N": cut.block_n, "DEPTH": cut.depth, "SPLITS": cut.splits,
        "SWAPS": cut.swaps, "WHOLE_K": k % cut.depth == 0, "ADDS": adds, "ROW": None,
    }  # fmt: skip
    constants |= {"ROW": 2 * k} if adds else {"BEFORE": None}
    types = TYPES | {"OUT": "*i32" if cut.splits > 1 else out}
    return compile_portable(
        int8._gemm_kernel, types, constants, cut.warps, num_stages=cut.stages,
        multiples=MULTIPLES if k % 16 == 0 else (),
    )  # fmt: skip


@pytest.mark.few(1)
@pytest.mark.parametrize(("m", "n", "k"), SIZES)
def test_product(m: int, n: int, k: int) -> None:
    cut = int8.cut_up(m, n, k)
    assert isinstance(cut, Tiles)
    made = product(cut, k)
    assert set(re.findall(r"\bmma\.sync\S*|\bwgmma\S*", made.ptx)) == {PRODUCT}
    assert ("cp.async.cg.shared.global" in made.ptx) == (k % 16 == 0)
    assert_assembles(made)


@pytest.mark.exhaustive
@pytest.mark.parametrize("m", [5, 512])
def test_machine_code(m: int) -> None:
    made = product(int8.tiles(m, 4096, 4096), 4096)
    assert_multiplies_by(made, "IMMA.16832.S8.S8.SAT")


def test_sizes_take_every_kind_of_tiles() -> None:
    cuts = [int8.cut_up(*size) for size in SIZES]
    kinds = {(cut.block_m, cut.splits > 1, cut.swaps) for cut in cuts if isinstance(cut, Tiles)}
    wanted = {(16, False, True), (32, False, True), (64, True, True)}
    wanted |= {(64, False, False), (128, False, False)}
    assert kinds >= wanted


@pytest.mark.few(1)
@pytest.mark.parametrize("out", ["*fp32", "*bf16"])
@pytest.mark.parametrize("m", [33, 4096])
def test_product_that_is_added(out: str, m: int) -> None:
    made = product(int8.tiles(m, 4096, 4096, adds=True), 4096, adds=True, out=out)
    assert PRODUCT in made.ptx and "fma.rn.f32" not in made.ptx
    assert_assembles(made)


@pytest.mark.few(1)
@pytest.mark.parametrize("m", [4, 1])
def test_product_of_few_tokens(m: int) -> None:
    cut = int8.cut_up(m, 4096, 4096)
    assert isinstance(cut, Dots)
    constants = {"K": 1024, "BLOCK_M": m, "ROWS": cut.rows, "WIDTH": cut.words}
    types = TYPES | dict.fromkeys("XW", "*i32")
    made = compile_portable(int8._dots_kernel, types, constants, cut.warps, multiples=MULTIPLES)
    assert made.wide_loads and "dp4a.s32.s32" in made.ptx
    assert_assembles(made)


@pytest.mark.exhaustive
def test_splits_are_added() -> None:
    constants = {"SPLITS": 8, "WIDTH": 1024}
    made = compile_portable(int8._add_splits_kernel, TYPES, constants, 4, multiples=MULTIPLES)
    assert made.wide_loads and made.wide_stores
    assert_assembles(made)


@pytest.mark.exhaustive
@pytest.mark.parametrize("columns", [576, 4096, 12288])
def test_rows(columns: int) -> None:
    width = quantise.width_of_row(columns)
    constants = {
        **dict.fromkeys(("K", "X_ROW", "OUT", "OUT_ROW"), columns), "WIDTH": width,
        "GROUPS": width // 128, "POWER_OF_TWO": False, "LEVELS": quantise.levels(columns),
    }  # fmt: skip
    warps = quantise.warps_of_row(width)
    for kernel, more in (
        (quantise._quantise_kernel, {}),
        (quantise._publish_rows_kernel, {"CHANGED": None}),
    ):
        its_own = {name: one for name, one in constants.items() if name in kernel.arg_names} | more
        made = compile_portable(kernel, TYPES | {"X": "*bf16"}, its_own, warps)
        assert made.wide_loads and "fma.rn.f32" not in made.ptx
        assert_assembles(made)


@pytest.mark.exhaustive  # the same kernels' code for sm_90 is looked at in the quick suite
@pytest.mark.parametrize("name", ["_turned_kernel", "_turned_amax_kernel"])
def test_a_turned_matrix(name: str) -> None:
    constants = {"PART": 4096, "K": 4096, "LEVELS": 7, "OVER_ROWS": 7}
    made = compile_portable(
        getattr(int8_backward, name), TYPES | {"OUT": "*i8"}, constants, 4,
        source=GluonASTSource, multiples=("out_row",), maxima=True,
    )  # fmt: skip
    assert made.wide_loads and "fma.rn.f32" not in made.ptx
    assert_assembles(made)


@pytest.mark.exhaustive
def test_columns() -> None:
    constants = {"C": 4096, "ROW": 4096, "EXPERTS": None}
    types = TYPES | {"X": "*bf16", "OUT": "*i8"}
    kernels = (
        (int8_backward._column_amax_kernel, 4, constants),
        (int8_backward._columns_kernel, 8, constants),
        (int8_backward._row_amax_kernel, 4, {"C": 4096, "WIDTH": 1024}),
        (int8_backward._balance_kernel, 4, {"PARTS": 3}),
    )
    for kernel, warps, its_own in kernels:
        types |= {"FACTORS": "*fp32"}
        made = compile_portable(kernel, types, its_own, warps, maxima=True, multiples=("x_row",))
        assert made.wide_loads or kernel is int8_backward._balance_kernel
        assert_assembles(made)


def test_an_instruction_that_a_card_lacks_is_found() -> None:
    """What the other tests would not pass over."""
    ptx = product(int8.tiles(5, 4096, 4096), 4096).ptx
    with pytest.raises(AssertionError):
        assemble(ptx.replace(".target sm_80", ".target sm_90a"), 80)
    assert min(SHARED) == 80
