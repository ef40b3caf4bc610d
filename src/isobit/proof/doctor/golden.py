"""``golden.safetensors``: inputs of the quantisers and the bytes that must come out, for every
granularity and kind of scale.

    python -m isobit.proof.doctor.golden

writes the file anew, from ``isobit.proof.doctor.specification``; the bytes repeat.

The inputs hold what a quantiser can meet: zeros of both signs, every E4M3 number and the midpoints
between neighbours, subnormals, amax at and just above 448 times a power of two, 1e-12 and smaller,
the largest FP32, infinities, NaN, and numbers over wide ranges.
"""

import math
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import get_args

import torch
from safetensors.torch import load_file, save_file

from isobit.proof.doctor.specification import (
    ScaleKind,
    e4m3_value,
    quantise_group,
    snap_group,
    to_fp32,
)

Tensors = dict[str, torch.Tensor]

_BLOCK = 128
_EXTRA_TOKENS = 2  # a short last group along the tokens


def golden_file() -> Path:
    """The file shipped with Isobit."""
    return Path(str(files("isobit.proof.doctor"))) / "golden.safetensors"


def load_golden() -> Tensors:
    """The stored tensors: ``decode``, ``rows``, ``tokens``, ``blocks``, ``heads`` and ``grid``,
    each with its input and results.
    """
    return load_file(golden_file())


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
    random = Random(4)  # noqa: S311 (no secret)
    return [
        [
            to_fp32((2 * random.random() - 1) * 2.0 ** (-4 * row * random.random()))
            for _ in range(_BLOCK)
        ]
        for row in range(count)
    ]


def _blocks() -> list[list[float]]:
    """[128, 256]: a block over a wide range with zeros of both signs, and one with an infinity."""
    random = Random(8)  # noqa: S311 (no secret)
    rows = [
        [(2 * random.random() - 1) * 2.0 ** (-12 * random.random()) for _ in range(2 * _BLOCK)]
        for _ in range(_BLOCK)
    ]
    rows[3][5], rows[7][9], rows[11][13] = 0.0, -0.0, 1.75
    rows[100][200] = math.inf
    return rows


def _fp32(values: list[float] | list[list[float]]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32)


if __name__ == "__main__":
    save_file(
        make_golden(), golden_file(), metadata={"made_by": "python -m isobit.proof.doctor.golden"}
    )
