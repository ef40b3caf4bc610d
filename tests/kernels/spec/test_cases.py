"""The doctor's cases at more sizes and in every format: rows in many batches, values and gradients
against FP64, with torch's own operations in the same dtype as the yardstick.  At their own sizes
they run in ``tests/proof/test_doctor_mutants.py``.
"""

from collections.abc import Callable
from functools import partial

import pytest
import torch

from isobit.precision.quant_tensor import Format, ScaleKind
from isobit.proof import cases, expert_cases, linear_cases
from isobit.proof.cases import ROWS, Case, check_gradients, check_rows
from isobit.proof.expert_cases import expert_gradients
from isobit.proof.linear_cases import dgrad, dgrad_in_int8, linear, wgrad, wgrad_in_int8
from tests.kernels.comparison import relative_error

Make = Callable[[], Case]
FORMATS: list[Format] = ["e4m3", "int8", "bf16", "fp32"]
KINDS: list[ScaleKind] = ["power_of_two", "fp32"]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
PARTS = {
    "SmolLM2": ((576, 192, 192), 576),
    "short": ((200, 200), 72),
    "one more": ((129,), 257),
    "one less": ((1, 127, 128), 960),
    "whole": ((384,), 256),
}
FAMILIES = {  # norms of Q and K, a bias, a Hadamard matrix
    "llama": (False, False, False),
    "qwen2": (False, True, False),
    "qwen3": (True, False, False),
    "both": (True, True, False),
    "e4m3": (True, True, True),
}

POINTWISE: dict[str, Make] = {
    f"{name} {width} {dtype}": partial(make, width, DTYPES[dtype])
    for name, make in (("RMSNorm", cases.rms_norm), ("SwiGLU", cases.swiglu))
    for width in (128, 320, 4096, 5120)
    for dtype in DTYPES
}
QKV: dict[str, Make] = {
    f"Q, K and V of {family} {dtype}": partial(cases.transformed_qkv, *kind, DTYPES[dtype])
    for family, kind in FAMILIES.items()
    for dtype in DTYPES
}
LINEARS: dict[str, tuple[Make, Make, Make]] = {
    f"{format} {shape} {kind}": (
        partial(linear, format, *PARTS[shape], kind),
        partial(dgrad, format, *PARTS[shape], kind),
        partial(wgrad, format, *PARTS[shape], kind),
    )
    for format in FORMATS
    for shape in PARTS
    for kind in (KINDS if format == "e4m3" else KINDS[:1])
}
OTHERS: dict[str, Make] = {
    **{
        f"E4M3 GEMM {shape} {kind}": partial(linear_cases.e4m3_gemm, kind, *PARTS[shape])
        for shape in PARTS
        for kind in KINDS
    },
    **{f"INT8 GEMM {columns}": partial(linear_cases.int8_gemm, columns) for columns in (576, 81)},
    **{
        f"GEMM {columns} {dtype}": partial(linear_cases.grid_gemm, columns, DTYPES[dtype])
        for columns in (128, 896, 200)
        for dtype in DTYPES
    },
    "SwiGLU of columns": cases.swiglu_columns,
    "rotation": cases.rotation,
    **{f"Hadamard {dim}": partial(cases.hadamard, dim) for dim in (80, 96, 128, 256)},
    **{f"log-softmax {n}": partial(cases.log_softmax, n) for n in (128, 320, 4096, 10_000)},
    **{f"experts {format}": partial(expert_cases.experts, format) for format in FORMATS},
}
DIFFERENTIATED: dict[str, Make] = {
    **POINTWISE,
    **QKV,
    **{
        f"scalar head {width} {dtype}": partial(cases.scalar_head, width, DTYPES[dtype])
        for width in (128, 4096, 5120)
        for dtype in DTYPES
    },
    **{
        f"{name} {dtype}": partial(make, dtype=DTYPES[dtype])
        for name, make in (("embedding", cases.embedding), ("log-prob", cases.token_log_probs))
        for dtype in DTYPES
    },
    **{
        f"router {renormalise} {dtype}": partial(expert_cases.router, renormalise, DTYPES[dtype])
        for renormalise in (True, False)
        for dtype in DTYPES
    },
}
FORWARDS = {**{name: make for name, (make, *_) in LINEARS.items()}, **OTHERS, **DIFFERENTIATED}
BACKWARDS = {
    **{f"{name} {i}": make for name, made in LINEARS.items() for i, make in enumerate(made[1:])},
    **{
        f"{name} in INT8 {shape}": partial(make, *PARTS[shape])
        for name, make in (("DGrad", dgrad_in_int8), ("WGrad", wgrad_in_int8))
        for shape in PARTS
    },
    **DIFFERENTIATED,
}


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("name", "threads"),
    [(name, n) for name in FORWARDS for n in ((1, 2) if "scalar head" in name else (1,))],
)
def test_rows(name: str, threads: int) -> None:
    """Products are asked for batches of every size, as libraries choose a kernel by it."""
    torch.set_num_threads(threads)
    every = name.startswith(("E4M3 GEMM whole", "INT8 GEMM", "GEMM", "scalar head"))
    check_rows(FORWARDS[name](), range(1, ROWS) if every else (1, 2, 3, 7, 31, 33, 64, 65, 129))


