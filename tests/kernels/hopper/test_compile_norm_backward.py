"""Backward of the norm, of what lies around attention, and of the embedding, and the head of one
output: they compile for sm_90 without a GPU.

No spills, wide memory accesses, no atomics, and no contraction where the CPU's bits are promised.
"""

import re
from typing import Any

import pytest

triton = pytest.importorskip(
    "triton", reason="Triton is not installed: kernels are not compiled ahead of time"
)

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from isobit.kernels.hopper import (  # noqa: E402
    block_sums,
    embedding_backward,
    norm_backward,
    qkv_backward,
    scalar_head,
)
from tests.kernels.hopper.disassembly import disassembled  # noqa: E402

REGISTERS = 65536  # of a multiprocessor
TYPES = {
    **dict.fromkeys(
        (
            "DY",
            "H",
            "WEIGHT",
            "D_RESIDUAL",
            "DH",
            "DQ",
            "DK",
            "DV",
            "QKV",
            "BIAS",
            "Q_NORM",
            "K_NORM",
            "D_QKV",
            "HIDDEN",
            "D_HIDDEN",
        ),
        "*bf16",
    ),
    **dict.fromkeys(("SUMS", "Q_SUMS", "K_SUMS", "BIAS_SUMS", "GRAD", "COS", "SIN"), "*fp32"),
    **dict.fromkeys(("D", "OUT"), "*fp32"),
    **dict.fromkeys(("POSITION", "SORTED", "TOKEN"), "*i64"),
    **dict.fromkeys(("tokens", "tokens_of_block", "blocks", "count", "rows_of_block"), "i32"),
    "END": "*i32",
    "epsilon": "fp32",
}


def compile_for_hopper(
    kernel: Any, constants: dict[str, Any], warps: int, **options: bool
) -> tuple[str, int, int]:
    """-> the kernel's SASS, its registers and the bytes of stack of a thread."""
    names = [parameter.name for parameter in kernel.params]
    signature = {name: (TYPES | dict.fromkeys(constants, "constexpr"))[name] for name in names}
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(names)
        if signature[name].startswith("*")
    }
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
    compiled = triton.compile(
        source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps, **options}
    )
    sass, usage = disassembled(compiled.asm["cubin"])
    registers, stack = (
        max(int(number) for number in re.findall(rf"{name}:(\d+)", usage))
        for name in ("REG", "STACK")
    )
    assert "RED." not in sass and "ATOM" not in sass
    return sass, registers, stack


@pytest.mark.parametrize("residual", [True, False])
@pytest.mark.parametrize("columns", [128, 896, 1024, 2560, 4096, 5120, 8192])
def test_norm(columns: int, residual: bool) -> None:
    width, rows, warps = norm_backward.layout(columns)
    constants = {"C": columns, "WIDTH": width, "ROWS": rows} | (
        {} if residual else {"D_RESIDUAL": None}
    )
    sass, registers, stack = compile_for_hopper(
        norm_backward._norm_kernel, constants, warps, enable_fp_fusion=False
    )
    assert stack == 0 and "LDG.E.128" in sass and "STG.E.128" in sass
    assert REGISTERS // (registers * 32 * warps) * warps >= 16  # warps of a multiprocessor


@pytest.mark.parametrize("columns", [128, 896, 1024, 2560, 4096, 5120, 8192])
def test_scalar_head(columns: int) -> None:
    width, rows, warps = norm_backward.layout(columns)
    constants = {"C": columns, "WIDTH": width, "ROWS": rows}
    for kernel in (scalar_head._output_kernel, scalar_head._backward_kernel):
        sass, registers, stack = compile_for_hopper(
            kernel, constants, warps, enable_fp_fusion=False
        )
        assert stack == 0 and "LDG.E.128" in sass
        assert REGISTERS // (registers * 32 * warps) * warps >= 16  # warps of a multiprocessor


@pytest.mark.parametrize("columns", [64, 4096, 6144])
def test_block_sums(columns: int) -> None:
    constants = {"C": columns, "ROWS": block_sums._ROWS, "COLUMNS": block_sums._COLUMNS}
    sass, _, stack = compile_for_hopper(block_sums._add_kernel, constants, 4)
    assert stack == 0 and "LDG.E.128" in sass


@pytest.mark.parametrize("hadamard", [False, True])
@pytest.mark.parametrize("layout", [(32, 8, 128), (14, 2, 64), (5, 5, 128), (64, 8, 128)])
def test_qkv(layout: tuple[int, int, int], hadamard: bool) -> None:
    constants: dict[str, Any] = {
        **dict(zip("HGD", layout, strict=True)),
        "N": qkv_backward.N,
        "HEADS": qkv_backward.HEADS,
        "HADAMARD": hadamard,
    }
    without_bias: dict[str, Any] = {"BIAS": None, "BIAS_SUMS": None}
    without_norms: dict[str, Any] = {"Q_NORM": None, "K_NORM": None, "Q_SUMS": None, "K_SUMS": None}
    for absent in ({}, without_bias, without_norms, without_bias | without_norms):
        sass, registers, stack = compile_for_hopper(
            qkv_backward._qkv_kernel,
            constants | absent,
            qkv_backward.WARPS,
            enable_fp_fusion=False,
        )
        assert stack == 0 and "LDG.E.128" in sass and "STG.E.128" in sass
        assert (
            "Q_NORM" not in absent or "FFMA" not in sass
        )  # the rotation is two products and a sum, each rounded; a division needs fma
        assert REGISTERS // (registers * 32 * qkv_backward.WARPS) >= 2


@pytest.mark.parametrize("columns", [64, 896, 4096])
def test_embedding(columns: int) -> None:
    constants = {
        "C": columns,
        "WIDTH": embedding_backward.columns_of_program(columns),
        "UNROLLED": embedding_backward._UNROLLED,
    }
    sass, _, stack = compile_for_hopper(embedding_backward._run_kernel, constants, 4)
    assert stack == 0 and (columns < 1024 or "LDG.E.128" in sass)
