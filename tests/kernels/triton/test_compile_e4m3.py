"""E4M3 as bytes: quantisers and products compile for sm_80, and their PTX assembles for every card
since.
"""

import re
from collections import Counter
from typing import Any

import pytest

from isobit.kernels.triton import gemm, quantise
from tests.kernels.hopper.ahead_of_time import Compiled
from tests.kernels.triton.assembled import assert_assembles, assert_multiplies_by, compile_portable

pytestmark = pytest.mark.usefixtures("generations")

TYPES = {
    **dict.fromkeys(("A", "B", "VALUES"), "*u8"),
    **dict.fromkeys(("A_SCALE", "B_SCALE", "SCALES", "MASTER"), "*fp32"),
    **dict.fromkeys((*"mnk", "a_scale_stride", "out_stride", "scale_stride"), "i32"),
    **dict.fromkeys(("OUT", "X"), "*bf16"),
    "CHANGED": "*i32",
}
PRODUCT = "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"
IN_A_BLOCK = 128 // 16


def sums(ptx: str) -> set[int]:
    """How many products are added to one sum: it is begun anew for each block of K."""
    found = re.findall(r"mma\.sync\S* (\{[^}]*\}), .* (\{[^}]*\});", ptx)
    assert all(made == before for made, before in found)
    return set(Counter(made for made, _ in found).values())


def product(rows: int, warps: int, k: int) -> Compiled:
    constants: dict[str, Any] = {"BLOCK_M": rows, "BLOCK_N": 128, "SCALED": True}
    constants |= {"DEPTH": 128, "A_ROW": None, "B_ROW": None}
    return compile_portable(
        gemm._gemm_kernel, TYPES, constants | {"WHOLE_K": k % 128 == 0}, warps,
        num_stages=3, multiples=("n", "k", "out_stride"),
    )  # fmt: skip


@pytest.mark.few(1)
@pytest.mark.parametrize("k", [4096, 1040])
@pytest.mark.parametrize(("rows", "warps"), [(16, 4), (32, 4), (64, 4), (128, 8)])
def test_product(rows: int, warps: int, k: int) -> None:
    """One instruction in tiles of every size, and one number of products a block of K."""
    made = product(rows, warps, k)
    assert set(re.findall(r"\bmma\.sync\S*|\bwgmma\S*", made.ptx)) == {PRODUCT}
    assert sums(made.ptx) == {IN_A_BLOCK}
    assert "cp.async.cg.shared.global" in made.ptx
    # ptxas 12.8 keeps two numbers a thread of the largest tile in memory on sm_90.
    assert_assembles(made, {90: 8} if rows == 128 else None)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("rows", "warps"), [(16, 4), (128, 8)])
def test_machine_code(rows: int, warps: int) -> None:
    assert_multiplies_by(product(rows, warps, 4096), "HMMA.16816.F32", IN_A_BLOCK)


def test_tiles_of_all_sizes() -> None:
    assert {gemm.tile(m) for m in range(1, 300)} == {16, 32, 64, 128}


@pytest.mark.few(1)
@pytest.mark.parametrize("power_of_two", [True, False])
def test_quantisers(power_of_two: bool) -> None:
    rows: dict[str, Any] = dict.fromkeys(("K", "X_ROW", "OUT", "OUT_ROW"), 4096)
    rows |= {"GROUPS": 8, "LEVELS": None, "AMAX": None, "POWER_OF_TWO": power_of_two}
    blocks = {"K": 4096, "ROWS": None, "POWER_OF_TWO": power_of_two}
    for kernel, constants, warps in (
        (quantise._quantise_kernel, rows, 4),
        (quantise._publish_kernel, blocks, 8),
    ):
        made = compile_portable(kernel, TYPES, constants, warps, fuses=True)
        assert made.wide_loads
        assert_assembles(made)
