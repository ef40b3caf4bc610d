"""The checksum's kernel compiles for sm_90 ahead of time, without a GPU: vectors of words, several
of them under way at once, and enough programs beside each other to keep the memory busy.
"""

import re

import pytest

triton = pytest.importorskip(
    "triton", reason="Triton is not installed: kernels are not compiled ahead of time"
)

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from isobit.kernels.hopper import checksum  # noqa: E402
from tests.kernels.hopper.disassembly import disassembled  # noqa: E402


def test_checksum() -> None:
    constants = {"CHUNK": checksum.CHUNK, "WIDTH": checksum._WIDTH, "RUN": checksum._RUN}
    pointers = ("TABLE", "OWNER", "SUMS")
    compiled = triton.compile(
        ASTSource(
            fn=checksum._sums_kernel,
            signature=dict.fromkeys(pointers, "*i64") | dict.fromkeys(constants, "constexpr"),
            constexprs=constants,
            attrs={(place,): [["tt.divisibility", 16]] for place in range(len(pointers))},
        ),
        target=GPUTarget("cuda", 90, 32),
        options={"num_warps": checksum._WARPS},
    )
    sass, usage = disassembled(compiled.asm["cubin"])
    stack, registers = (
        max(int(number) for number in re.findall(rf"{name}:(\d+)", usage))
        for name in ("STACK", "REG")
    )
    assert stack == 0
    assert registers * checksum._WARPS * 32 * 4 <= 1 << 16  # four programs on a multiprocessor
    at_once = max(len(re.findall(r"LDG\.E\.128", block)) for block in sass.split("BRA"))
    words_of_a_thread = checksum._WIDTH // (checksum._WARPS * 32)
    assert at_once >= 4 * words_of_a_thread // 4, "the loop over chunks is unrolled"
    assert "ATOM" not in sass and "RED." not in sass
