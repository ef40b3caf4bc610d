"""Backwards of norm, qkv and embedding, and the scalar head, compile for sm_90."""

from typing import Any

import pytest

from isobit.kernels.triton import device_functions, head, pointwise, qkv_backward
from tests.kernels.hopper.ahead_of_time import compile_for_hopper
from tests.kernels.hopper.test_compile_qkv import half

TYPES = {
    **dict.fromkeys(("DY", "H", "WEIGHT", "D_RESIDUAL", "DH", "HIDDEN", "D_HIDDEN"), "*bf16"),
    **dict.fromkeys(("DQ", "DK", "DV", "QKV", "BIAS", "Q_NORM", "K_NORM", "D_QKV"), "*bf16"),
    **dict.fromkeys(("SUMS", "Q_SUMS", "K_SUMS", "BIAS_SUMS", "GRAD", "COS", "SIN"), "*fp32"),
    **dict.fromkeys(("D", "OUT"), "*fp32"),
    **dict.fromkeys(("POSITION", "SORTED", "TOKEN"), "*i64"),
    **dict.fromkeys(("tokens", "tokens_of_block", "blocks", "count", "rows_of_block"), "i32"),
    "END": "*i32",
    "epsilon": "fp32",
}


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("columns", "residual"),
    [
        *((columns, True) for columns in (128, 896, 1024, 2560, 4096, 5120, 8192)),
        *((columns, False) for columns in (896, 8192)),  # less of the same
    ],
)
def test_norm(columns: int, residual: bool) -> None:
    width, rows, warps = pointwise.layout(columns)
    constants = {"C": columns, "WIDTH": width, "ROWS": rows} | (
        {} if residual else {"D_RESIDUAL": None}
    )
    made = compile_for_hopper(pointwise._norm_kernel, TYPES, constants, warps)
    assert made.wide_loads and made.wide_stores
    assert made.programs * warps >= 16


@pytest.mark.few(1)
@pytest.mark.parametrize("columns", [128, 896, 4096, 5120])  # one of each layout
def test_scalar_head(columns: int) -> None:
    width, rows, warps = pointwise.layout(columns)
    constants = {"C": columns, "WIDTH": width, "ROWS": rows}
    for kernel in (head._output_kernel, head._backward_kernel):
        made = compile_for_hopper(kernel, TYPES, constants, warps)
        assert made.wide_loads
        assert made.programs * warps >= 16


@pytest.mark.parametrize("columns", [64, 4096])
def test_block_sums(columns: int) -> None:
    constants = {"C": columns, "ROWS": device_functions._ROWS, "COLUMNS": device_functions._COLUMNS}
    made = compile_for_hopper(device_functions._add_kernel, TYPES, constants, 4, fuses=True)
    assert made.wide_loads


BIAS = ("BIAS", "BIAS_SUMS")
NORMS = ("Q_NORM", "K_NORM", "Q_SUMS", "K_SUMS")


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("absent", "layout", "hadamard"),
    [
        (BIAS, (32, 8, 128), True),
        (BIAS, (5, 5, 128), False),
        (BIAS, (14, 2, 64), True),
        (NORMS, (64, 8, 128), True),
        (NORMS, (32, 8, 128), False),
        (NORMS, (14, 2, 64), False),
        (BIAS + NORMS, (5, 5, 128), True),
        (BIAS + NORMS, (64, 8, 128), False),
        (BIAS + NORMS, (14, 2, 64), True),
    ],
)  # Qwen3, Qwen2, Llama and Mistral: nobody has biases and norms
def test_qkv(absent: tuple[str, ...], layout: tuple[int, int, int], hadamard: bool) -> None:
    constants: dict[str, Any] = {
        **dict(zip("HGD", layout, strict=True)), **dict.fromkeys(absent), "HALF": half(layout[2]),
        "N": qkv_backward.N, "HEADS": qkv_backward.HEADS, "HADAMARD": hadamard,
    }  # fmt: skip
    made = compile_for_hopper(qkv_backward._qkv_kernel, TYPES, constants, qkv_backward.WARPS)
    assert made.wide_loads and made.wide_stores
    assert made.programs >= 2
    # The rotation is two products and a sum, each rounded.  A norm's division needs fma in SASS.
    assert "fma" not in made.ptx
    assert absent != BIAS + NORMS or "FFMA" not in made.sass


@pytest.mark.few(1)
@pytest.mark.parametrize("columns", [64, 896, 4096])
def test_embedding(columns: int) -> None:
    constants = {
        "C": columns,
        "WIDTH": pointwise.columns_of_program(columns),
        "UNROLLED": pointwise._UNROLLED,
    }
    made = compile_for_hopper(pointwise._run_kernel, TYPES, constants, 4, fuses=True)
    assert columns < 1024 or made.wide_loads
