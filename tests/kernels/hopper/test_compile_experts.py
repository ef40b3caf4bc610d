"""The kernels of experts compile for sm_90: wide accesses, tensor cores, no spills."""

from typing import Any

import pytest

from isobit.kernels.hopper import grouped_gemm
from isobit.kernels.triton import dispatch, experts, transpose, wgrad
from isobit.kernels.triton import grouped_gemm as portable
from tests.kernels.hopper.ahead_of_time import E4M3, Compiled, compile_for_hopper

TYPES = {
    **dict.fromkeys(("EXPERTS", "COUNTS", "PLACES", "TOTALS", "STARTS"), "*i32"),
    **dict.fromkeys(("LOGITS", "WEIGHTS", "D_WEIGHTS", "D_LOGITS", "SCALES", "GRAD"), "*fp32"),
    **dict.fromkeys(("A_SCALE", "B_SCALE", "OUT_SCALES"), "*fp32"),
    **dict.fromkeys(("X", "ROWS", "OUT", "GATE_UP", "DY", "D_ROWS", "A", "B"), "*bf16"),
    **dict.fromkeys(
        ("tokens", "blocks", "height", "rows", "scale_stride", "a_scale_stride"), "i32"
    ),
}


def compiled(
    kernel: Any,
    constants: dict[str, Any],
    warps: int,
    types: dict[str, str] | None = None,
    **how: Any,
) -> Compiled:
    return compile_for_hopper(kernel, TYPES | (types or {}), constants, warps, **how)


NUM_EXPERTS, TOP_K = 256, 16  # both powers of two


@pytest.mark.parametrize("renormalise", [True, False])
def test_choice(renormalise: bool) -> None:
    sizes = {"NUM_EXPERTS": NUM_EXPERTS, "E": NUM_EXPERTS, "TOP_K": TOP_K}
    sizes["RENORMALISE"] = renormalise
    compiled(experts._choose_kernel, sizes | {"RANKS": TOP_K}, 1)
    compiled(experts._choose_backward_kernel, sizes, 1)


def test_places() -> None:
    chosen = {"TOP_K": TOP_K, "E": NUM_EXPERTS}
    compiled(dispatch._count_kernel, chosen, 8, fuses=True)
    for masked in (True, False):
        sizes = chosen | {"NUM_EXPERTS": NUM_EXPERTS, "MASKED": masked}
        compiled(dispatch._place_kernel, sizes, 8, fuses=True)
    sizes = {"NUM_EXPERTS": NUM_EXPERTS, "E": NUM_EXPERTS}
    compiled(dispatch._label_kernel, sizes, 4, fuses=True)


@pytest.mark.parametrize("scaled", [True, False])
def test_gather(scaled: bool) -> None:
    sizes = {"C": 2048, "WIDTH": 1024, "TOP_K": 8, "NUMBER": 16, "GROUPS": 16}
    absent = {} if scaled else dict.fromkeys(("SCALES", "OUT_SCALES"))
    words: dict[str, str] = dict.fromkeys(("X", "OUT"), "*u8" if scaled else "*bf16")
    made = compiled(dispatch._gather_kernel, sizes | absent, 4, words, fuses=True)
    assert "ld.global.v2.b32" in made.ptx if scaled else made.wide_loads


@pytest.mark.parametrize("weighted", [True, False])
def test_combine(weighted: bool) -> None:
    sizes = {"C": 2048, "WIDTH": 1024, "TOP_K": 8}
    absent = {} if weighted else {"WEIGHTS": None}
    made = compiled(dispatch._combine_kernel, sizes | absent, 4)
    assert made.wide_loads
    assert not weighted or ("fma" not in made.ptx and "FFMA" not in made.sass)


@pytest.mark.parametrize("scaled", [True, False])
@pytest.mark.parametrize("columns", [768, 96])
def test_swiglu(columns: int, scaled: bool) -> None:
    sizes = {"C": columns, "GROUPS": 8 if columns > 128 else 1, "POWER_OF_TWO": True}
    sizes |= {"GATE": "silu"}
    absent = {"LEVELS": None} if scaled else {"LEVELS": None, "SCALES": None}
    values = {"VALUES": E4M3 if scaled else "*bf16"}
    compiled(experts._swiglu_rows_kernel, sizes | absent, 4, values)


def test_swiglu_in_int8() -> None:
    sizes = {"C": 768, "GROUPS": 8, "POWER_OF_TWO": False, "LEVELS": 7, "GATE": "silu"}
    made = compiled(experts._swiglu_rows_kernel, sizes, 4, {"VALUES": "*i8"})
    assert made.wide_loads == 2 and "st.global.v2.b32" in made.ptx


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("rows", "warps", "sizes", "format"),
    [
        (64, 4, (1536, 2048, 768), "e4m3"),
        (64, 4, (192, 160, 96), "bf16"),
        (64, 4, (1536, 2048, 768), "s8"),
        (128, 8, (1536, 2048, 768), "bf16"),
        (128, 8, (192, 160, 96), "e4m3"),
        (128, 8, (192, 160, 96), "s8"),
    ],
)  # any two of a tile, whole blocks and a format
def test_grouped_gemm(rows: int, warps: int, sizes: tuple[int, int, int], format: str) -> None:
    constants: dict[str, Any] = dict(zip(("N", "K", "PART"), sizes, strict=True))
    scaled = format != "bf16"
    constants |= {"BLOCK_M": rows, "BLOCK_N": 128, "SCALED": scaled, "INT8": format == "s8"}
    constants |= {"DEPTH": 128, "BEFORE": None, "ADDS": False, "ROW": None}
    absent = {} if scaled else dict.fromkeys(("A_SCALE", "B_SCALE"))
    stages = grouped_gemm.stages(rows, 1 if scaled else 2)
    types = {"e4m3": E4M3, "bf16": "*bf16", "s8": "*i8"}
    made = compiled(
        portable._grouped_gemm_kernel, constants | absent, warps,
        dict.fromkeys("AB", types[format]), num_stages=stages,
    )  # fmt: skip
    assert made.products == {format}


@pytest.mark.few(1)
@pytest.mark.parametrize(("n", "k"), [(1536, 2048), (192, 160)])
def test_grouped_wgrad(n: int, k: int) -> None:
    sizes: dict[str, Any] = {"N": n, "K": k, "BLOCK_N": 128, "BLOCK_K": 128, "ROWS": 64}
    sizes |= {"A_ROW": n, "B_ROW": k, "tokens": None, "scale": None}
    made = compiled(wgrad._wgrad_kernel, sizes, 8, num_stages=4, fuses=True)
    assert made.products == {"bf16"}


@pytest.mark.parametrize("scaled", [True, False])
def test_transpose(scaled: bool) -> None:
    sizes = {"N": 1536, "K": 2048, "PART": 768, "COLUMNS": 1536}
    absent = {} if scaled else dict.fromkeys(("SCALES", "OUT_SCALES"))
    integers = "*u8" if scaled else "*i16"
    words: dict[str, str] = dict.fromkeys(("VALUES", "OUT_VALUES"), integers)
    made = compiled(transpose._transpose_experts_kernel, sizes | absent, 4, words, fuses=True)
    assert made.wide_loads and made.wide_stores


def test_weigh() -> None:
    sizes = {"C": 2048, "WIDTH": 2048, "TOP_K": 8}
    made = compiled(experts._weigh_kernel, sizes, 4)
    assert made.wide_loads and made.wide_stores
