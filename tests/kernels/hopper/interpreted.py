"""Triton's interpreter, for what is the same there as on a card."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

from tests.forked import ran


def run_interpreted(name: str, folder: Path) -> None:
    """``MODULE:FUNCTION`` in a new process, since Triton chooses the interpreter at import."""
    done = ran(name, folder, environ=os.environ | {"TRITON_INTERPRET": "1"})
    assert done.returncode == 0, done.stdout + done.stderr


def know_instructions() -> None:
    """Let the interpreter know the inline assembly of kernels that begin early and of attention."""
    builder: Any = interpreter.InterpreterBuilder
    builder.create_inline_asm = _instruction


def _instruction(_: object, asm: str, constraints: str, values: list[Any], *options: object) -> Any:
    if "f16x2" in asm:  # INT8 -> FP16
        wide = values[0].data.view(np.int8).astype(np.float16)
        return SimpleNamespace(get_result=lambda _: interpreter.TensorHandle(wide, tl.float16))
    assert "griddepcontrol" in asm or "prefetch" in asm, asm
    nothing = np.zeros(values[0].data.shape if values else 1, np.int32)
    return SimpleNamespace(get_result=lambda _: interpreter.TensorHandle(nothing, tl.int32))
