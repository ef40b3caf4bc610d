"""Products in BF16, WGrad and products of experts compile for sm_80, and their PTX assembles for
every card since.
"""

import re
from typing import Any

import pytest
import torch

from isobit.kernels.triton import gemm, grouped_gemm, wgrad
from tests.kernels.hopper.ahead_of_time import Compiled
from tests.kernels.triton.assembled import assert_assembles, assert_multiplies_by, compile_portable
from tests.kernels.triton.test_compile_e4m3 import sums

pytestmark = pytest.mark.usefixtures("generations")

FORMATS = {"bf16": "*bf16", "e4m3": "*u8", "int8": "*i8"}
PRODUCTS = {
    "bf16": "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32",
    "e4m3": "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32",
    "int8": "mma.sync.aligned.m16n8k32.row.col.satfinite.s32.s8.s8.s32",
}
TYPES = {
    **dict.fromkeys("AB", "*bf16"),
    **dict.fromkeys(("A_SCALE", "B_SCALE", "GRAD", "BEFORE"), "*fp32"),
    **dict.fromkeys(("STARTS", "EXPERTS"), "*i32"),
    **dict.fromkeys((*"mnk", "a_scale_stride", "out_stride"), "i32"),
    **dict.fromkeys(("tokens", "groups", "row_size", "rows"), "i32"),
    "OUT": "*bf16",
    "scale": "fp32",
}
NO_SCALES = dict.fromkeys(("A_SCALE", "B_SCALE"))


def assert_product(made: Compiled, format: str) -> None:
    assert set(re.findall(r"\bmma\.sync\S*|\bwgmma\S*", made.ptx)) == {PRODUCTS[format]}
    assert "cp.async.cg.shared.global" in made.ptx


def bf16(m: int, turned: bool, k: int, n: int = 4096) -> Compiled:
    cut = gemm.cut_of_bf16(m, n)
    constants: dict[str, Any] = {
        "BLOCK_M": cut.block_m, "BLOCK_N": cut.block_n, "DEPTH": cut.depth, "SCALED": False,
        "WHOLE_K": k % cut.depth == 0, "A_ROW": None, "B_ROW": 4096 if turned else None,
    }  # fmt: skip
    return compile_portable(
        gemm._gemm_kernel, TYPES, NO_SCALES | constants, cut.warps, num_stages=cut.stages,
        multiples=("n", "k", "out_stride"),
    )  # fmt: skip


@pytest.mark.few(1)
@pytest.mark.parametrize("k", [4096, 1040])
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize(
    ("m", "n"), [(5, 4096), (32, 4096), (32, 150_000), (64, 4096), (300, 4096)]
)
def test_bf16(m: int, n: int, turned: bool, k: int) -> None:
    """One instruction in tiles of every size, each added to one sum, in all of a step's K."""
    made = bf16(m, turned, k, n)
    assert_product(made, "bf16")
    assert sums(made.ptx) == {gemm.cut_of_bf16(m, n).depth // 16}
    # Sums of 128 by 128 fill the registers of four warps, which took 0.8 of the time of eight.
    assert_assembles(made, {100: 8, 103: 8} if m == 300 else None)


@pytest.mark.exhaustive
@pytest.mark.parametrize("m", [5, 64, 300])
def test_machine_code(m: int) -> None:
    """In tiles of every size an element is one sum, in steps of 16 of K."""
    steps = gemm.cut_of_bf16(m, 4096).depth // 16
    assert_multiplies_by(bf16(m, turned=False, k=4096), "HMMA.16816.F32.BF16", steps)


@pytest.mark.few(1)
@pytest.mark.parametrize("of_experts", [False, True])
@pytest.mark.parametrize("format", FORMATS)
def test_wgrad(format: str, of_experts: bool) -> None:
    columns, warps = wgrad.tile_of_groups(torch.uint8 if format == "e4m3" else torch.int8)
    constants: dict[str, Any] = {"N": 1536, "K": 2048, "BLOCK_N": 128, "BLOCK_K": columns}
    constants |= {} if of_experts else {"STARTS": None}
    kernel: Any = wgrad._groups_kernel
    if format == "bf16":
        kernel = wgrad._wgrad_kernel
        constants |= {"ROWS": wgrad._STEP, "A_ROW": 1536, "B_ROW": 2048, "scale": None}
        constants |= {"tokens": None} if of_experts else {}
    made = compile_portable(
        kernel, TYPES | dict.fromkeys("AB", FORMATS[format]), constants, warps, num_stages=3,
        multiples=("row_size",),
    )  # fmt: skip
    assert_product(made, format)
    # As in the forward, ptxas 12.8 keeps two numbers a thread in memory on sm_90.
    assert_assembles(made, {90: 8} if format == "e4m3" else None)


@pytest.mark.few(1)
@pytest.mark.parametrize("tile", [64, 128])
@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("format", FORMATS)
def test_experts(format: str, adds: bool, tile: int) -> None:
    if (format == "e4m3" and tile == 128) or (adds and format != "int8"):
        pytest.skip("not a launch of its own")
    constants: dict[str, Any] = {
        "N": 1536, "K": 2048, "PART": 768, "BLOCK_M": tile, "BLOCK_N": 128,
        "SCALED": format != "bf16", "INT8": format == "int8", "ADDS": adds,
        "DEPTH": 64 if format == "bf16" else 128, "ROW": 4096 if adds else None,
    }  # fmt: skip
    constants |= {} if adds else {"BEFORE": None}
    made = compile_portable(
        grouped_gemm._grouped_gemm_kernel, TYPES | dict.fromkeys("AB", FORMATS[format]),
        constants | (NO_SCALES if format == "bf16" else {}), tile // 16, num_stages=3,
    )  # fmt: skip
    assert_product(made, format)
    assert_assembles(made)
