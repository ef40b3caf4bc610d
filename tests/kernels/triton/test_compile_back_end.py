"""What back ends share, adapters, routing and rows of experts, pages, the optimiser and checksums,
compiles for sm_80, and the PTX assembles for every card since.
"""

import re
from typing import Any

import pytest

from isobit.kernels.operands import Gate
from isobit.kernels.triton import attend, dispatch, experts, head, linear, optimiser
from tests.kernels.hopper import test_compile_adapters as of_adapters
from tests.kernels.hopper import test_compile_experts as of_experts
from tests.kernels.hopper import test_compile_optimiser as of_optimiser
from tests.kernels.hopper import test_compile_qkv as of_pages
from tests.kernels.hopper.ahead_of_time import Compiled
from tests.kernels.triton.assembled import assert_assembles, compile_portable
from tests.kernels.triton.test_compile_pointwise import GATES

pytestmark = pytest.mark.usefixtures("generations")

MMA = "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"
EXPERTS, TOP_K = of_experts.NUM_EXPERTS, of_experts.TOP_K


def assembled(
    kernel: Any, types: dict[str, str], constants: Any, warps: int, **how: Any
) -> Compiled:
    made = compile_portable(kernel, types, constants, warps, **how)
    assert "griddepcontrol" not in made.ptx
    assert_assembles(made)
    return made


def products(made: Compiled) -> set[str]:
    return set(re.findall(r"\bmma\.sync\S*|\bwgmma\S*", made.ptx))


@pytest.mark.few(1)
@pytest.mark.parametrize(("ranks", "width"), [(16, 16), (48, 64), (192, 128)])
def test_low(ranks: int, width: int) -> None:
    sizes = {"K": 4096, "R": ranks, "WIDTH": width, "PART": 512, "OVERLAPS": False}
    types = of_adapters.TYPES | {"OUT": "*fp32"}
    made = assembled(linear._low_kernel, types, sizes, 4, num_stages=3)
    assert products(made) == {MMA}


@pytest.mark.few(1)
@pytest.mark.parametrize("parts", [0, 8])
@pytest.mark.parametrize(("rank", "depth"), [(5, 16), (32, 32), (64, 64)])
def test_up(rank: int, depth: int, parts: int) -> None:
    sizes = {"RANK": rank, "DEPTH": depth, "TARGETS": 3, "PARTS": parts, "OVERLAPS": False}
    sizes |= {"BEGIN_0": 0, "SIZE_0": 4096, "BEGIN_1": 4096, "SIZE_1": 1024}
    sizes |= {"BEGIN_2": 5120, "SIZE_2": 1024}
    types = of_adapters.TYPES | {"LOW": "*fp32" if parts else "*bf16"}
    made = assembled(linear._up_kernel, types, sizes, 4, multiples=("y_stride",))
    assert products(made) == {MMA}


@pytest.mark.exhaustive
def test_sum_of_parts() -> None:
    sizes = {"R": 96, "PARTS": 8, "OVERLAPS": False, "FOLLOWED": True}
    assembled(linear._sum_kernel, of_adapters.TYPES | {"LOW": "*fp32", "OUT": "*bf16"}, sizes, 4)


@pytest.mark.exhaustive
def test_routing() -> None:
    sizes = {"NUM_EXPERTS": EXPERTS, "E": EXPERTS, "TOP_K": TOP_K, "RENORMALISE": False}
    assembled(experts._choose_kernel, of_experts.TYPES, sizes | {"RANKS": TOP_K}, 1)
    assembled(experts._choose_backward_kernel, of_experts.TYPES, sizes, 1)


@pytest.mark.exhaustive
def test_dispatch() -> None:
    chosen = {"TOP_K": TOP_K, "E": EXPERTS}
    assembled(dispatch._count_kernel, of_experts.TYPES, chosen, 8, fuses=True)
    sizes = chosen | {"NUM_EXPERTS": EXPERTS, "MASKED": False}
    assembled(dispatch._place_kernel, of_experts.TYPES, sizes, 8, fuses=True)
    sizes = {"NUM_EXPERTS": EXPERTS, "E": EXPERTS}
    assembled(dispatch._label_kernel, of_experts.TYPES, sizes, 4, fuses=True)
    sizes = {"C": 2048, "WIDTH": 1024, "TOP_K": 8}
    words: dict[str, str] = dict.fromkeys(("X", "OUT"), "*u8")
    types, groups = of_experts.TYPES | words, {"NUMBER": 16, "GROUPS": 16}
    assembled(dispatch._gather_kernel, types, sizes | groups, 4, fuses=True)
    assembled(dispatch._combine_kernel, of_experts.TYPES, sizes, 4)
    assembled(experts._weigh_kernel, of_experts.TYPES, sizes | {"WIDTH": 2048}, 4)


