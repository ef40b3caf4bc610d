"""The quantisers of WGrad's operands and the transpose of a weight compile for sm_90 ahead of time,
without a GPU.
"""

import re
from dataclasses import dataclass
from typing import Any

import pytest

triton = pytest.importorskip(
    "triton", reason="Triton is not installed: kernels are not compiled ahead of time"
)

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402
from triton.experimental.gluon._runtime import GluonASTSource  # noqa: E402

from isobit.kernels.hopper import linear_backward, swiglu_backward, token_groups  # noqa: E402
from tests.kernels.hopper.disassembly import disassembled  # noqa: E402

REGISTERS, SHARED, SHARED_OF_A_PROGRAM = (
    64 * 1024,
    228 * 1024,
    1024,
)  # of a multiprocessor; what the driver adds to a program's own
POINTERS = {
    **dict.fromkeys(("X", "DY", "GATE_UP", "OUT"), "*bf16"),
    **dict.fromkeys(("VALUES", "ROW_VALUES", "TOKEN_VALUES"), "*fp8e4nv"),
    **dict.fromkeys(("SCALES", "ROW_SCALES", "TOKEN_SCALES", "OUT_SCALES"), "*fp32"),
    **dict.fromkeys(("tokens", "scale_stride"), "i32"),
}


@dataclass(frozen=True)
class Compiled:
    ptx: str
    sass: str
    registers: int
    """Of a program."""
    shared: int
    """Bytes of a program."""


def compile_for_hopper(
    kernel: Any,
    constants: dict[str, Any],
    warps: int,
    types: dict[str, str] | None = None,
    source: type = ASTSource,
) -> Compiled:
    """A kernel that keeps everything in registers; pointers are aligned, numbers of tokens are
    not.
    """
    names = [parameter.name for parameter in kernel.params]
    known = POINTERS | (types or {}) | dict.fromkeys(constants, "constexpr")
    signature = {name: known[name] for name in names}
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(names)
        if signature[name].startswith("*")
    }
    ast = source(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
    compiled = triton.compile(
        ast,
        target=GPUTarget("cuda", 90, 32),
        options={"enable_fp_fusion": False, "num_warps": warps},
    )
    sass, usage = disassembled(compiled.asm["cubin"])
    assert (
        max(int(number) for number in re.findall(r"STACK:(\d+)", usage)) == 0 and "STL" not in sass
    )
    assert "ATOM" not in sass and "RED.E" not in sass
    registers = (
        -(-max(int(number) for number in re.findall(r"REG:(\d+)", usage)) // 8) * 8
    )  # as they are dealt out
    return Compiled(compiled.asm["ptx"], sass, registers * 32 * warps, compiled.metadata.shared)


def count(sass: str, instruction: str) -> int:
    return len(re.findall(rf"\b{re.escape(instruction)}\b", sass))


def programs(made: Compiled) -> int:
    """That a multiprocessor holds."""
    return min(REGISTERS // made.registers, SHARED // (made.shared + SHARED_OF_A_PROGRAM))


def assert_strips(made: Compiled, loads: int, rows: int, tokens: int, power_of_two: bool) -> None:
    """Whole vectors in and out, 16 numbers a thread: loads of strips, strips stored as row groups,
    and as token groups.
    """
    ptx, sass = made.ptx, made.sass
    assert count(sass, "LDG.E.128") == 2 * loads == count(sass, "LDG")
    assert count(sass, "STG.E.64") == 2 * rows and count(sass, "STG.E.128") == tokens
    assert count(sass, "STG") == 3 * rows + 2 * tokens  # with the scales
    assert "F2F" not in re.sub("F2FP", "", sass)  # BF16 by pairs
    assert (
        "FMNMX.NAN" in sass
        and "cvt.rn.satfinite.e4m3x2.f32" in ptx
        and ("div.rn.f32" in ptx) == (not power_of_two)
    )


def quantise_columns(columns: int, gated: bool, rows: bool, power_of_two: bool) -> dict[str, Any]:
    """What a launch over a whole matrix is compiled with."""
    return {
        **dict.fromkeys(("C", "OUT", "OUT_ROW", "COLUMNS"), columns),
        "X_ROW": columns * (1 + gated),
        "GATED": gated,
        "ROWS": rows,
        "POWER_OF_TWO": power_of_two,
    }


@pytest.mark.parametrize("power_of_two", [True, False])
@pytest.mark.parametrize("rows", [True, False])
@pytest.mark.parametrize("gated", [True, False])
def test_quantise(gated: bool, rows: bool, power_of_two: bool) -> None:
    made = compile_for_hopper(
        token_groups._quantise_kernel,
        quantise_columns(12288, gated, rows, power_of_two),
        token_groups.WARPS,
        source=GluonASTSource,
    )
    assert_strips(made, 4 * (1 + gated), 4 * rows, 4, power_of_two)
    assert programs(made) >= (5 if power_of_two else 4)


SHORT = {
    "a row's last group": quantise_columns(576, gated=True, rows=True, power_of_two=True),
    "a part of a gradient": {
        **quantise_columns(192, gated=False, rows=True, power_of_two=True),
        **{"X_ROW": 960, "COLUMNS": 960, "OUT": 256, "OUT_ROW": 1152},
    },
}


@pytest.mark.parametrize("name", SHORT)
def test_quantise_with_a_short_group(name: str) -> None:
    constants = SHORT[name]
    made = compile_for_hopper(
        token_groups._quantise_kernel,
        constants,
        token_groups.WARPS,
        source=GluonASTSource,
    )
    assert_strips(made, 4 * (1 + constants["GATED"]), 4, 4, power_of_two=True)
    assert programs(made) >= 5


@pytest.mark.parametrize(("columns", "power_of_two"), [(12288, True), (12288, False), (576, True)])
def test_swiglu_backward_quantise(columns: int, power_of_two: bool) -> None:
    kernel = swiglu_backward._swiglu_backward_quantise_kernel
    whole = -(-columns // 128) * 128
    made = compile_for_hopper(
        kernel,
        {"C": columns, "WHOLE": whole, "COLUMNS": 2 * columns, "POWER_OF_TWO": power_of_two},
        token_groups.WARPS,
        source=GluonASTSource,
    )
    assert_strips(made, 3 * 4, 2 * 4, 2 * 4, power_of_two)
    assert programs(made) >= 3


def test_swiglu_backward() -> None:
    sass = compile_for_hopper(
        swiglu_backward._swiglu_backward_kernel, {"C": 12288, "WIDTH": 1024}, 4
    ).sass
    assert count(sass, "LDG.E.128") == 3 and count(sass, "STG.E.128") == 2


@pytest.mark.parametrize(
    "sizes", [(24576, 4096, 24576, 192), (576, 1536, 640, 5), (192, 576, 1152, 9)]
)
def test_transpose(sizes: tuple[int, int, int, int]) -> None:
    constants: dict[str, Any] = dict(zip(("N", "K", "OUT_ROW", "OUT_BLOCKS"), sizes, strict=True))
    types = {"VALUES": "*u8", "OUT_VALUES": "*u8"}
    sass = compile_for_hopper(linear_backward._transpose_kernel, constants, 4, types).sass
    assert count(sass, "LDG.E.128") == 8 and count(sass, "STG.E.128") == 8
