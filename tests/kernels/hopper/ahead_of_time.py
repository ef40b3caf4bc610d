"""Kernels compiled for sm_90 or another generation, ahead of time, without a GPU, and what they
became.

What ptxas does not choose is read from PTX, which costs nothing: the width of memory accesses, the
kind of products.  SASS is read where ptxas has a say: contraction to fma, unrolling, the order of
products.  Registers and stack are those of the cubin.
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tests.kernels.hopper.disassembly import disassembled, registers_and_stack

E4M3 = "*fp8e4nv"
MOST_SHARED = 227 * 1024  # bytes of a program
REGISTERS, SHARED = 64 * 1024, 228 * 1024  # of a multiprocessor
OF_THE_DRIVER = 1024  # bytes of shared memory beside a program's own


@dataclass(frozen=True)
class Compiled:
    """One kernel."""

    ttgir: str
    ptx: str
    cubin: bytes
    warps: int
    """Of a program; of one whose warps have roles, the first role's."""
    shared: int
    """Bytes of a program."""
    registers: int
    """Of a thread."""

    @cached_property
    def sass(self) -> str:
        """Takes 0.3 s."""
        return disassembled(self.cubin)

    def count(self, instruction: str) -> int:
        """How often SASS has an instruction, as in LDG or LDG.E.128."""
        return len(re.findall(rf"\b{re.escape(instruction)}\b", self.sass))

    @property
    def wide_loads(self) -> int:
        """Loads of 16 bytes a thread; ptxas repeats them where it unrolls a loop."""
        return self._wide("ld")

    @property
    def wide_stores(self) -> int:
        """Stores of 16 bytes a thread, likewise."""
        return self._wide("st")

    def _wide(self, access: str) -> int:
        return len(re.findall(rf"\b{access}\.global\S*\.(?:v4\.b32|v2\.b64)\b", self.ptx))

    @property
    def products(self) -> set[str]:
        """What the tensor cores multiply, by the format of the left operands; ``old`` where it is
        by the instruction of earlier cards.
        """
        formats = re.findall(r"\bwgmma\.mma_async\S*\.[fs]32\.(\w+)\.\w+\b", self.ptx)
        return {*formats, *(["old"] if re.search(r"\bmma\.sync", self.ptx) else [])}

    @property
    def programs(self) -> int:
        """That a multiprocessor holds, where all warps of a program do the same."""
        registers = -(-self.registers // 8) * 8  # as they are dealt out
        return min(
            REGISTERS // (registers * 32 * self.warps), SHARED // (self.shared + OF_THE_DRIVER)
        )


def compile_for_hopper(
    kernel: Any, types: Mapping[str, str], constants: Mapping[str, Any], warps: int, **how: Any
) -> Compiled:
    """``compile_ahead`` for sm_90."""
    return compile_ahead(kernel, types, constants, warps, capability=90, **how)


def compile_ahead(
    kernel: Any,
    types: Mapping[str, str],
    constants: Mapping[str, Any],
    warps: int,
    *,
    capability: int,
    source: type = ASTSource,
    multiples: Collection[str] = (),
    fuses: bool = False,
    maxima: bool = False,
    most_stack: int = 0,
    **options: Any,
) -> Compiled:
    """A kernel that a card can start, that spills no registers, and that adds nothing in an order
    that nobody knows.

    Args:
        kernel: A function of Triton, or of Gluon with ``source`` GluonASTSource.
        types: Types of its parameters, and perhaps of others, by their names.
        constants: Parameters that are constants; None for a tensor that is not there.
        warps: Of a program.
        capability: Of the cards: 90 is Hopper's.
        source: What the kernel is written in.
        multiples: Numbers that are multiples of 16.  Pointers are always.
        fuses: Whether a product and a sum may become one operation, as at launches that do not
            forbid it.
        maxima: Whether it may raise maxima of integers by atomics, which have one result in any
            order.
        most_stack: Bytes that a thread may spill, outside its loops.
        options: Others of Triton's: ``num_stages``, ``maxnreg``.
    """
    names = [parameter.name for parameter in kernel.params]
    signature = {name: "constexpr" if name in constants else types[name] for name in names}
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(names)
        if signature[name].startswith("*") or name in multiples
    }
    compiled = triton.compile(
        source(fn=kernel, signature=signature, constexprs=constants, attrs=aligned),
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": warps, "enable_fp_fusion": fuses, **options},
    )
    ttgir, ptx = compiled.asm["ttgir"], compiled.asm["ptx"]
    cubin, shared = compiled.asm["cubin"], compiled.metadata.shared
    atomics = re.findall(r"\b(?:atom|red)\.[\w.:]*", ptx)
    assert all(maxima and ".max." in one for one in atomics), atomics
    assert shared <= MOST_SHARED
    registers, stack = registers_and_stack(cubin)
    assert stack <= most_stack
    return Compiled(ttgir, ptx, cubin, warps, shared, registers)
