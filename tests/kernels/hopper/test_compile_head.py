"""Sampler, log-probabilities, publish, SwiGLU and the GEMM without a library compile for sm_90
ahead of time, without a GPU.
"""

import re
from typing import Any

import pytest

triton = pytest.importorskip(
    "triton", reason="Triton is not installed: kernels are not compiled ahead of time"
)

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from isobit.kernels.hopper import log_prob, publish, quantise, sampling, triton_gemm  # noqa: E402
from tests.kernels.hopper.disassembly import disassembled  # noqa: E402

MOST_SHARED = 227 * 1024
POINTERS = {
    **dict.fromkeys(
        (
            "LOGITS",
            "TEMPERATURE",
            "STATS",
            "LOG_SUM",
            "ENTROPY",
            "LOG_PROB",
            "MASTER",
            "SCALES",
            "A_SCALE",
            "B_SCALE",
        ),
        "*fp32",
    ),
    **dict.fromkeys(("KEY", "POSITION", "TOKEN"), "*i64"),
    "CHANGED": "*i32",
    **dict.fromkeys(("m", "n", "k", "a_scale_stride", "out_stride"), "i32"),
    "VALUES": "*fp8e4nv",
    "GATE_UP": "*bf16",
    "ROW": "*i32",
}


def compile_for_hopper(
    kernel: Any,
    constants: dict[str, Any],
    types: dict[str, str] | None = None,
    **options: int,
) -> tuple[Any, str, int]:
    """-> the compiled kernel, its SASS and the bytes of stack of a thread."""
    names = [parameter.name for parameter in kernel.params]
    known = POINTERS | (types or {}) | dict.fromkeys(constants, "constexpr")
    signature = {name: known[name] for name in names}
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(names)
        if signature[name].startswith("*") or name in ("n", "k", "out_stride")
    }
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
    compiled = triton.compile(
        source, target=GPUTarget("cuda", 90, 32), options={"enable_fp_fusion": False, **options}
    )
    sass, usage = disassembled(compiled.asm["cubin"])
    return compiled, sass, max(int(number) for number in re.findall(r"STACK:(\d+)", usage))


def vocabulary(size: int, *names: str) -> dict[str, int]:
    chunks = triton.cdiv(size, log_prob.CHUNK)
    known = {
        "V": size,
        "CHUNK": log_prob.CHUNK,
        "CHUNKS": chunks,
        "PADDED": triton.next_power_of_2(chunks),
    }
    return {name: known[name] for name in names}


@pytest.mark.parametrize("size", [151936, 4096, 40])
def test_chunk_statistics(size: int) -> None:
    _, sass, stack = compile_for_hopper(
        log_prob._chunk_kernel, vocabulary(size, "V", "CHUNK", "CHUNKS"), num_warps=4
    )
    assert stack == 0 and "LDG.E.128" in sass
    _, _, stack = compile_for_hopper(
        log_prob._combine_kernel, vocabulary(size, "CHUNKS", "PADDED"), num_warps=1
    )
    assert stack == 0


@pytest.mark.parametrize("size", [151936, 40])
def test_draw(size: int) -> None:
    constants = vocabulary(size, "V", "CHUNK", "CHUNKS", "PADDED")
    _, sass, stack = compile_for_hopper(sampling._draw_kernel, constants, num_warps=8)
    assert stack == 0 and "LDG.E.128" in sass


@pytest.mark.parametrize(("k", "rows"), [(4096, None), (576, 192), (1536, 576)])
@pytest.mark.parametrize("counted", [True, False])
@pytest.mark.parametrize("power_of_two", [True, False])
def test_publish(power_of_two: bool, counted: bool, k: int, rows: int | None) -> None:
    constants = {"K": k, "ROWS": rows, "POWER_OF_TWO": power_of_two}
    constants |= {} if counted else {"CHANGED": None}
    _, sass, stack = compile_for_hopper(publish._publish_kernel, constants, num_warps=8)
    assert stack == 0 and "LDG.E.128" in sass
    assert (
        len(re.findall(r"\bR1\b", sass)) == 1
    )  # the stack's, set and never used: a ptxas that loses a number takes it instead


def test_swiglu() -> None:
    constants = {"C": 12288, "WIDTH": 1024}
    _, sass, stack = compile_for_hopper(
        quantise._swiglu_kernel, constants, {"OUT": "*bf16"}, num_warps=4
    )
    assert stack == 0 and "LDG.E.128" in sass


@pytest.mark.parametrize("e4m3", [True, False])
@pytest.mark.parametrize(("m", "n"), [(16, 4096), (4096, 4096)])
@pytest.mark.parametrize("whole_k", [True, False])
def test_gemm(e4m3: bool, m: int, n: int, whole_k: bool) -> None:
    rows, warps = triton_gemm.tile(m, n)
    stages = triton_gemm.stages(rows, 1 if e4m3 else 2)
    constants: dict[str, Any] = {
        "BLOCK_M": rows,
        "BLOCK_N": 128,
        "SCALED": e4m3,
        "WHOLE_K": whole_k,
    }
    constants |= {} if e4m3 else {"A_SCALE": None, "B_SCALE": None}
    operand = "*fp8e4nv" if e4m3 else "*bf16"
    types = {"A": operand, "B": operand, "OUT": "*bf16" if e4m3 else "*fp32"}
    compiled, sass, stack = compile_for_hopper(
        triton_gemm._gemm_kernel, constants, types, num_warps=warps, num_stages=stages
    )
    assert stack == 0 and compiled.metadata.shared <= MOST_SHARED
    assert ("QGMMA" if e4m3 else "HGMMA") in sass and "HMMA" not in sass.replace("HGMMA", "")
