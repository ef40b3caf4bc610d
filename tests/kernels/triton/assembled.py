"""Portable kernels: compiled once, for sm_80, and their PTX assembled for every generation since.

Triton's wheel has two assemblers: ``ptxas`` for cards up to sm_90, ``ptxas-blackwell`` from sm_100.
"""

import re
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from triton import knobs

from tests.kernels.hopper.ahead_of_time import Compiled, compile_ahead
from tests.kernels.hopper.disassembly import disassembled

KIB = 1024
SHARED = {
    80: 163 * KIB, 86: 99 * KIB, 89: 99 * KIB, 90: 227 * KIB,
    100: 227 * KIB, 103: 227 * KIB, 120: 99 * KIB, 121: 99 * KIB,
}  # fmt: skip
"""By generation, the shared memory that a program may have."""
CARDS, TWINS = (89, 90, 100, 120), (80, 86, 103, 121)
"""One generation of each kind, and what has the units of one of these; ``compile_portable`` makes
machine code of sm_80 in any case.
"""
GENERATIONS = tuple(SHARED)
"""That PTX is assembled for; of the tests that take the fixture ``generations``, its own."""


@dataclass(frozen=True)
class Assembled:
    """A kernel's PTX for sm_80 as one generation runs it."""

    cubin: bytes
    registers: int
    spilled: int
    """Bytes that a thread stores because it has too few registers."""


def compile_portable(
    kernel: Any, types: Mapping[str, str], constants: Mapping[str, Any], warps: int, **how: Any
) -> Compiled:
    """``compile_ahead`` for sm_80; every card has the shared memory that its programs take."""
    made = compile_ahead(kernel, types, constants, warps, capability=80, **how)
    assert ".target sm_80" in made.ptx
    assert made.shared <= min(SHARED.values())
    return made


def assemble(ptx: str, generation: int) -> Assembled:
    """PTX for sm_80 -> the machine code of a generation.  Raises where it has none of it."""
    tool = knobs.nvidia.ptxas_blackwell if generation >= 100 else knobs.nvidia.ptxas
    with tempfile.TemporaryDirectory() as name:
        source, out = Path(name) / "kernel.ptx", Path(name) / "kernel.cubin"
        source.write_text(ptx)
        command = [tool.path, "-v", f"--gpu-name=sm_{generation}", source, "-o", out]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        cubin = out.read_bytes()
    (registers,) = re.findall(r"Used (\d+) registers", done.stderr)
    (spilled,) = re.findall(r"(\d+) bytes spill stores", done.stderr)
    return Assembled(cubin, int(registers), int(spilled))


def assert_multiplies_by(made: Compiled, instruction: str, in_a_row: int | None = None) -> None:
    """That the tensor cores of every generation have one instruction for all products, and add so
    many of them, one behind the other, to each sum.
    """
    for generation in GENERATIONS:
        sass = disassembled(assemble(made.ptx, generation).cubin)
        assert set(re.findall(r"\b\w*MMA\b[.\w]*", sass)) == {instruction}, generation
        assert in_a_row is None or _in_a_row(sass) == {in_a_row}, generation


def _in_a_row(sass: str) -> set[int]:
    """How many products are added to one sum before another begins, of each such number once: the
    registers that one has made are those that the next adds to.
    """
    lengths, found = dict[str, int](), set[int]()
    for made, before in re.findall(r"MMA\S* (R\d+), [\w.]+, [\w.]+, (R\d+|RZ)", sass):
        length = lengths.pop(before, 0) + 1
        found |= {lengths.pop(made)} if made in lengths else set()
        lengths[made] = length
    return found | set(lengths.values())


def assert_assembles(made: Compiled, spills: Mapping[int, int] | None = None) -> None:
    """For each generation; ``spills`` has the most bytes by generation, where that is not 0."""
    for generation in GENERATIONS:
        one = assemble(made.ptx, generation)
        assert one.spilled <= (spills or {}).get(generation, 0), (generation, one.spilled)
        assert one.registers * 32 * made.warps <= 64 * KIB, (generation, one.registers)
