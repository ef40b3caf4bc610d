"""Run in Triton's interpreter by test_interpreted.py: LoRA's products, which are exact here since
their numbers are small integers, are the specification's; parts summed here or before are one.
"""

from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

from isobit.kernels.operands import AdapterWeight, LinearWeight
from isobit.kernels.spec import linear as specification
from isobit.kernels.triton import linear as ours
from isobit.kernels.triton.products import PortableProducts
from isobit.precision.flow import Site
from tests.kernels.triton.interpreted_qkv import convert

TOKENS = 70


def integers(*shape: int) -> torch.Tensor:
    return torch.randint(-3, 4, shape).bfloat16()


def made(rank: int, columns: int, *targets: tuple[int, int]) -> AdapterWeight:
    """For a linear of so many columns, whose output has targets from one column to another."""
    down, up = (Site(f"o_proj.lora_{kind}", "adapter", "bf16") for kind in "AB")
    rows = sum(stop - start for start, stop in targets)
    return AdapterWeight(
        LinearWeight(down, integers(rank * len(targets), columns)),
        LinearWeight(up, integers(rows, rank)),
        tuple(slice(*one) for one in targets),
        0.5,
    )


def check(adapter: AdapterWeight, columns: int, width: int) -> None:
    x, y = integers(TOKENS, columns), integers(TOKENS, width)
    low = specification.adapter_low(x, adapter)
    assert torch.equal(ours.adapter_low(PortableProducts, x, adapter), low)
    exact = y.clone()
    specification.add_adapter(exact, x, adapter)
    assert not torch.equal(exact, y)
    for first, save in ((True, False), (False, False), (False, True)):
        ours._sums_first = lambda *_, first=first: first
        for rows in (slice(0, TOKENS), slice(3, 4), slice(60, 69)):
            added = y[rows].clone()
            made = ours.add_adapter(PortableProducts, added, x[rows].contiguous(), adapter, save)
            assert torch.equal(added, exact[rows])
            assert made is None or torch.equal(made, low[rows])
            assert (made is None) == (not first and not save)


def dot(_: object, a: Any, b: Any, sums: Any, *options: object) -> Any:
    """The interpreter multiplies BF16 as the integers that it keeps it in."""
    left, right = (
        convert(one.data, tl.bfloat16, tl.float32, None).view(np.float32) for one in (a, b)
    )
    return interpreter.TensorHandle(np.matmul(left, right) + sums.data, sums.dtype.scalar)


def main() -> None:
    torch.manual_seed(0)
    interpreter._convert_float = convert
    builder: Any = interpreter.InterpreterBuilder
    builder.create_dot = dot
    check(made(5, 130, (0, 200), (260, 300)), 130, 300)
    check(made(16, 1100, (0, 128)), 1100, 128)
    check(made(48, 9000, (0, 128), (128, 192), (192, 256)), 9000, 256)
