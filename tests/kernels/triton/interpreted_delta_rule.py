"""Run in Triton's interpreter by test_delta_rule.py: the checks of the gated delta rule.

Products are added up as FP32 does on a card: a chain of ``fma`` in ascending order.
"""

# pyright: reportArgumentType=false, reportGeneralTypeIssues=false
# (Triton's types know neither plain numbers for constants nor what a kernel calls)

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from triton.runtime import interpreter

from isobit.kernels.triton import delta_rows, delta_rule
from tests.kernels.triton.delta_rule_checks import (
    OTHER,
    SHAPE,
    check_backward,
    check_begun_again,
    check_blocks,
    check_carries,
    check_decoding,
    check_ends,
    check_far,
    check_forms,
    check_gates,
    check_output,
    check_parts,
    check_pieces,
    check_rejected,
    check_row_forms,
    check_rows_of_guesses,
    check_shared,
    use,
)
from tests.kernels.triton.interpreted_qkv import convert


def _fused(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    return (a.astype(np.float64) * b + c).astype(np.float32)


def _chain(_: object, a: Any, b: Any, d: Any, *how: object) -> Any:
    total = d.data
    for k in range(a.data.shape[1]):
        total = _fused(a.data[:, k, None], b.data[None, k], total)
    return interpreter.TensorHandle(total, d.dtype.scalar)


def prepare() -> None:
    interpreter._convert_float = convert
    builder: Any = interpreter.InterpreterBuilder
    builder.create_dot = _chain
    builder.create_fma = lambda _, x, y, z: interpreter.TensorHandle(
        _fused(x.data, y.data, z.data), z.dtype.scalar
    )
    delta_rows.FEW = 1 << 12  # of a program, of which the interpreter takes few
    use(torch.device("cpu"))


def gates() -> None:
    prepare()
    check_shared(24, 9)
    check_shared(640, 5)
    check_gates(24, 3, 40)
    check_gates(128, 2, 9)


def parts() -> None:
    prepare()
    check_ends((3, 4, 5, 6, 7, 30, 64, 65))
    delta_rule.FACTORS = 1  # one chunk of one sequence a launch
    check_parts(SHAPE, [70, 3], 60, dtype=torch.bfloat16)


def ends() -> None:
    prepare()
    check_ends()


def contents() -> None:
    prepare()
    check_begun_again()
    check_rows_of_guesses(OTHER)
    check_rows_of_guesses(SHAPE, (3, 66, 1, 20), (64, 127, 0, 50))
    check_carries(0, 40)
    check_far(OTHER, 70, 0)
    check_far(OTHER, 126, 1)
    for at, stop in ((60, 70), (64, 65), (3, 140)):
        check_carries(at, stop)


def accuracy() -> None:
    prepare()
    check_output(OTHER, [70, 1])
    check_backward(OTHER, [140, 1, 64])
    check_backward(OTHER, [20, 66], far=100.0)  # where exp(-x) is infinite
    check_backward(replace(SHAPE, key_dim=144, value_dim=160), [65, 3])  # in two parts
    check_backward(SHAPE, [2])  # shorter than the convolution
    check_backward(replace(SHAPE, width=9), [3, 2])


def forms() -> None:
    prepare()
    check_forms(OTHER)
    check_row_forms(OTHER)
    check_pieces(SHAPE)


def rejected() -> None:
    prepare()
    for at, accepted in ((1, 1), (60, 2), (62, 0), (62, 1), (62, 2), (62, 3), (64, 0), (64, 2)):
        check_rejected(at, accepted)


def whole() -> None:
    prepare()
    check_parts(OTHER, [130, 200, 64, 5], 100, dtype=torch.float32)
    check_parts(SHAPE, [193, 128, 65], 150, dtype=torch.float32)
    check_decoding(SHAPE, 1, 70)
    check_decoding(OTHER, 120, 135)
    check_output(SHAPE, [200, 64, 65, 3])
    check_backward(SHAPE, [130, 200, 64, 3])
    check_blocks(SHAPE, [130, 64, 3])
