"""Kernels of Gluon in Triton's interpreter, which knows Triton alone: a layout says where numbers
are, and changes none of them.
"""

from types import ModuleType
from typing import Any

import numpy as np
import triton.language as tl
from triton.experimental.gluon._runtime import GluonJITFunction
from triton.runtime.interpreter import InterpretedFunction, TensorHandle


class SharedMemory:
    """What a program keeps in shared memory: BF16, as the interpreter keeps it."""

    def __init__(self, data: np.ndarray) -> None:
        self.data = data

    def slice(self, start: Any, size: Any, dim: Any = 0) -> "SharedMemory":
        """A part along one dimension, not copied."""
        first, count = (int(getattr(one, "value", one)) for one in (start, size))
        where = [slice(None)] * self.data.ndim
        where[dim] = slice(first, first + count)
        return SharedMemory(self.data[tuple(where)])

    def store(self, x: Any) -> None:
        self.data[...] = x.handle.data

    def load(self, layout: Any) -> tl.tensor:
        made = tl.block_type(tl.bfloat16, list(self.data.shape))
        return tl.tensor(TensorHandle(self.data.copy(), tl.bfloat16), made)


class WithoutLayouts:
    """``gluon.language`` as functions of Triton's."""

    def __getattr__(self, name: str) -> Any:
        return getattr(tl, name)

    @staticmethod
    def arange(start: int, end: Any, layout: Any) -> tl.tensor:
        return tl.arange(start, end)

    @staticmethod
    def allocate_shared_memory(dtype: tl.dtype, shape: list[int], layout: Any) -> SharedMemory:
        assert dtype == tl.bfloat16
        return SharedMemory(np.zeros(shape, np.uint16))

    @staticmethod
    def SliceLayout(dim: int, parent: Any) -> None:  # noqa: N802 (Gluon's name)
        return None


def interpret(*modules: ModuleType, **instead: Any) -> None:
    """Replace what modules have of Gluon, and by name what the interpreter does not know."""
    for module in modules:
        module.gl, module.tl = WithoutLayouts(), tl  # type: ignore[attr-defined]
        for name, found in list(vars(module).items()):
            if isinstance(found, GluonJITFunction):
                function = InterpretedFunction(found.fn)
                annotations = function.rewrite().__annotations__
                annotations.update(dict.fromkeys(annotations, "constexpr"))
                setattr(module, name, function)
        for name, other in instead.items():
            if hasattr(module, name):
                setattr(module, name, other)
