"""LoRA's products compile for sm_90 to one instruction whatever the number of tokens, their parts
are loaded before they are added, and what began early waits before it reads them and writes.
"""

import re

import pytest

from isobit.kernels.triton import linear
from tests.kernels.hopper.ahead_of_time import Compiled, compile_for_hopper

TYPES = {
    **dict.fromkeys(("X", "A", "B", "Y"), "*bf16"),
    **dict.fromkeys(("m", "y_stride"), "i32"),
    "scale": "fp32",
}


def order(made: Compiled) -> list[str]:
    """Loads, stores, the wait for the kernel before and the signal to the next one, of SASS."""
    return re.findall(r"\b(LDG|LDGSTS|STG|ACQBULK|PREEXIT)\b", made.sass)


@pytest.mark.few(1)
@pytest.mark.parametrize(("ranks", "width"), [(16, 16), (48, 64), (99, 128), (192, 128)])
def test_low(ranks: int, width: int) -> None:
    made = compile_for_hopper(
        linear._low_kernel, TYPES | {"OUT": "*fp32"},
        {"K": 4096, "R": ranks, "WIDTH": width, "PART": 512, "OVERLAPS": True}, 4,
        num_stages=3,
    )  # fmt: skip
    assert made.ptx.count("griddepcontrol.launch_dependents") == 1
    assert order(made)[0] == "PREEXIT"
    assert "ACQBULK" not in order(made)
    assert made.products == {"bf16"}


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("ranks", "parts", "followed"), [(96, 8, True), (32, 12, True), (64, 16, False)]
)
def test_sum(ranks: int, parts: int, followed: bool) -> None:
    made = compile_for_hopper(
        linear._sum_kernel, TYPES | {"LOW": "*fp32", "OUT": "*bf16"},
        {"R": ranks, "PARTS": parts, "OVERLAPS": True, "FOLLOWED": followed}, 4, launch_pdl=True,
    )  # fmt: skip
    signal = ["PREEXIT"] if followed else []
    assert order(made) == [*signal, "ACQBULK", *["LDG"] * parts, "STG"]
    assert made.wide_loads == parts
    assert made.count("FFMA") == 0


@pytest.mark.few(1)
@pytest.mark.parametrize("parts", [0, 1, 8, 16])
@pytest.mark.parametrize(("rank", "depth"), [(5, 16), (16, 16), (32, 32), (64, 64)])
def test_up(rank: int, depth: int, parts: int) -> None:
    places = {"BEGIN_0": 0, "SIZE_0": 4096, "BEGIN_1": 4096, "SIZE_1": 1024}
    made = compile_for_hopper(
        linear._up_kernel, TYPES | {"LOW": "*fp32" if parts else "*bf16"},
        {"RANK": rank, "DEPTH": depth, "TARGETS": 3, "PARTS": parts, **places, "BEGIN_2": 5120,
         "SIZE_2": 1024, "OVERLAPS": True}, 4, multiples=("y_stride",), launch_pdl=True,
    )  # fmt: skip
    assert made.ptx.count("griddepcontrol.wait") == 1
    wait = order(made).index("ACQBULK")
    before, after = order(made)[:wait], order(made)[wait + 1 :]
    assert set(before) == {"LDG"}  # of y and B
    assert after.count("LDG") % max(parts, 1) == 0
    if rank == depth:  # loads of 16 bytes
        assert len(before) == 4 + depth // 16
    assert made.products == {"bf16"}
    assert made.count("FFMA") == 0  # the scale is not fused with a sum


def test_parts_are_summed_first_where_many_programs_would_read_them() -> None:
    """Of the linears of the 8B shape with rank 32, for 1, 32, 128 and 256 rows."""
    linears = {"qkv": (96, 8), "o": (64, 8), "gate and up": (384, 8), "down": (64, 12)}
    found = {
        name: [linear._sums_first(rows, *sizes, 32) for rows in (1, 32, 128, 256)]
        for name, sizes in linears.items()
    }
    assert found == {
        "qkv": [False, False, False, True],
        "o": [False, False, False, True],
        "gate and up": [False, False, True, True],
        "down": [False, False, False, True],
    }
