"""A card of any generation runs the PTX that kernels have for sm_80."""

import os
import re

import pytest
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from isobit.kernels.triton import gemm
from isobit.kernels.triton.lowering import lower_for_sm_80
from tests.kernels.triton.test_compile_products import NO_SCALES, TYPES, bf16


def compiled_for(generation: int) -> dict[str, str]:
    """The product of 64 rows in BF16, as a launch compiles it; PTX without the lines' numbers."""
    cut = gemm.cut_of_bf16(64, 4096)
    constants = NO_SCALES | {
        "BLOCK_M": cut.block_m, "BLOCK_N": cut.block_n, "DEPTH": cut.depth, "SCALED": False,
        "WHOLE_K": True, "A_ROW": None, "B_ROW": None,
    }  # fmt: skip
    kernel = gemm._gemm_kernel
    names = [parameter.name for parameter in kernel.params]
    signature = {name: "constexpr" if name in constants else TYPES[name] for name in names}
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(names)
        if signature[name].startswith("*") or name in ("n", "k", "out_stride")
    }
    made = triton.compile(
        ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned),
        target=GPUTarget("cuda", generation, 32),
        options={"num_warps": cut.warps, "num_stages": cut.stages, "enable_fp_fusion": False},
    )
    return made.asm


def instructions(ptx: str) -> str:
    """What does not depend on the assembler's version, nor on where a checkout is from which
    Triton's cache has it.
    """
    code, files, _ = ptx.partition("\t.file")  # behind the code, as the debugger's tables
    assert "mma.sync" in code and files
    return re.sub(r"(?m)^\.version.*\n", "", code)


@pytest.mark.few(1)
@pytest.mark.parametrize("generation", [86, 89, 90])
def test_ptx_is_that_of_sm_80_on_every_card(generation: int) -> None:
    """Also where Triton's cache on the disk holds the kernel as the generation itself has it."""
    ours = compiled_for(generation)
    assert f".target sm_{generation}" in ours["ptx"]
    with knobs.runtime.scope():
        lower_for_sm_80()
        lowered = compiled_for(generation)
    assert instructions(lowered["ptx"]) == instructions(bf16(64, False, 4096).ptx)
    assert lowered["cubin"] != bf16(64, False, 4096).cubin  # it is the generation's machine code
    assert compiled_for(generation)["ptx"] == ours["ptx"]


def test_processes_that_a_process_starts_are_not_told() -> None:
    with knobs.runtime.scope():
        lower_for_sm_80()
        assert knobs.runtime.override_arch == "sm80"
        assert "TRITON_OVERRIDE_ARCH" not in os.environ
