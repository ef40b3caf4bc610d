"""The Hopper kernels compile for sm_90 ahead of time, without a GPU, to the instructions that their
exactness and speed rest on.
"""

import re
from typing import Any

import pytest

triton = pytest.importorskip(
    "triton", reason="Triton is not installed: kernels are not compiled ahead of time"
)

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from isobit.kernels.hopper import attention  # noqa: E402
from tests.kernels.hopper.disassembly import disassembled  # noqa: E402

MOST_SHARED = 227 * 1024
E4M3 = "*fp8e4nv"
POINTERS = {
    **dict.fromkeys(("Q_SCALE", "LSE", "PART_O", "PART_M", "PART_L"), "*fp32"),
    **dict.fromkeys(("K_BYTE", "V_BYTE"), "*u8"),
    **dict.fromkeys(("TABLE", "LENGTH", "Q_START", "Q_COUNT", "K_START"), "*i32"),
    **dict.fromkeys(("table_stride", "max_parts", "start"), "i32"),
    "O": "*bf16",
    "c": "fp32",
}


FORMS = {
    "fp8": (attention.FP8, {}),
    "bf16": (attention.BF16, dict.fromkeys(("Q_SCALE", "K_BYTE", "V_BYTE"))),
}
VARIANTS = [
    *((dim, split, 0) for dim in (64, 128) for split in (False, True)),
    (128, True, 4096),
]


def compile_for_hopper(
    kernel: Any,
    inputs: dict[str, str],
    constants: dict[str, Any],
    warps: int,
    stages: int,
    registers: int | None = None,
) -> tuple[Any, str, str]:
    """-> the compiled kernel, its SASS and its resource usage."""
    names = [parameter.name for parameter in kernel.params]
    types = POINTERS | inputs | dict.fromkeys(constants, "constexpr")
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(names)
        if types[name].startswith("*")
    }
    source = ASTSource(
        fn=kernel,
        signature={name: types[name] for name in names},
        constexprs=constants,
        attrs=aligned,
    )
    options = {
        "num_warps": warps,
        "num_stages": stages,
        "enable_fp_fusion": False,
        "maxnreg": registers,
    }
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    sass, usage = disassembled(compiled.asm["cubin"])
    return compiled, sass, usage


def stack_bytes(usage: str) -> int:
    return max(int(number) for number in re.findall(r"STACK:(\d+)", usage))


def shape(dim: int, **more: Any) -> dict[str, Any]:
    return {"H": 32, "G": 8, "D": dim, "PART": attention.PART, **more}


def assert_wgmma(sass: str, scaled: bool) -> None:
    assert (
        ("QGMMA" in sass) == scaled and "HGMMA" in sass and "HMMA" not in sass.replace("HGMMA", "")
    )


@pytest.mark.parametrize(("dim", "split", "window"), VARIANTS)
@pytest.mark.parametrize("name", FORMS)
def test_decode(name: str, dim: int, split: bool, window: int) -> None:
    form, absent = FORMS[name]
    inputs = dict.fromkeys("QKV", E4M3 if form.scaled else "*bf16")
    constants = shape(
        dim,
        PAGE=attention.TILE,
        TILE=form.tile,
        N=16,
        STAGES=form.decode_stages,
        SPLIT=split,
        SCALED=form.scaled,
        WINDOW=window,
    )
    compiled, sass, usage = compile_for_hopper(
        attention._decode_kernel,
        inputs,
        constants | absent,
        4,
        form.decode_stages,
        form.decode_registers,
    )
    assert_wgmma(sass, form.scaled)
    programs = 4 if form.scaled else 2  # resident on a multiprocessor
    assert compiled.metadata.shared <= MOST_SHARED // programs
    assert stack_bytes(usage) <= (
        16 if form.scaled else 0
    )  # what does not change in the loop may wait there: four programs need it


@pytest.mark.parametrize(("dim", "split", "window"), VARIANTS)
@pytest.mark.parametrize("name", FORMS)
def test_prefill(name: str, dim: int, split: bool, window: int) -> None:
    form, absent = FORMS[name]
    inputs = {"Q": E4M3, "K": E4M3, "V": "*fp16"} if form.scaled else dict.fromkeys("QKV", "*bf16")
    constants = shape(
        dim,
        TILE=form.tile,
        NQ=form.queries,
        STAGES=form.prefill_stages,
        SPLIT=split,
        SCALED=form.scaled,
        WINDOW=window,
    )
    compiled, sass, usage = compile_for_hopper(
        attention._prefill_kernel,
        inputs,
        constants | absent,
        form.prefill_warps,
        form.prefill_stages,
    )
    assert_wgmma(sass, form.scaled)
    assert sass.count("WARPGROUP.DEPBAR") <= sass.count("GMMA") // 4  # products overlap
    assert compiled.metadata.shared <= MOST_SHARED * form.prefill_warps // 8
    assert stack_bytes(usage) <= (
        96 if split else 24
    )  # joining a part with those before it happens once, outside the loop


def test_join() -> None:
    _, _, usage = compile_for_hopper(
        attention._join_kernel,
        {},
        {"H": 32, "D": 128, "PART": attention.PART, "WINDOW": 0},
        1,
        2,
    )
    assert stack_bytes(usage) == 0
