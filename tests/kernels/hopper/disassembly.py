"""What a compiled kernel is made of: its SASS, its registers and its stack.

cuobjdump takes 0.4 s to start, for some 250 kernels that rarely change.  What it said of a cubin is
kept beside Triton's cache, by the cubin's digest.
"""

import hashlib
import json
import os
import subprocess
import tempfile
from pathlib import Path

import triton
from triton import knobs

CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"


def disassembled(cubin: bytes) -> tuple[str, str]:
    """-> a cubin's SASS, and its use of resources."""
    folder = Path(knobs.cache.dir) / "sass"
    digest = hashlib.sha256(triton.__version__.encode() + cubin).hexdigest()
    kept = folder / f"{digest}.json"
    if not kept.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as name:
            (file := Path(name) / "kernel.cubin").write_bytes(cubin)
            said = [
                subprocess.run(
                    [CUOBJDUMP, flag, file], capture_output=True, text=True, check=True
                ).stdout
                for flag in ("-sass", "-res-usage")
            ]
            (written := Path(name) / "said.json").write_text(json.dumps(said))
            os.replace(written, kept)
    sass, usage = json.loads(kept.read_text())
    return sass, usage