@pytest.mark.few(1)
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("format", ["u8", "i8", "bf16"])
def test_rows_of_swiglu(format: str, gate: Gate) -> None:
    sizes: dict[str, Any] = {"C": 768, "GROUPS": 8, "POWER_OF_TWO": True, "GATE": gate}
    sizes |= {"LEVELS": 7 if format == "i8" else None}
    sizes |= {"SCALES": None} if format == "bf16" else {}
    types = of_experts.TYPES | {"VALUES": f"*{format}"}
    assembled(experts._swiglu_rows_kernel, types, sizes, 4)


@pytest.mark.exhaustive
def test_biases_of_experts() -> None:
    types = of_experts.TYPES | {"Y": "*bf16", "BIAS": "*bf16", "D": "*bf16"}
    sizes: dict[str, Any] = {"N": 5760, "WIDTH": experts._BIASED}
    assembled(experts._bias_kernel, types, sizes, 4, fuses=True)
    sizes |= {"WIDTH": 128, "ROWS": experts._SUMMED.value}
    assembled(experts._bias_backward_kernel, types, sizes, 4, fuses=True)


@pytest.mark.exhaustive
def test_copied_pages() -> None:
    sizes = {"WORDS": 8 * 128 * 128 // 4, "N": attend._COPIED}
    assembled(attend._copy_kernel, of_pages.TYPES, sizes, 8, fuses=True)


@pytest.mark.exhaustive
def test_optimiser() -> None:
    types, width = of_optimiser.TYPES, optimiser._WIDTH
    for noise, moments in ((False, "*fp32"), (True, "*bf16")):
        of_moments = dict.fromkeys(("FIRST", "SECOND"), moments)
        sizes = {"WIDTH": width, "NOISE": noise}
        made = assembled(optimiser._adamw_kernel, types | of_moments, sizes, 4, multiples=("n",))
        of_optimiser.assert_rounded(made)
    codes = dict.fromkeys(("FIRST", "SECOND", "FIRST_SCALES", "SECOND_SCALES"), "*u8")
    made = assembled(
        optimiser._adamw_8_bits_kernel, types | codes, {"GROUPS": width // 128}, 4, multiples=("n",)
    )
    of_optimiser.assert_rounded(made)
    sizes = {"SIZE": 128 * 4096, "PIECE": optimiser._PIECE, "WIDTH": optimiser._SQUARES_WIDTH}
    assembled(optimiser._squares_kernel, types, sizes, 4)
    wide = types | {"OUT": "*fp64"}
    assembled(optimiser._add_squares_kernel, wide, {"BLOCKS": optimiser._BLOCKS}, 4, fuses=True)
    sizes = {"COUNT": 8, "WIDTH": optimiser._SUM_WIDTH}
    assembled(optimiser._add_kernel, types, sizes, 8, multiples=("n",), fuses=True)


@pytest.mark.exhaustive
def test_checksum() -> None:
    types: dict[str, str] = dict.fromkeys(("TABLE", "OWNER", "SUMS"), "*i64")
    sizes = {"CHUNK": optimiser.CHUNK, "WIDTH": optimiser._CHECKED_WIDTH}
    sizes |= {"RUN": optimiser._CHECKED_RUN}
    assembled(optimiser._sums_kernel, types, sizes, optimiser._CHECKED_WARPS, fuses=True)


@pytest.mark.exhaustive
def test_gradient_of_the_logits() -> None:
    sizes = {"V": 151669, "STRIDE": 151680, "COLUMNS": 151680, "WIDTH": head._WIDTH}
    assembled(head._gradient_kernel, of_optimiser.TYPES | {"OUT": "*bf16"}, sizes, 4)
