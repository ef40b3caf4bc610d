"""The quantisers of WGrad's operands and the transpose of a weight compile for sm_90 ahead of time, without a GPU."""

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

triton = pytest.importorskip("triton", reason="Triton is not installed: kernels are not compiled ahead of time")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402
from triton.experimental.gluon._runtime import GluonASTSource  # noqa: E402

from isobit.kernels.hopper import linear_backward, swiglu_backward, token_groups  # noqa: E402

CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
POINTERS = {
    **dict.fromkeys(("X", "DY", "GATE_UP", "OUT"), "*bf16"),
    **dict.fromkeys(("VALUES", "ROW_VALUES", "TOKEN_VALUES"), "*fp8e4nv"),
    **dict.fromkeys(("SCALES", "ROW_SCALES", "TOKEN_SCALES", "OUT_SCALES"), "*fp32"),
    **dict.fromkeys(("tokens", "scale_stride"), "i32"),
}


def compile_for_hopper(
    kernel: Any,
    constants: dict[str, Any],
    tmp_path: Path,
    warps: int,
    types: dict[str, str] | None = None,
    registers: int | None = None,
    source: type = ASTSource,
) -> tuple[str, str]:
    """-> PTX and SASS of a kernel that keeps everything in registers; pointers are aligned, numbers of tokens are not."""
    names = [parameter.name for parameter in kernel.params]
    known = POINTERS | (types or {}) | dict.fromkeys(constants, "constexpr")
    signature = {name: known[name] for name in names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if signature[name].startswith("*")}
    ast = source(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
    compiled = triton.compile(
        ast, target=GPUTarget("cuda", 90, 32), options={"enable_fp_fusion": False, "maxnreg": registers, "num_warps": warps}
    )
    cubin = tmp_path / "kernel.cubin"
    cubin.write_bytes(compiled.asm["cubin"])
    sass, usage = (
        subprocess.run([CUOBJDUMP, flag, cubin], capture_output=True, text=True, check=True).stdout for flag in ("-sass", "-res-usage")
    )
    assert max(int(number) for number in re.findall(r"STACK:(\d+)", usage)) == 0 and "STL" not in sass
    assert "ATOM" not in sass and "RED.E" not in sass
    return compiled.asm["ptx"], sass


def count(sass: str, instruction: str) -> int:
    return len(re.findall(rf"\b{re.escape(instruction)}\b", sass))


def assert_quantiser(ptx: str, sass: str, power_of_two: bool, loads: int, stores: int, scales: int) -> None:
    """Whole vectors in and out, saturating casts to the nearest, and IEEE division where the scale is no power of two."""
    assert count(sass, "LDG.E.128") == loads == count(sass, "LDG")
    assert count(sass, "STG.E.128") == stores and count(sass, "STG") == stores + scales
    assert "cvt.rn.satfinite.e4m3x2.f32" in ptx
    assert ("div.rn.f32" in ptx) == (not power_of_two)


@pytest.mark.parametrize("power_of_two", [True, False])
@pytest.mark.parametrize("both", [True, False])
def test_quantise(both: bool, power_of_two: bool, tmp_path: Path) -> None:
    warps = token_groups._warps(both, power_of_two)
    constants = {"C": 4096, "BOTH": both, "POWER_OF_TWO": power_of_two}
    ptx, sass = compile_for_hopper(token_groups._quantise_kernel, constants, tmp_path, warps, registers=token_groups._REGISTERS)
    vectors = 128 * 128 // (32 * warps * 16)
    assert_quantiser(ptx, sass, power_of_two, 2 * vectors, (1 + both) * vectors, 1 + both)


@pytest.mark.parametrize("power_of_two", [True, False])
def test_swiglu_tokens(power_of_two: bool, tmp_path: Path) -> None:
    constants = {"C": 12288, "POWER_OF_TWO": power_of_two}
    ptx, sass = compile_for_hopper(
        token_groups._swiglu_tokens_kernel, constants, tmp_path, token_groups._WARPS, registers=token_groups._REGISTERS
    )
    assert_quantiser(ptx, sass, power_of_two, 16, 4, 1)


@pytest.mark.parametrize("power_of_two", [True, False])
def test_swiglu_backward_quantise(power_of_two: bool, tmp_path: Path) -> None:
    kernel = swiglu_backward._swiglu_backward_quantise_kernel
    constants = {"C": 12288, "POWER_OF_TWO": power_of_two}
    ptx, sass = compile_for_hopper(kernel, constants, tmp_path, swiglu_backward.WARPS, source=GluonASTSource)
    assert count(sass, "LDG.E.128") == 24 == count(sass, "LDG")  # three inputs, 64 numbers a thread
    assert count(sass, "STG.E.128") == 8 and count(sass, "STG.E.64") == 16 and count(sass, "STG") == 48  # 16 + 8 times scales
    assert "cvt.rn.satfinite.e4m3x2.f32" in ptx and ("div.rn.f32" in ptx) == (not power_of_two)


def test_swiglu_backward(tmp_path: Path) -> None:
    _, sass = compile_for_hopper(swiglu_backward._swiglu_backward_kernel, {"C": 12288, "WIDTH": 1024}, tmp_path, 4)
    assert count(sass, "LDG.E.128") == 3 and count(sass, "STG.E.128") == 2


def test_transpose(tmp_path: Path) -> None:
    types = {"VALUES": "*u8", "OUT_VALUES": "*u8"}
    _, sass = compile_for_hopper(linear_backward._transpose_kernel, {"N": 24576, "K": 4096}, tmp_path, 4, types)
    assert count(sass, "LDG.E.128") == 8 and count(sass, "STG.E.128") == 8
