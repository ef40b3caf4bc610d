"""The kernels around the KV cache compile for sm_90 ahead of time, without a GPU: no spills, wide
memory accesses, no contraction.
"""

import re
from typing import Any

import pytest

triton = pytest.importorskip(
    "triton", reason="Triton is not installed: kernels are not compiled ahead of time"
)

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from isobit.kernels.hopper import kv_cache, qkv  # noqa: E402
from tests.kernels.hopper.disassembly import disassembled  # noqa: E402

POINTERS = {
    **dict.fromkeys(("QKV", "BIAS", "Q_NORM", "K_NORM"), "*bf16"),
    **dict.fromkeys(("COS", "SIN", "Q_SCALE"), "*fp32"),
    **dict.fromkeys(("POSITION", "SLOT"), "*i64"),
    **dict.fromkeys(("K_BYTE", "V_BYTE", "K_BYTE_OUT", "V_BYTE_OUT"), "*u8"),
    **dict.fromkeys(("TABLE", "START", "LENGTH", "ARENA", "SOURCE", "TARGET"), "*i32"),
    **dict.fromkeys(("tokens", "pages", "table_stride"), "i32"),
    "epsilon": "fp32",
}


def compile_for_hopper(
    kernel: Any, types: dict[str, str], constants: dict[str, Any], warps: int
) -> tuple[str, int]:
    """-> the kernel's SASS, and the bytes of stack of a thread."""
    names = [parameter.name for parameter in kernel.params]
    signature = {
        name: (POINTERS | types | dict.fromkeys(constants, "constexpr"))[name] for name in names
    }
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(names)
        if signature[name].startswith("*")
    }
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
    compiled = triton.compile(
        source,
        target=GPUTarget("cuda", 90, 32),
        options={"num_warps": warps, "enable_fp_fusion": False},
    )
    sass, usage = disassembled(compiled.asm["cubin"])
    return sass, max(int(number) for number in re.findall(r"STACK:(\d+)", usage))


def value_types(e4m3: bool, paged: bool) -> dict[str, str]:
    key = "*fp8e4nv" if e4m3 else "*bf16"
    return {"Q": key, "K": key, "V": key if paged or not e4m3 else "*fp16"}


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("e4m3", [False, True])
@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("tiling", qkv.TILINGS)
def test_encode(dim: int, e4m3: bool, paged: bool, tiling: qkv.Tiling) -> None:
    constants: dict[str, Any] = {
        "H": 32,
        "G": 8,
        "D": dim,
        "TILE": qkv.TILE,
        "N": tiling.tokens,
        "HEADS": tiling.heads,
        "HADAMARD": e4m3,
        "E4M3": e4m3,
    }
    constants |= {} if e4m3 else {"Q_SCALE": None, "K_BYTE": None, "V_BYTE": None}
    constants |= {} if paged else {"SLOT": None}
    for absent in ({}, {"BIAS": None}, {"BIAS": None, "Q_NORM": None, "K_NORM": None}):
        sass, stack = compile_for_hopper(
            qkv._encode_kernel, value_types(e4m3, paged), constants | absent, tiling.warps
        )
        assert stack == 0
        assert (
            "Q_NORM" not in absent or "FFMA" not in sass
        )  # the rotation is two products and a sum, each rounded; a division needs fma


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("e4m3", [False, True])
def test_gather(dim: int, e4m3: bool) -> None:
    constants: dict[str, Any] = {"G": 8, "D": dim, "TILE": qkv.TILE, "N": qkv._GATHERED}
    constants |= {} if e4m3 else dict.fromkeys(("K_BYTE", "V_BYTE", "K_BYTE_OUT", "V_BYTE_OUT"))
    paged, packed = value_types(e4m3, True), value_types(e4m3, False)
    types = paged | {"K_OUT": packed["K"], "V_OUT": packed["V"]}
    sass, stack = compile_for_hopper(qkv._gather_kernel, types, constants, 4)
    assert stack == 0 and "STG.E.128" in sass and "LDG.E.128" in sass


def test_copy() -> None:
    sass, stack = compile_for_hopper(
        kv_cache._copy_kernel, {}, {"WORDS": 8 * 128 * 128 // 4, "N": kv_cache._COPIED}, 8
    )
    assert stack == 0 and "LDG.E.128" in sass and "STG.E.128" in sass
