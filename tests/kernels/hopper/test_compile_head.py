"""Sampler, log-probabilities, publish, SwiGLU and Triton's GEMM compile for sm_90."""

import re
from typing import Any

import pytest
import triton

from isobit.kernels.hopper import gemm
from isobit.kernels.triton import gemm as portable
from isobit.kernels.triton import head, quantise, sampling
from tests.kernels.hopper.ahead_of_time import E4M3, compile_for_hopper

TYPES = {
    **dict.fromkeys(("LOGITS", "TEMPERATURE", "STATS", "LOG_SUM", "ENTROPY", "LOG_PROB"), "*fp32"),
    **dict.fromkeys(("MASTER", "SCALES", "A_SCALE", "B_SCALE"), "*fp32"),
    **dict.fromkeys(("KEY", "POSITION", "TOKEN"), "*i64"),
    **dict.fromkeys(("CHANGED", "ROW"), "*i32"),
    **dict.fromkeys(("m", "n", "k", "a_scale_stride", "out_stride"), "i32"),
    **dict.fromkeys(("GATE_UP", "OUT"), "*bf16"),
    "VALUES": E4M3,
}


def vocabulary(size: int, *names: str) -> dict[str, int]:
    chunks = triton.cdiv(size, head.LOGITS_CHUNK)
    known = {
        "V": size - 3,
        "STRIDE": size,
        "CHUNK": head.LOGITS_CHUNK,
        "CHUNKS": chunks,
        "PADDED": triton.next_power_of_2(chunks),
    }
    return {name: known[name] for name in names}


@pytest.mark.few(1)
@pytest.mark.parametrize("size", [151936, 4096, 40])
def test_chunk_statistics(size: int) -> None:
    constants = vocabulary(size, "V", "STRIDE", "CHUNK", "CHUNKS")
    made = compile_for_hopper(head._chunk_kernel, TYPES, constants, 4)
    assert made.wide_loads
    constants = vocabulary(size, "CHUNKS", "PADDED")
    compile_for_hopper(head._combine_kernel, TYPES, constants, 1)


@pytest.mark.few(1)
@pytest.mark.parametrize("size", [151936, 40])
def test_draw(size: int) -> None:
    constants = vocabulary(size, "V", "STRIDE", "CHUNK", "CHUNKS", "PADDED")
    made = compile_for_hopper(sampling._draw_kernel, TYPES, constants, 8)
    assert made.wide_loads


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("sizes", "counted", "power_of_two"),
    [
        ((4096, None), True, True),
        ((4096, None), False, False),
        ((576, 192), True, False),
        ((576, 192), False, True),
        ((1536, 576), True, True),
        ((1536, 576), False, False),
    ],
)  # any two of them
def test_publish(sizes: tuple[int, int | None], counted: bool, power_of_two: bool) -> None:
    constants: dict[str, Any] = dict(zip(("K", "ROWS"), sizes, strict=True))
    constants |= {"POWER_OF_TWO": power_of_two} | ({} if counted else {"CHANGED": None})
    made = compile_for_hopper(quantise._publish_kernel, TYPES, constants, 8, fuses=True)
    assert made.wide_loads
    # The stack's, set and never used: a ptxas that loses a number takes it instead.
    assert len(re.findall(r"\bR1\b", made.sass)) == 1


def test_swiglu() -> None:
    constants = {"C": 12288, "WIDTH": 1024, "GATE": "silu"}
    made = compile_for_hopper(quantise._swiglu_kernel, TYPES, constants, 4)
    assert made.wide_loads


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("m", "whole_k", "e4m3"),
    [(16, True, True), (16, False, False), (4096, False, True), (4096, True, False)],
)  # any two of them
def test_gemm(m: int, whole_k: bool, e4m3: bool) -> None:
    rows, warps = gemm.tile(m, 4096)
    constants: dict[str, Any] = {
        "BLOCK_M": rows,
        "BLOCK_N": 128,
        "SCALED": e4m3,
        "WHOLE_K": whole_k,
        **{"DEPTH": 128, "A_ROW": None, "B_ROW": None},
    }
    constants |= {} if e4m3 else {"A_SCALE": None, "B_SCALE": None}
    types = dict.fromkeys("AB", E4M3 if e4m3 else "*bf16") | {"OUT": "*bf16" if e4m3 else "*fp32"}
    made = compile_for_hopper(
        portable._gemm_kernel, TYPES | types, constants, warps, multiples=("n", "k", "out_stride"),
        num_stages=gemm.stages(rows, 1 if e4m3 else 2),
    )  # fmt: skip
    assert made.products == {"e4m3" if e4m3 else "bf16"}
