"""The kernels around the KV cache compile for sm_90: no spills, no contraction."""

from typing import Any

import pytest

from isobit.kernels.hopper import attend, qkv
from tests.kernels.hopper.ahead_of_time import E4M3, compile_for_hopper

TYPES = {
    **dict.fromkeys(("QKV", "BIAS", "Q_NORM", "K_NORM"), "*bf16"),
    **dict.fromkeys(("COS", "SIN", "Q_SCALE"), "*fp32"),
    **dict.fromkeys(("POSITION", "SLOT"), "*i64"),
    **dict.fromkeys(("K_SCALE", "V_SCALE", "K_SCALE_OUT", "V_SCALE_OUT"), "*u8"),
    **dict.fromkeys(("TABLE", "START", "LENGTH", "ARENA", "SOURCE", "TARGET"), "*i32"),
    **dict.fromkeys(("tokens", "pages", "table_stride"), "i32"),
    "epsilon": "fp32",
}


def value_types(e4m3: bool, paged: bool) -> dict[str, str]:
    key = E4M3 if e4m3 else "*bf16"
    return {"Q": key, "K": key, "V": key if paged or not e4m3 else "*fp16"}


BIAS = ("BIAS",)
NORMS = ("Q_NORM", "K_NORM")
FEW, MANY = qkv.TILINGS


@pytest.mark.parametrize(
    ("absent", "dim", "e4m3", "paged", "tiling"),
    [
        # Qwen3
        (BIAS, 128, True, True, MANY),
        (BIAS, 128, True, True, FEW),
        (BIAS, 128, True, False, MANY),
        (BIAS, 128, False, False, FEW),
        (BIAS, 64, True, False, FEW),
        (BIAS, 64, False, True, MANY),
        # Qwen2
        (NORMS, 128, True, True, FEW),
        (NORMS, 128, True, False, MANY),
        (NORMS, 128, False, True, MANY),
        (NORMS, 64, True, True, MANY),
        (NORMS, 64, False, False, FEW),
        # Llama and Mistral
        (BIAS + NORMS, 128, True, True, MANY),
        (BIAS + NORMS, 128, False, False, FEW),
        (BIAS + NORMS, 64, True, False, FEW),
        (BIAS + NORMS, 64, False, True, FEW),
        (BIAS + NORMS, 64, False, False, MANY),
    ],
)  # of each, any two of the rest: nobody has biases and norms
def test_encode(
    absent: tuple[str, ...], dim: int, e4m3: bool, paged: bool, tiling: qkv.Tiling
) -> None:
    constants: dict[str, Any] = {
        "H": 32, "G": 8, "D": dim, "TILE": qkv.TILE, "N": tiling.tokens, "HEADS": tiling.heads,
        "HADAMARD": e4m3, "E4M3": e4m3,
    }  # fmt: skip
    constants |= {} if e4m3 else {"Q_SCALE": None, "K_SCALE": None, "V_SCALE": None}
    constants |= dict.fromkeys(absent if paged else (*absent, "SLOT"))
    types = TYPES | value_types(e4m3, paged)
    made = compile_for_hopper(qkv._encode_kernel, types, constants, tiling.warps)
    assert made.stack == 0
    # The rotation is two products and a sum, each rounded.  A norm's division needs fma in SASS.
    assert "fma" not in made.ptx
    assert absent != BIAS + NORMS or "FFMA" not in made.sass


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("e4m3", [False, True])
def test_gather(dim: int, e4m3: bool) -> None:
    constants: dict[str, Any] = {"G": 8, "D": dim, "TILE": qkv.TILE, "N": qkv._GATHERED}
    constants |= {} if e4m3 else dict.fromkeys(("K_SCALE", "V_SCALE", "K_SCALE_OUT", "V_SCALE_OUT"))
    paged, packed = value_types(e4m3, True), value_types(e4m3, False)
    types = TYPES | paged | {"K_OUT": packed["K"], "V_OUT": packed["V"]}
    made = compile_for_hopper(qkv._gather_kernel, types, constants, 4, fuses=True)
    assert made.stack == 0 and made.wide_loads and made.wide_stores


def test_copy() -> None:
    constants = {"WORDS": 8 * 128 * 128 // 4, "N": attend._COPIED}
    made = compile_for_hopper(attend._copy_kernel, TYPES, constants, 8, fuses=True)
    assert made.stack == 0 and made.wide_loads and made.wide_stores
