"""The kernels around the KV cache compile for sm_90: no spills, no contraction."""

from typing import Any

import pytest
import triton

from isobit.kernels.triton import attend, qkv
from isobit.kernels.triton.heads import PAGE_TOKENS
from tests.kernels.hopper.ahead_of_time import E4M3, compile_for_hopper

TYPES = {
    **dict.fromkeys(("QKV", "BIAS", "Q_NORM", "K_NORM"), "*bf16"),
    **dict.fromkeys(("COS", "SIN", "Q_SCALE"), "*fp32"),
    **dict.fromkeys(("POSITION", "SLOT"), "*i64"),
    **dict.fromkeys(("TABLE", "START", "LENGTH", "ARENA", "SOURCE", "TARGET"), "*i32"),
    **dict.fromkeys(("tokens", "pages", "table_stride"), "i32"),
    "epsilon": "fp32",
    "GIVEN": "*u8",
    "MAXIMA": "*i32",
}


def value_types(format: str, paged: bool) -> dict[str, str]:
    key = {"e4m3": E4M3, "int8": "*i8", "bf16": "*bf16"}[format]
    scales = dict.fromkeys(SCALES, "*fp32" if format == "int8" else "*u8")
    return scales | {"Q": key, "K": key, "V": key if paged or format == "bf16" else "*fp16"}


def half(dim: int) -> int:
    """Numbers of one of a vector's two parts."""
    return int(triton.next_power_of_2(dim)) // 2


SCALES = ("K_SCALE", "V_SCALE", "K_SCALE_OUT", "V_SCALE_OUT")
BIAS = ("BIAS",)
NORMS = ("Q_NORM", "K_NORM")
OF_TENSORS = ("GIVEN", "MAXIMA")
"""There where Q, K and V have a scale a tensor, in E4M3 alone."""
FEW, MANY = qkv.TILINGS


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("absent", "dim", "format", "paged", "tiling"),
    [
        # Qwen3
        (BIAS, 64, "e4m3", False, FEW),
        (BIAS, 128, "e4m3", True, MANY),
        (BIAS, 128, "e4m3", True, FEW),
        (BIAS, 128, "e4m3", False, MANY),
        (BIAS, 128, "bf16", False, FEW),
        (BIAS, 64, "bf16", True, MANY),
        (BIAS, 128, "int8", True, MANY),
        (BIAS, 128, "int8", False, FEW),
        # Qwen2
        (NORMS, 128, "e4m3", True, FEW),
        (NORMS, 128, "e4m3", False, MANY),
        (NORMS, 128, "bf16", True, MANY),
        (NORMS, 64, "e4m3", True, MANY),
        (NORMS, 64, "bf16", False, FEW),
        (NORMS, 128, "int8", False, MANY),
        (NORMS, 64, "int8", True, FEW),
        # Llama and Mistral
        (BIAS + NORMS, 128, "e4m3", True, MANY),
        (BIAS + NORMS, 128, "bf16", False, FEW),
        (BIAS + NORMS, 64, "e4m3", False, FEW),
        (BIAS + NORMS, 64, "bf16", True, FEW),
        (BIAS + NORMS, 64, "bf16", False, MANY),
        (BIAS + NORMS, 128, "int8", True, FEW),
        (BIAS + NORMS, 64, "int8", True, MANY),
        (BIAS + NORMS, 64, "int8", False, MANY),
    ],
)  # of each, any two of the rest: nobody has biases and norms
def test_encode(
    absent: tuple[str, ...], dim: int, format: str, paged: bool, tiling: qkv.Tiling
) -> None:
    constants: dict[str, Any] = {
        "H": 32, "G": 8, "D": dim, "HALF": half(dim), "TILE": PAGE_TOKENS, "N": tiling.tokens,
        "HEADS": tiling.heads, "HADAMARD": format != "bf16", "FORMAT": format,
    }  # fmt: skip
    constants |= dict.fromkeys(("Q_SCALE", "K_SCALE", "V_SCALE")) if format == "bf16" else {}
    constants |= dict.fromkeys(absent if paged else (*absent, "SLOT"))
    types = TYPES | value_types(format, paged)
    if format == "e4m3":
        compile_for_hopper(qkv._encode_kernel, types, constants, tiling.warps, maxima=True)
    constants |= dict.fromkeys(OF_TENSORS)
    stack = 8 if format == "e4m3" and paged else 0  # by Triton 3.6
    made = compile_for_hopper(qkv._encode_kernel, types, constants, tiling.warps, most_stack=stack)
    # The rotation is two products and a sum, each rounded.  A division (a norm's, INT8's) needs fma
    # in SASS.
    assert "fma" not in made.ptx
    assert absent != BIAS + NORMS or format == "int8" or "FFMA" not in made.sass


@pytest.mark.few(2)
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("format", ["bf16", "e4m3", "int8"])
def test_gather(dim: int, format: str) -> None:
    constants: dict[str, Any] = {"G": 8, "D": dim, "WIDTH": 2 * half(dim), "TILE": PAGE_TOKENS}
    constants |= {"N": qkv._GATHERED}
    constants |= dict.fromkeys(SCALES) if format == "bf16" else {}
    paged, packed = value_types(format, True), value_types(format, False)
    types = TYPES | paged | {"K_OUT": packed["K"], "V_OUT": packed["V"]}
    made = compile_for_hopper(qkv._gather_kernel, types, constants, 4, fuses=True)
    assert made.wide_loads and made.wide_stores


def test_copy() -> None:
    constants = {"WORDS": 8 * 128 * 128 // 4, "N": attend._COPIED}
    made = compile_for_hopper(attend._copy_kernel, TYPES, constants, 8, fuses=True)
    assert made.wide_loads and made.wide_stores
