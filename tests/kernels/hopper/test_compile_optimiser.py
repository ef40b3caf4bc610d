"""AdamW, sums of gradients and squares, the logits' gradient and checksums compile for sm_90."""

import re
from typing import Any

import pytest

from isobit.kernels.triton import head, optimiser
from tests.kernels.hopper.ahead_of_time import Compiled, compile_for_hopper

TYPES = {
    **dict.fromkeys(
        ("MASTER", "GRAD", "LOGITS", "TEMPERATURE", "LOG_SUM", "D_LOG_PROB", "X"), "*fp32"
    ),
    **dict.fromkeys(("ENTROPY", "D_ENTROPY"), "*fp32"),
    **dict.fromkeys(
        ("clip", "beta1", "rest1", "beta2", "rest2", "root", "epsilon", "size", "decay"), "fp32"
    ),
    **dict.fromkeys(("TOTAL", *(f"A{place}" for place in range(8))), "*fp32"),
    **dict.fromkeys(("n", "stride", "blocks", "pieces"), "i32"),
    **dict.fromkeys(("key", "first"), "i64"),
    "SUMS": "*fp64",
    "TARGET": "*i64",
}
MULTIPLES = ("n",)  # for all but the smallest tensors


def assert_rounded(made: Compiled) -> None:
    """Every operation is rounded, as the CPU's are."""
    assert "div.rn.f32" in made.ptx and "sqrt.rn.f32" in made.ptx
    assert "fma" not in made.ptx and ".ftz" not in made.ptx


@pytest.mark.few(1)
@pytest.mark.parametrize("noise", [False, True])
def test_adamw(noise: bool) -> None:
    moments = dict.fromkeys(("FIRST", "SECOND"), "*bf16" if noise else "*fp32")
    constants = {"WIDTH": optimiser._WIDTH, "NOISE": noise}
    made = compile_for_hopper(
        optimiser._adamw_kernel, TYPES | moments, constants, 4, multiples=MULTIPLES
    )
    assert made.wide_loads == (6 if noise else 8) == made.count("LDG")
    assert made.wide_stores == (4 if noise else 6) == made.count("STG")
    assert_rounded(made)


def test_adamw_with_8_bit_moments() -> None:
    codes = dict.fromkeys(("FIRST", "SECOND", "FIRST_SCALES", "SECOND_SCALES"), "*u8")
    constants = {"GROUPS": optimiser._WIDTH // 128}
    made = compile_for_hopper(
        optimiser._adamw_8_bits_kernel, TYPES | codes, constants, 4, multiples=MULTIPLES
    )
    for width, reads, writes in (
        ("128", 4, 2),
        ("64", 2, 2),
        ("U8", 2, 2),
    ):  # master and gradient, codes, scales
        assert made.count(f"LDG.E.{width}") == reads and made.count(f"STG.E.{width}") == writes
    assert_rounded(made)


@pytest.mark.parametrize(
    ("size", "piece"),
    [(128 * 4096, optimiser._PIECE), (128 * 1000, optimiser._PIECE), (128, 128), (37, 64)],
)
def test_gradient_squares(size: int, piece: int) -> None:
    constants = {"SIZE": size, "PIECE": piece, "WIDTH": min(optimiser._SQUARES_WIDTH, piece)}
    made = compile_for_hopper(optimiser._squares_kernel, TYPES, constants, 4)
    assert (made.wide_loads > 0) == (size >= 128 * 128)


def test_sums_of_a_blocks_pieces() -> None:
    constants = {"BLOCKS": optimiser._BLOCKS}
    types = TYPES | {"OUT": "*fp64"}
    compile_for_hopper(optimiser._add_squares_kernel, types, constants, 4, fuses=True)


@pytest.mark.parametrize("count", [1, 2, 8])
def test_an_ordered_sum_reads_each_number_once(count: int) -> None:
    constants = {"COUNT": count, "WIDTH": optimiser._SUM_WIDTH}
    made = compile_for_hopper(
        optimiser._add_kernel, TYPES, constants, 8, multiples=MULTIPLES, fuses=True
    )
    vectors = optimiser._SUM_WIDTH // (8 * 32 * 4)  # of four numbers, by eight warps
    assert made.wide_loads == (count + 1) * vectors
    assert made.wide_stores == vectors
    assert made.ptx.count("add.f32") == count * 4 * vectors


@pytest.mark.parametrize("of_entropies", [True, False])
@pytest.mark.parametrize("size", [151936, 40])
def test_gradient_of_the_logits(size: int, of_entropies: bool) -> None:
    constants: dict[str, Any] = {"V": size - 3, "STRIDE": size, "COLUMNS": size}
    constants["WIDTH"] = head._WIDTH
    constants |= {} if of_entropies else {"ENTROPY": None, "D_ENTROPY": None}
    types = TYPES | {"OUT": "*bf16"}
    made = compile_for_hopper(head._gradient_kernel, types, constants, 4)
    if size % 16 == 0:
        assert made.wide_loads and made.wide_stores


def test_checksum() -> None:
    constants = {
        "CHUNK": optimiser.CHUNK,
        "WIDTH": optimiser._CHECKED_WIDTH,
        "RUN": optimiser._CHECKED_RUN,
    }
    types: dict[str, str] = dict.fromkeys(("TABLE", "OWNER", "SUMS"), "*i64")
    made = compile_for_hopper(
        optimiser._sums_kernel, types, constants, optimiser._CHECKED_WARPS, fuses=True
    )
    assert made.programs >= 4
    at_once = max(len(re.findall(r"LDG\.E\.128", block)) for block in made.sass.split("BRA"))
    words_of_a_thread = optimiser._CHECKED_WIDTH // (optimiser._CHECKED_WARPS * 32)
    assert at_once >= 4 * words_of_a_thread // 4, "the loop over chunks is unrolled"
