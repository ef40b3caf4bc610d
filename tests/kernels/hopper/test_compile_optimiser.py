"""AdamW, the sums of gradients and of their squares, and the gradient of the logits compile for
sm_90 ahead of time, without a GPU.
"""

import re
from typing import Any

import pytest

triton = pytest.importorskip(
    "triton", reason="Triton is not installed: kernels are not compiled ahead of time"
)

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from isobit.kernels.hopper import adamw, gradient_squares, ordered_sum, token_log_probs  # noqa: E402
from tests.kernels.hopper.disassembly import disassembled  # noqa: E402

TYPES = {
    **dict.fromkeys(
        ("MASTER", "GRAD", "LOGITS", "TEMPERATURE", "LOG_SUM", "D_LOG_PROB", "X"), "*fp32"
    ),
    **dict.fromkeys(("ENTROPY", "D_ENTROPY"), "*fp32"),
    **dict.fromkeys(
        ("clip", "beta1", "rest1", "beta2", "rest2", "root", "epsilon", "size", "decay"), "fp32"
    ),
    **dict.fromkeys(("SUMS", "OUT"), "*fp64"),
    "TARGET": "*i64",
    "key": "i64",
    "first": "i64",
    "n": "i32",
}


def compile_for_hopper(
    kernel: Any, constants: dict[str, Any], types: dict[str, str] | None = None
) -> tuple[str, str, int]:
    """-> PTX, SASS and the bytes of stack of a thread; ``n`` is a multiple of 16, as it is for all
    but the smallest tensors.
    """
    names = [parameter.name for parameter in kernel.params]
    known = TYPES | (types or {}) | dict.fromkeys(constants, "constexpr")
    signature = {name: known[name] for name in names}
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(names)
        if signature[name].startswith("*") or name == "n"
    }
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
    compiled = triton.compile(
        source,
        target=GPUTarget("cuda", 90, 32),
        options={"num_warps": 4, "enable_fp_fusion": False},
    )
    sass, usage = disassembled(compiled.asm["cubin"])
    return (
        compiled.asm["ptx"],
        sass,
        max(int(number) for number in re.findall(r"STACK:(\d+)", usage)),
    )


@pytest.mark.parametrize("noise", [False, True])
def test_adamw(noise: bool) -> None:
    moments = "*bf16" if noise else "*fp32"
    constants = {"WIDTH": adamw._WIDTH, "NOISE": noise}
    ptx, sass, stack = compile_for_hopper(
        adamw._adamw_kernel, constants, {"FIRST": moments, "SECOND": moments}
    )
    assert stack == 0 and "STL" not in sass
    assert "LDG.E.128" in sass and "STG.E.128" in sass
    assert len(re.findall(r"LDG\.E", sass)) == (6 if noise else 8) and len(
        re.findall(r"STG\.E", sass)
    ) == (4 if noise else 6)
    assert "div.rn.f32" in ptx and "sqrt.rn.f32" in ptx and "fma" not in ptx and ".ftz" not in ptx


def test_adamw_with_8_bit_moments() -> None:
    codes: dict[str, str] = dict.fromkeys(
        ("FIRST", "SECOND", "FIRST_SCALES", "SECOND_SCALES"), "*u8"
    )
    ptx, sass, stack = compile_for_hopper(
        adamw._adamw_8_bits_kernel, {"GROUPS": adamw._WIDTH // 128}, codes
    )
    assert stack == 0 and "STL" not in sass
    for width, reads, writes in (
        (".128", 4, 2),
        (".64", 2, 2),
        (".U8", 2, 2),
    ):  # master and gradient, codes, scales
        assert (
            len(re.findall(rf"LDG\.E{width}", sass)) == reads
            and len(re.findall(rf"STG\.E{width}", sass)) == writes
        )
    assert "div.rn.f32" in ptx and "sqrt.rn.f32" in ptx and "fma" not in ptx and ".ftz" not in ptx


@pytest.mark.parametrize(
    ("size", "piece"),
    [
        (128 * 4096, gradient_squares._PIECE),
        (128 * 1000, gradient_squares._PIECE),
        (128, 128),
        (37, 64),
    ],
)
def test_gradient_squares(size: int, piece: int) -> None:
    constants = {"SIZE": size, "PIECE": piece, "WIDTH": min(gradient_squares._WIDTH, piece)}
    _, sass, stack = compile_for_hopper(
        gradient_squares._squares_kernel, constants, {"stride": "i32"}
    )
    assert stack == 0 and "ATOM" not in sass and "RED.E" not in sass
    assert ("LDG.E.128" in sass) == (size >= 128 * 128)


def test_sums_of_a_blocks_pieces() -> None:
    _, _, stack = compile_for_hopper(
        gradient_squares._add_kernel,
        {"BLOCKS": gradient_squares._BLOCKS},
        {"blocks": "i32", "pieces": "i32"},
    )
    assert stack == 0


@pytest.mark.parametrize("count", [1, 2, 8])
def test_an_ordered_sum_reads_each_number_once(count: int) -> None:
    tensors = dict.fromkeys(("TOTAL", *(f"A{place}" for place in range(8))), "*fp32")
    constants = {"COUNT": count, "WIDTH": ordered_sum._WIDTH}
    _, sass, stack = compile_for_hopper(ordered_sum._add_kernel, constants, tensors)
    vectors = ordered_sum._WIDTH // (4 * 32 * 4)  # of four numbers, by four warps
    assert stack == 0
    assert len(re.findall(r"LDG\.E\.128", sass)) == (count + 1) * vectors
    assert len(re.findall(r"STG\.E\.128", sass)) == vectors
    assert sass.count("FADD") == count * 4 * vectors


@pytest.mark.parametrize("of_entropies", [True, False])
@pytest.mark.parametrize("size", [151936, 40])
def test_gradient_of_the_logits(size: int, of_entropies: bool) -> None:
    constants: dict[str, Any] = {"V": size, "WIDTH": token_log_probs._WIDTH}
    constants |= {} if of_entropies else {"ENTROPY": None, "D_ENTROPY": None}
    _, sass, stack = compile_for_hopper(
        token_log_probs._gradient_kernel, constants, {"OUT": "*bf16"}
    )
    assert stack == 0
    if size % 16 == 0:
        assert "LDG.E.128" in sass and "STG.E.128" in sass
