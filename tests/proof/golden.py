"""Writes ``golden.safetensors``, with which the doctor compares the quantisers:

    python -m tests.proof.golden

The bytes come from the quantisers' written specification, in plain Python: no torch, no shared
code, one number at a time.  They repeat.

    amax    of the group; where it is not finite, the scale is NaN and every byte is 0x7F
    scale   max(amax, 2^-60) / 448, to the nearest FP32, or up to the next power of two
    byte    the E4M3 number nearest to x / scale (that quotient is an FP32 too), ties to the even
            one, 448 at most

Of INT8 the scale is max(amax, 2^-60) / 127, and the value the integer nearest to x (127 / amax),
quotient and product in FP32, ties to even; in a group that is not finite every value is 0.  A row
is multiplied by a Hadamard matrix before: the largest power of two that divides its length.
"""

import math
import struct
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import get_args

import torch
from safetensors.torch import save_file

from isobit.precision.quant_tensor import ScaleKind
from isobit.proof.doctor_quantisers import INT8_COLUMNS, Tensors, golden_file

_LARGEST = 448.0
_INT8_LARGEST = 127.0
_SMALLEST_AMAX = 2.0**-60
_NAN_BYTE = 0x7F
_GRID_BITS = 22


def to_fp32(x: float) -> float:
    """The nearest FP32, ties to even; beyond its range an infinity."""
    try:
        return struct.unpack("<f", struct.pack("<f", x))[0]
    except OverflowError:
        return math.copysign(math.inf, x)


def quantise_group(group: Sequence[float], kind: ScaleKind) -> tuple[list[int], float]:
    """The E4M3 bytes of FP32 numbers that share a scale, and that scale."""
    if not all(map(math.isfinite, group)):
        return [_NAN_BYTE] * len(group), math.nan
    amax = max(_SMALLEST_AMAX, *map(abs, group))
    scale = (
        power_of_two_from(amax / _LARGEST) if kind == "power_of_two" else to_fp32(amax / _LARGEST)
    )
    return [e4m3_byte(to_fp32(x / scale)) for x in group], scale


def int8_group(group: Sequence[float]) -> tuple[list[int], float]:
    """The INT8 values of FP32 numbers that share a scale, and that scale."""
    if not all(map(math.isfinite, group)):
        return [0] * len(group), math.nan
    amax = max(_SMALLEST_AMAX, *map(abs, group))
    inverse = to_fp32(_INT8_LARGEST / amax)
    return [round(to_fp32(x * inverse)) for x in group], to_fp32(amax / _INT8_LARGEST)


