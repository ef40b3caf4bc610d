"""The kernels of INT8 compile for sm_90: wide accesses, integer products, no spills, and a Hadamard
transform in registers.
"""

import re
from typing import Any

import pytest

from isobit.kernels.hopper import int8
from isobit.kernels.triton import int8 as portable
from isobit.kernels.triton import quantise, transpose
from tests.kernels.hopper.ahead_of_time import Compiled, compile_for_hopper

TYPES = {
    **dict.fromkeys(("X", "H", "H_OUT", "NORM", "WEIGHT", "GATE_UP", "KEPT", "OUT"), "*bf16"),
    **dict.fromkeys(("SCALES", "X_SCALE", "W_SCALE", "OUT_SCALES", "MASTER"), "*fp32"),
    **dict.fromkeys(("CHANGED", "SUMS"), "*i32"),
    **dict.fromkeys((*"mnk", "out_row", "scale_stride"), "i32"),
    "VALUES": "*i8",
    "OUT_VALUES": "*u8",
    "epsilon": "fp32",
}


def compiled(kernel: Any, constants: dict[str, Any], warps: int, **how: Any) -> Compiled:
    """With those of the constants that are its parameters."""
    its_own = {name: constants[name] for name in kernel.arg_names if name in constants}
    return compile_for_hopper(kernel, TYPES | how.pop("types", {}), its_own, warps, **how)


def row_constants(columns: int) -> tuple[dict[str, Any], int]:
    """What kernels that take whole rows are compiled with, and the numbers of a program."""
    width = quantise.width_of_row(columns)
    constants = {
        **dict.fromkeys(("C", "K", "X_ROW", "OUT", "OUT_ROW"), columns), "WIDTH": width,
        "GROUPS": width // 128, "POWER_OF_TWO": False, "LEVELS": quantise.levels(columns),
        "ADD": True, "KEEP": True, "QUANTISE": True, "AMAX": None,
    }  # fmt: skip
    return constants, width


