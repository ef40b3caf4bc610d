"""What is between the qkv GEMM and attention compiles for sm_80, and its PTX assembles for every
card since: no contraction, and hardly a spill.
"""

from typing import Any

import pytest

from isobit.kernels.triton import qkv, qkv_backward
from isobit.kernels.triton.heads import HEAD_SIZES, PAGE_TOKENS
from tests.kernels.hopper import test_compile_norm_backward as of_backward
from tests.kernels.hopper.test_compile_qkv import BIAS, OF_TENSORS, SCALES, TYPES, half, value_types
from tests.kernels.triton.assembled import assert_assembles, compile_portable

pytestmark = pytest.mark.usefixtures("generations")

FORMATS = {"bf16": "bf16", "int8": "int8", "bytes": "e4m3"}
"""Each with the format that it is."""
SPILLED = {90: 8, 120: 24, 121: 24}


def types(format: str, paged: bool) -> dict[str, str]:
    made = TYPES | value_types(FORMATS[format], paged)
    return {name: "*u8" if "fp8" in one else one for name, one in made.items()}


@pytest.mark.few(1)
@pytest.mark.parametrize("tiling", qkv.TILINGS)
@pytest.mark.parametrize("paged", [True, False])
@pytest.mark.parametrize("dim", HEAD_SIZES)
@pytest.mark.parametrize("format", FORMATS)
def test_encode(format: str, dim: int, paged: bool, tiling: qkv.Tiling) -> None:
    constants: dict[str, Any] = {
        "H": 32, "G": 8, "D": dim, "HALF": half(dim), "TILE": PAGE_TOKENS, "N": tiling.tokens,
        "HEADS": tiling.heads, "HADAMARD": format != "bf16", "FORMAT": format,
    }  # fmt: skip
    constants |= dict.fromkeys(("Q_SCALE", "K_SCALE", "V_SCALE")) if format == "bf16" else {}
    constants |= dict.fromkeys(BIAS if paged else (*BIAS, "SLOT")) | dict.fromkeys(OF_TENSORS)
    made = compile_portable(qkv._encode_kernel, types(format, paged), constants, tiling.warps)
    assert "fma" not in made.ptx
    # Four rows of V in a thread, outside every loop; ptxas prefers programs to registers.
    assert_assembles(made, SPILLED if format == "int8" and paged and tiling.tokens > 4 else None)


@pytest.mark.exhaustive
@pytest.mark.parametrize("dim", HEAD_SIZES)
@pytest.mark.parametrize("format", FORMATS)
def test_gather(format: str, dim: int) -> None:
    constants: dict[str, Any] = {"G": 8, "D": dim, "WIDTH": 2 * half(dim), "TILE": PAGE_TOKENS}
    constants |= {"N": qkv._GATHERED}
    constants |= dict.fromkeys(SCALES) if format == "bf16" else {}
    packed = types(format, False)
    outputs = {"K_OUT": packed["K"], "V_OUT": packed["V"]}
    made = compile_portable(
        qkv._gather_kernel, types(format, True) | outputs, constants, 4, fuses=True
    )
    assert made.wide_loads and made.wide_stores
    assert_assembles(made)


@pytest.mark.exhaustive
@pytest.mark.parametrize("dim", HEAD_SIZES)
@pytest.mark.parametrize("absent", [of_backward.BIAS, of_backward.NORMS])
def test_backward(absent: tuple[str, ...], dim: int) -> None:
    constants: dict[str, Any] = {
        "H": 32, "G": 8, "D": dim, "HALF": half(dim), "N": qkv_backward.N,
        "HEADS": qkv_backward.HEADS, "HADAMARD": True, **dict.fromkeys(absent),
    }  # fmt: skip
    made = compile_portable(
        qkv_backward._qkv_kernel, of_backward.TYPES, constants, qkv_backward.WARPS
    )
    assert "fma" not in made.ptx
    assert_assembles(made)
