"""The checksum compiles for sm_90: several vectors under way, and enough programs."""

import re

from isobit.kernels.hopper import checksum
from tests.kernels.hopper.ahead_of_time import compile_for_hopper

TYPES: dict[str, str] = dict.fromkeys(("TABLE", "OWNER", "SUMS"), "*i64")


def test_checksum() -> None:
    constants = {"CHUNK": checksum.CHUNK, "WIDTH": checksum._WIDTH, "RUN": checksum._RUN}
    made = compile_for_hopper(checksum._sums_kernel, TYPES, constants, checksum._WARPS, fuses=True)
    assert made.stack == 0
    assert made.programs >= 4
    at_once = max(len(re.findall(r"LDG\.E\.128", block)) for block in made.sass.split("BRA"))
    words_of_a_thread = checksum._WIDTH // (checksum._WARPS * 32)
    assert at_once >= 4 * words_of_a_thread // 4, "the loop over chunks is unrolled"