def chunk_constants(columns: int) -> dict[str, Any]:
    """What kernels that take whole rows in chunks are compiled with."""
    chunk = quantise.chunk_of_row(columns)
    constants = {"C": columns, "WHOLE": columns, "LEVELS": quantise.levels(columns)}
    return constants | {"CHUNK": chunk, "CHUNKS": -(-columns // chunk)}


def assert_in_registers(made: Compiled) -> None:
    """Of shared memory, only what joins the warps' maxima; no product is joined to a sum."""
    assert made.shared <= 64 and made.wide_loads and made.wide_stores
    assert not re.search(r"\bfma\.rn\.f32\b", made.ptx)


@pytest.mark.few(1)
@pytest.mark.parametrize("columns", [4096, 12288, 5120])
def test_rows(columns: int) -> None:
    constants, width = row_constants(columns)
    made = compiled(quantise._quantise_kernel, constants, quantise.warps_of_row(width))
    assert_in_registers(made)


@pytest.mark.few(1)
@pytest.mark.parametrize("is_kept", [False, True])
@pytest.mark.parametrize("columns", [4096, 12288])
def test_swiglu(columns: int, is_kept: bool) -> None:
    constants = chunk_constants(columns)
    chunk = constants["CHUNK"]
    constants |= {"GATE": "silu"} | ({} if is_kept else {"KEPT": None})
    launch = quantise.launch_of_chunks(columns)
    warps, registers = launch["num_warps"], launch["maxnreg"]
    made = compiled(quantise._swiglu_int8_kernel, constants, warps, maxnreg=registers)
    # What is kept is stored in vectors of BF16, the INT8 in vectors of twice as many numbers.
    assert made.shared <= (chunk if is_kept else 64)
    assert made.programs >= 2  # for one that loads while another computes
    assert made.wide_loads


@pytest.mark.few(1)
@pytest.mark.parametrize(("columns", "warps"), [(1024, 4), (4096, 8), (8192, 8)])
def test_rms_norm(columns: int, warps: int) -> None:
    constants, _ = row_constants(columns)
    made = compiled(quantise._rms_norm_kernel, constants, warps)
    assert made.wide_loads and made.wide_stores


@pytest.mark.few(1)
@pytest.mark.parametrize("counted", [True, False])
@pytest.mark.parametrize("columns", [4096, 12288])
def test_publish(columns: int, counted: bool) -> None:
    constants, width = row_constants(columns)
    absent = {} if counted else {"CHANGED": None}
    warps = quantise.warps_of_row(width)
    assert_in_registers(compiled(quantise._publish_rows_kernel, constants | absent, warps))


@pytest.mark.few(1)
@pytest.mark.parametrize("power_of_two", [True, False])
@pytest.mark.parametrize(("rows", "part", "columns"), [(24576, 24576, 4096), (192, 96, 1040)])
def test_copy_for_dgrad(rows: int, part: int, columns: int, power_of_two: bool) -> None:
    blocks = rows // part * -(-part // 128)
    constants = {
        "N": rows, "PART": part, "K": columns, "OUT_ROW": 128 * blocks, "OUT_BLOCKS": blocks,
        "LEVELS": quantise.levels(columns), "POWER_OF_TWO": power_of_two, "BYTES": False,
    }  # fmt: skip
    made = compiled(transpose._e4m3_kernel, constants, 8)
    assert made.wide_loads and made.wide_stores
    assert made.programs >= 2


SIZES = [
    (8, 4096, 4096),
    (8, 6144, 4096),
    (5, 24576, 4096),
    (20, 4096, 12288),
    (32, 2048, 6144),
    (64, 4096, 12288),
    (64, 24576, 4096),
    (128, 4096, 4096),
    (128, 24576, 4096),
    (128, 151936, 4096),
    (5, 1152, 1040),
]
"""Every kind of tiles, split and whole, and K that is no multiple of 128."""


def of_tiles(cut: int8.Dots | int8.Tiles, k: int) -> dict[str, Any]:
    assert isinstance(cut, int8.Tiles)
    return {
        "BLOCK_M": cut.block_m, "BLOCK_N": cut.block_n, "DEPTH": cut.depth, "SPLITS": cut.splits,
        "SWAPS": cut.swaps, "WHOLE_K": k % cut.depth == 0, "BEFORE": None, "ADDS": False,
        "ROW": None,
    }  # fmt: skip


@pytest.mark.few(1)
@pytest.mark.parametrize(("m", "n", "k"), SIZES)
def test_product(m: int, n: int, k: int) -> None:
    cut = int8.cut_up(m, n, k)
    assert isinstance(cut, int8.Tiles)
    types = {**dict.fromkeys("XW", "*i8"), "OUT": "*i32" if cut.splits > 1 else "*bf16"}
    made = compiled(
        portable._gemm_kernel,
        of_tiles(cut, k),
        cut.warps,
        types=types,
        multiples=("n", "k", "out_row"),
        num_stages=cut.stages,
    )
    assert made.products == {"old" if cut.block_n < 64 else "s8"}
    assert "cp.async.cg.shared.global" in made.ptx
    assert made.wide_stores or m <= 32  # which leave few bytes to store
    assert made.programs >= (1 if cut.swaps else 2)


def test_sizes_take_every_kind_of_tiles() -> None:
    cuts = [int8.cut_up(*size) for size in SIZES]
    kinds = {
        (cut.block_m, cut.splits > 1, cut.swaps) for cut in cuts if isinstance(cut, int8.Tiles)
    }
    wanted = {(16, False, True), (64, True, True), (128, True, True), (64, False, False)}
    assert kinds >= wanted | {(128, False, False)}


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("m", "n", "k", "block_m", "block_n"),
    [
        (200, 4096, 4096, 64, 64),
        (256, 24576, 4096, 64, 128),
        (512, 6144, 4096, 64, 128),
        (1024, 4096, 12288, 128, 128),
        (16384, 4096, 1040, 128, 128),
    ],
)
def test_product_of_many_tokens(m: int, n: int, k: int, block_m: int, block_n: int) -> None:
    """The copy engine reads, and two programs fit a multiprocessor."""
    cut = int8.cut_up(m, n, k)
    assert isinstance(cut, int8.Persistent) and (cut.block_m, cut.block_n) == (block_m, block_n)
    constants = {"BLOCK_M": block_m, "BLOCK_N": block_n, "BAND": 16}
    types = {"X": f"tensordesc<i8[{block_m}, 128]>", "W": f"tensordesc<i8[{block_n}, 128]>"}
    made = compiled(
        int8._persistent_kernel,
        constants,
        4,
        types=types,
        multiples=("n", "k", "out_row"),
        num_stages=cut.stages,
    )
    assert made.products == {"s8"} and "cp.async.bulk.tensor.2d" in made.ptx
    assert made.programs >= 2


@pytest.mark.few(2)
@pytest.mark.parametrize("m", [1, 2, 4])
@pytest.mark.parametrize("k", [4096, 12288, 1040])
def test_product_of_few_tokens(m: int, k: int) -> None:
    """Words stay in the registers that they were loaded to; of shared memory, what joins sums."""
    cut = int8.cut_up(m, 4096, k)
    assert isinstance(cut, int8.Dots)
    constants = {"K": k // 4, "BLOCK_M": m, "ROWS": cut.rows, "WIDTH": cut.words}
    types = dict.fromkeys("XW", "*i32")
    made = compiled(
        portable._dots_kernel, constants, cut.warps, types=types, multiples=("n", "out_row")
    )
    assert made.shared <= 4 * cut.rows * m * cut.warps
    assert made.wide_loads and "dp4a.s32.s32" in made.ptx
    assert made.programs * cut.warps >= 24


def test_rows_without_vectors() -> None:
    cut = int8.cut_up(300, 1001, 200)
    assert isinstance(cut, int8.Tiles)
    types = dict.fromkeys("XW", "*i8")
    made = compiled(
        portable._gemm_kernel, of_tiles(cut, 200), 4, types=types, num_stages=cut.stages
    )
    assert made.products == {"s8"}


def test_splits_are_added() -> None:
    constants = {"SPLITS": 8, "WIDTH": 1024}
    made = compiled(portable._add_splits_kernel, constants, 4, multiples=("n", "out_row"))
    assert made.wide_loads and made.wide_stores