def rotated(row: Sequence[float], size: int) -> list[float]:
    """Each block of ``size`` FP32 numbers times the Hadamard matrix, by the fast transform in
    FP32.
    """
    made, apart = list(row), 1
    while apart < size:
        for low in (index for index in range(len(made)) if not index // apart % 2):
            a, b = made[low], made[low + apart]
            made[low], made[low + apart] = to_fp32(a + b), to_fp32(a - b)
        apart *= 2
    return made


def power_of_two_from(x: float) -> float:
    """The smallest power of two that is at least x > 0."""
    mantissa, exponent = math.frexp(x)
    return math.ldexp(1.0, exponent - 1 if mantissa == 0.5 else exponent)


def e4m3_byte(x: float) -> int:
    """The byte of the E4M3 number nearest to a finite x: 1 bit of sign, 4 of exponent (bias 7), 3
    of mantissa; subnormals below 2^-6.
    """
    sign = 0x80 if math.copysign(1.0, x) < 0 else 0
    size = min(abs(x), _LARGEST)
    exponent = max(math.frexp(size)[1] - 1, -6) if size else -6
    steps = round(math.ldexp(size, 3 - exponent))  # Python rounds halves to even
    if steps == 16:
        exponent, steps = exponent + 1, 8
    return sign | (((exponent + 7) << 3) + steps - 8 if steps >= 8 else steps)


def e4m3_value(byte: int) -> float:
    """The number that a byte other than NaN's stands for."""
    exponent, mantissa = byte >> 3 & 0xF, byte & 7
    size = math.ldexp(8 + mantissa, exponent - 10) if exponent else math.ldexp(mantissa, -9)
    return -size if byte & 0x80 else size


def snap_group(group: Sequence[float]) -> list[float]:
    """Finite numbers rounded to multiples of 2^(k - 22), where 2^k <= amax < 2^(k+1): the grid of
    BF16 and FP32 products.
    """
    amax = max(map(abs, group))
    exponent = math.frexp(amax)[1] - 1 if amax >= 2.0**-126 else -127
    # No zero is negative.
    return [
        math.ldexp(round(math.ldexp(x, _GRID_BITS - exponent)), exponent - _GRID_BITS)
        for x in group
    ]


_BLOCK = 128
_EXTRA_TOKENS = 2  # a short last group along the tokens


def make_golden() -> Tensors:
    """The tensors of the file, from the specification alone."""
    rows = _special_rows() + _random_rows(8)
    numbers = [byte for byte in range(256) if byte & 0x7F != 0x7F]
    tensors = {
        "decode.input": torch.tensor(numbers, dtype=torch.uint8),
        "decode.values": _fp32([e4m3_value(byte) for byte in numbers]),
        "rows.input": _fp32(rows),
        "tokens.input": torch.cat([_fp32(rows).t(), _fp32(rows).t()[:_EXTRA_TOKENS]]).contiguous(),
        "blocks.input": _fp32(_blocks()).bfloat16(),
        "heads.input": _fp32(rows).view(-1, 2, _BLOCK // 2),
    }
    finite = [row for row in rows if all(map(math.isfinite, row))]
    tensors |= {
        "grid.input": _fp32(finite),
        "grid.values": _fp32([snap_group(row) for row in finite]),
    }
    for kind in get_args(ScaleKind):
        tensors |= {
            f"rows.{kind}.{name}": tensor.view(len(rows), -1)
            for name, tensor in _quantised(rows, kind).items()
        }
        tensors |= {
            f"tokens.{kind}.{name}": tensor
            for name, tensor in _quantised_tokens(tensors["tokens.input"], kind).items()
        }
        tensors |= {
            f"blocks.{kind}.{name}": tensor
            for name, tensor in _quantised_blocks(tensors["blocks.input"], kind).items()
        }
    values, scales = _quantised(
        tensors["heads.input"].view(-1, _BLOCK // 2).tolist(), "power_of_two"
    ).values()
    exponents = [
        255 if math.isnan(scale) else math.frexp(scale)[1] - 1 + 127 for scale in scales.tolist()
    ]
    for columns in INT8_COLUMNS:
        tensors |= _in_int8(
            f"int8.{columns}", [rotated(row[:columns], columns & -columns) for row in rows]
        )
    heads = _in_int8("int8.heads", tensors["heads.input"].view(-1, _BLOCK // 2).tolist())
    tensors |= {name: tensor.unflatten(0, (-1, 2)) for name, tensor in heads.items()}
    tensors["heads.power_of_two.values"] = values.view(tensors["heads.input"].shape)
    tensors["heads.power_of_two.bytes"] = torch.tensor(exponents, dtype=torch.uint8).view(-1, 2)
    return tensors


def _quantised(groups: list[list[float]], kind: ScaleKind) -> Tensors:
    """One scale a group: bytes [groups, size] and FP32 scales [groups]."""
    results = [quantise_group(group, kind) for group in groups]
    return {
        "values": torch.tensor([codes for codes, _ in results], dtype=torch.uint8),
        "scales": _fp32([scale for _, scale in results]),
    }


def _in_int8(name: str, groups: list[list[float]]) -> Tensors:
    results = [int8_group(group) for group in groups]
    return {
        f"{name}.values": torch.tensor([values for values, _ in results], dtype=torch.int8),
        f"{name}.scales": _fp32([scale for _, scale in results]),
    }


def _quantised_tokens(x: torch.Tensor, kind: ScaleKind) -> Tensors:
    parts = [_quantised(part.t().tolist(), kind) for part in x.split(_BLOCK)]
    values = torch.cat([part["values"].t() for part in parts]).contiguous()
    return {"values": values, "scales": torch.stack([part["scales"] for part in parts])}


def _quantised_blocks(x: torch.Tensor, kind: ScaleKind) -> Tensors:
    parts = [_quantised([block.float().reshape(-1).tolist()], kind) for block in x.split(_BLOCK, 1)]
    values = torch.cat([part["values"].view(_BLOCK, _BLOCK) for part in parts], 1)
    return {"values": values, "scales": torch.stack([part["scales"] for part in parts], 1)}


def _special_rows() -> list[list[float]]:
    """Rows of 128, each one case and, around it, what shows whether its neighbours took the right
    scale.
    """
    codes = [e4m3_value(byte) for byte in range(127)]
    midpoints = [(low + high) / 2 for low, high in pairwise(codes)]
    largest, smallest = to_fp32(3.4028234663852886e38), 2.0**-149
    background = [(i - 64) / 7 for i in range(_BLOCK)]
    rows = [
        [0.0, -0.0],
        [*codes, -448.0],
        [-code for code in codes],
        [*midpoints, 448.0],
        [*(-midpoint for midpoint in midpoints), -448.0],
        [448.0 - 2.0**-15 if i % 2 else 2.0**-i for i in range(_BLOCK)],
        [448.0 * 32, -448.0 * 32, *background[2:]],
        [448.0 * 32 + 2.0**-10, *background[1:]],
        [449.0, 465.0, -500.0, 1000.0, 1e6],
        [(i - 64) * 1e-12 for i in range(_BLOCK)],
        [2.0**-60, -(2.0**-61), 2.0**-70, 2.0**-80],
        [1e-30, -1e-38, smallest, -smallest, 2.0**-127],
        [largest, -largest, 1.0, smallest],
        *([bad, *background[1:]] for bad in (math.inf, -math.inf, math.nan)),
        [*background[1:], math.nan],
    ]
    return [[to_fp32(x) for x in (*row, *[0.0] * _BLOCK)[:_BLOCK]] for row in rows]


def _random_rows(count: int) -> list[list[float]]:
    """Numbers of both signs over ever wider ranges, from 2^0 to 2^28."""
    random = Random(4)
    return [
        [
            to_fp32((2 * random.random() - 1) * 2.0 ** (-4 * row * random.random()))
            for _ in range(_BLOCK)
        ]
        for row in range(count)
    ]


def _blocks() -> list[list[float]]:
    """[128, 256]: a block over a wide range with zeros of both signs, and one with an infinity."""
    random = Random(8)
    rows = [
        [(2 * random.random() - 1) * 2.0 ** (-12 * random.random()) for _ in range(2 * _BLOCK)]
        for _ in range(_BLOCK)
    ]
    rows[3][5], rows[7][9], rows[11][13] = 0.0, -0.0, 1.75
    rows[100][200] = math.inf
    return rows


def _fp32(values: list[float] | list[list[float]]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32)


def save_golden(path: Path) -> None:
    """Write the file."""
    save_file(make_golden(), path, metadata={"made_by": "python -m tests.proof.golden"})


if __name__ == "__main__":
    save_golden(golden_file())