@pytest.mark.few(22)
@pytest.mark.parametrize("make", BACKWARDS.values(), ids=BACKWARDS)
def test_gradients(make: Make) -> None:
    """They are right, and repeat their bits."""
    case = make()
    check_gradients(case)
    assert case.gradients is not None
    first, second = case.gradients(), case.gradients()
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.few(17)
@pytest.mark.parametrize("name", POINTWISE | QKV)
def test_as_near_as_torch_in_the_same_dtype(name: str) -> None:
    case = (POINTWISE | QKV)[name]()
    assert case.rows is not None and case.gradients is not None
    y, gradients = case.rows(torch.arange(ROWS)), case.gradients()
    of_rows = next(iter(case.inputs))
    dtype = case.inputs[of_rows].dtype
    assert gradients[of_rows].dtype == dtype
    assert y.dtype == (torch.float32 if "e4m3" in name else dtype)
    exact, theirs = case.exact_gradients(), case.exact_gradients(dtype)
    results = [(gradients[name], exact[name], theirs[name]) for name in gradients]
    for ours, wanted, yardstick in [(y, case.results(), case.results(dtype)), *results]:
        floor = 3e-7 if name in QKV else 1e-7
        assert relative_error(ours, wanted) <= 1.5 * relative_error(yardstick, wanted) + floor
    if "RMSNorm" in name:
        assert relative_error(gradients["weight"], exact["weight"]) < 1e-6, "FP32 whatever goes in"


def test_log_softmax_is_as_near_as_torch() -> None:
    case = cases.log_softmax(10_000)
    assert case.rows is not None
    ours, exact = case.rows(torch.arange(ROWS)), case.results()
    assert (ours - exact).abs().max() <= 2 * (case.results(torch.float32) - exact).abs().max()


def norms(case: Case) -> dict[str, float]:
    """The relative error of each gradient as a whole."""
    assert case.gradients is not None
    exact = case.exact_gradients()
    return {name: relative_error(ours, exact[name]) for name, ours in case.gradients().items()}


@pytest.mark.few(21)
@pytest.mark.parametrize("name", LINEARS)
def test_gradients_of_a_linear_as_a_whole(name: str) -> None:
    cases = [make() for make in LINEARS[name][1:]]
    for_input, for_weight = map(norms, cases)
    assert for_input["x"] < (1e-6 if name.startswith("fp32") else 2**-8)
    assert for_weight["weight"] < 1e-6


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("format", "bound"), [("fp32", 1e-5), ("bf16", 0.02), ("int8", 0.12), ("e4m3", 0.12)]
)
def test_gradients_of_experts_as_a_whole(format: Format, bound: float) -> None:
    """An E4M3 number has an error of up to 1/16."""
    assert max(norms(expert_gradients(format)).values()) < bound


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_gradients_of_an_embedding_as_a_whole(dtype: torch.dtype) -> None:
    assert norms(cases.embedding(5000, dtype))["table"] < 1e-6
