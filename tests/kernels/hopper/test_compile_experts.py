"""The kernels of experts compile for sm_90 ahead of time, without a GPU: whole vectors of bytes, no
atomics, products of the tensor cores, nothing that spills.
"""

from typing import Any

import pytest

from .test_compile import MOST_SHARED, compile_for_hopper, stack_bytes

triton = pytest.importorskip(
    "triton", reason="Triton is not installed: kernels are not compiled ahead of time"
)

from isobit.kernels.hopper import (  # noqa: E402
    dispatch,
    experts,
    experts_backward,
    grouped_gemm,
    routing,
)

E4M3 = "*fp8e4nv"
POINTERS = {
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
    stages: int = 3,
    **also: str,
) -> tuple[Any, str]:
    """-> the compiled kernel and its SASS, which neither spills nor adds in any order."""
    names = {parameter.name for parameter in kernel.params}
    known = {name: type for name, type in (POINTERS | also).items() if name in names}
    made, sass, usage = compile_for_hopper(kernel, known, constants, warps, stages)
    assert stack_bytes(usage) == 0
    assert "ATOM" not in sass and "RED.E" not in sass
    assert made.metadata.shared <= MOST_SHARED
    return made, sass


@pytest.mark.parametrize(("num_experts", "top_k"), [(256, 16)])
def test_choice(num_experts: int, top_k: int) -> None:
    width = triton.next_power_of_2(num_experts)
    sizes = {"NUM_EXPERTS": num_experts, "E": width, "TOP_K": top_k}
    for renormalise in (True, False):
        ranks = {"RANKS": triton.next_power_of_2(top_k), "RENORMALISE": renormalise}
        compiled(routing._choose_kernel, sizes | ranks, 1)
        ranks.pop("RANKS")
        compiled(routing._choose_backward_kernel, sizes | ranks, 1)


@pytest.mark.parametrize(("num_experts", "top_k"), [(256, 16)])
def test_places(num_experts: int, top_k: int) -> None:
    width = triton.next_power_of_2(num_experts)
    sizes = {"TOP_K": top_k, "E": width}
    compiled(dispatch._count_kernel, sizes, 8)
    sizes["NUM_EXPERTS"] = num_experts
    for masked in (True, False):
        compiled(dispatch._place_kernel, sizes | {"MASKED": masked}, 8)
    del sizes["TOP_K"]
    compiled(dispatch._label_kernel, sizes, 4)


@pytest.mark.parametrize("scaled", [True, False])
def test_gather(scaled: bool) -> None:
    sizes = {"C": 2048, "WIDTH": 1024, "TOP_K": 8, "GROUPS": 16}
    absent = {} if scaled else dict.fromkeys(("SCALES", "OUT_SCALES"))
    words = dict.fromkeys(("X", "OUT"), "*u8" if scaled else "*bf16")
    _, sass = compiled(dispatch._gather_kernel, sizes | absent, 4, **words)
    assert ("LDG.E.64" if scaled else "LDG.E.128") in sass


@pytest.mark.parametrize("weighted", [True, False])
def test_combine(weighted: bool) -> None:
    sizes = {"C": 2048, "WIDTH": 1024, "TOP_K": 8}
    absent = {} if weighted else {"WEIGHTS": None}
    _, sass = compiled(dispatch._combine_kernel, sizes | absent, 4)
    assert "LDG.E.128" in sass and "FFMA" not in sass


@pytest.mark.parametrize("scaled", [True, False])
@pytest.mark.parametrize("columns", [768, 96])
def test_swiglu(columns: int, scaled: bool) -> None:
    sizes = {"C": columns, "GROUPS": 8 if columns > 128 else 1, "POWER_OF_TWO": True}
    absent = {} if scaled else {"SCALES": None}
    values = E4M3 if scaled else "*bf16"
    compiled(experts._swiglu_rows_kernel, sizes | absent, 4, VALUES=values)


@pytest.mark.parametrize("scaled", [True, False])
@pytest.mark.parametrize(("n", "k", "part"), [(1536, 2048, 768), (192, 160, 96)])
@pytest.mark.parametrize(("rows", "warps"), [(64, 4), (128, 8)])
def test_grouped_gemm(rows: int, warps: int, n: int, k: int, part: int, scaled: bool) -> None:
    sizes = {"N": n, "K": k, "PART": part, "BLOCK_M": rows, "BLOCK_N": 128, "SCALED": scaled}
    absent = {} if scaled else dict.fromkeys(("A_SCALE", "B_SCALE"))
    stages = grouped_gemm.stages(rows, 1 if scaled else 2)
    _, sass = compiled(
        grouped_gemm._grouped_gemm_kernel, sizes | absent, warps, stages,
        **dict.fromkeys("AB", E4M3 if scaled else "*bf16"),
    )  # fmt: skip
    assert ("QGMMA" if scaled else "HGMMA") in sass and "HMMA" not in sass.replace("HGMMA", "")


@pytest.mark.parametrize(("n", "k"), [(1536, 2048), (192, 160)])
def test_grouped_wgrad(n: int, k: int) -> None:
    sizes = {"N": n, "K": k, "BLOCK_N": 128, "BLOCK_K": 128, "ROWS": 64}
    _, sass = compiled(grouped_gemm._grouped_wgrad_kernel, sizes, 8, 4)
    assert "HGMMA" in sass and "HMMA" not in sass.replace("HGMMA", "")


@pytest.mark.parametrize("scaled", [True, False])
def test_transpose(scaled: bool) -> None:
    sizes = {"N": 1536, "K": 2048, "PART": 768, "COLUMNS": 1536}
    absent = {} if scaled else dict.fromkeys(("SCALES", "OUT_SCALES"))
    words = dict.fromkeys(("VALUES", "OUT_VALUES"), "*u8" if scaled else "*i16")
    _, sass = compiled(grouped_gemm._transpose_kernel, sizes | absent, 4, **words)
    assert "LDG.E.128" in sass and "STG.E.128" in sass


def test_weigh() -> None:
    sizes = {"C": 2048, "WIDTH": 2048, "TOP_K": 8}
    _, sass = compiled(experts_backward._weigh_kernel, sizes, 4)
    assert "LDG.E.128" in sass and "STG.E.128" in sass
