"""What NVIDIA's cuobjdump says of a compiled kernel.

Its SASS takes 0.3 s, most of them to start the disassembler, its use of resources 2 ms.  Kernels
rarely change: what was said of a cubin is kept beside Triton's cache, by the cubin's digest.
"""

import hashlib
import os
import re
import subprocess
import tempfile
from pathlib import Path

import triton
from triton import knobs

CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"


def disassembled(cubin: bytes) -> str:
    """-> its SASS."""
    return _said(cubin, "-sass")


def registers_and_stack(cubin: bytes) -> tuple[int, int]:
    """-> registers, and bytes of stack, of a thread."""
    usage = _said(cubin, "-res-usage")
    registers, stack = (
        max(int(number) for number in re.findall(rf"\b{name}:(\d+)", usage))
        for name in ("REG", "STACK")
    )
    return registers, stack


def spills_in_loops(sass: str) -> list[int]:
    """Loads and stores of what a thread has too few registers for, in each innermost loop in which
    tensor cores multiply.
    """
    lines = re.findall(r"/\*([0-9a-f]{4,})\*/ +(.*)", sass)
    at = {int(address, 16): place for place, (address, _) in enumerate(lines)}
    ends = [
        (at[int(target.group(1), 16)], place)
        for place, (_, text) in enumerate(lines)
        if (target := re.search(r"\bBRA\b.*?\b0x([0-9a-f]+)", text))
    ]
    loops = [(first, last) for first, last in ends if first < last]
    found = list[int]()
    for first, last in loops:
        body = "\n".join(text for _, text in lines[first : last + 1])
        is_innermost = not any(first <= a and b < last for a, b in loops)
        if is_innermost and re.search(r"\b\w*MMA\b", body):
            found.append(len(re.findall(r"\b(?:LDL|STL)\b", body)))
    return found


def _said(cubin: bytes, flag: str) -> str:
    folder = Path(knobs.cache.dir) / "cuobjdump"
    digest = hashlib.sha256(triton.__version__.encode() + cubin).hexdigest()
    kept = folder / f"{digest}{flag}"
    if not kept.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as name:
            (file := Path(name) / "kernel.cubin").write_bytes(cubin)
            command = [CUOBJDUMP, flag, file]
            said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            (written := Path(name) / "said").write_text(said)
            os.replace(written, kept)
    return kept.read_text()
