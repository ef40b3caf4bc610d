"""``golden.safetensors``: inputs of the quantisers and the bytes that must come out, for every
granularity and kind of scale.

    python -m isobit.proof.doctor_quantisers

writes the file anew, from ``isobit.proof.doctor_quantisers``; the bytes repeat.

The inputs hold what a quantiser can meet: zeros of both signs, every E4M3 number and the midpoints
between neighbours, subnormals, amax at and just above 448 times a power of two, 1e-12 and smaller,
the largest FP32, infinities, NaN, and numbers over wide ranges.

The quantisers once more, in plain Python from their written specification: no torch, no shared
code, one number at a time.

    amax    of the group; where it is not finite, the scale is NaN and every byte is 0x7F
    scale   max(amax, 2^-60) / 448, to the nearest FP32, or up to the next power of two
    byte    the E4M3 number nearest to x / scale (that quotient is an FP32 too), ties to the even
            one, 448 at most

This is what ``golden.safetensors`` was made with, and what the kernels of every back end are held
to.

The quantisers of this machine against the stored golden bytes.
"""

import math
import struct
from collections.abc import Callable, Sequence
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Literal, get_args

import torch
from safetensors.torch import load_file, save_file

from isobit.kernels.spec import quantise
from isobit.kernels.spec import quantise as quantise_module
from isobit.precision.quant_tensor import E4M3, QuantTensor
from isobit.proof.doctor_findings import Check, Fault, bits_of

_LARGEST = 448.0
_SMALLEST_AMAX = 2.0**-60
_NAN_BYTE = 0x7F
_GRID_BITS = 22

ScaleKind = Literal["power_of_two", "fp32"]


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
    return [
        math.ldexp(round(math.ldexp(x, _GRID_BITS - exponent)), exponent - _GRID_BITS)
        for x in group
    ]  # no zero is negative


def splitmix64(seed: int, index: int) -> int:
    """Output number ``index`` + 1 of the generator: what the sampling noise is made of."""
    whole = (1 << 64) - 1
    bits = (seed + (index + 1) * 0x9E3779B97F4A7C15) & whole
    bits = (bits ^ bits >> 30) * 0xBF58476D1CE4E5B9 & whole
    bits = (bits ^ bits >> 27) * 0x94D049BB133111EB & whole
    return bits ^ bits >> 31


Tensors = dict[str, torch.Tensor]

_BLOCK = 128
_EXTRA_TOKENS = 2  # a short last group along the tokens


def golden_file() -> Path:
    """The file shipped with Isobit."""
    return Path(str(files("isobit.proof"))) / "golden.safetensors"


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


_FIX = (
    "do not train in fp8 here: every stored weight would differ; reinstall torch in a supported "
    "version, and report this line"
)


def quantiser_checks() -> list[Check]:
    """A check a granularity, with both kinds of scales, infinities, NaN and every edge that the
    stored inputs hold.
    """
    golden = load_golden()
    return [
        Check("E4M3 bytes to numbers", lambda: _decode(golden), _FIX),
        Check("quantise 1x128", lambda: _both_kinds(golden, "rows", quantise.quantise_rows), _FIX),
        Check(
            "quantise 128x128",
            lambda: _both_kinds(golden, "blocks", quantise.quantise_blocks),
            _FIX,
        ),
        Check(
            "quantise 128x1", lambda: _both_kinds(golden, "tokens", quantise.quantise_tokens), _FIX
        ),
        Check("quantise Q, K and V", lambda: _heads(golden), _FIX),
        Check("snap to the grid", lambda: _grid(golden), _FIX),
    ]


def _both_kinds(
    golden: Tensors, name: str, quantiser: Callable[[torch.Tensor, ScaleKind], QuantTensor]
) -> str:
    kinds: tuple[ScaleKind, ...] = ("power_of_two", "fp32")
    for kind in kinds:
        made = quantiser(golden[f"{name}.input"].clone(), kind)
        _compare(
            f"bytes with {kind} scales",
            made.values.view(torch.uint8),
            golden[f"{name}.{kind}.values"],
        )
        _compare(f"{kind} scales", made.scales, golden[f"{name}.{kind}.scales"])
    return (
        f"{2 * golden[f'{name}.input'].numel():,} bytes and their scales as stored, power-of-two "
        "and FP32"
    )


def _heads(golden: Tensors) -> str:
    values, scale_bytes = quantise.quantise_heads(golden["heads.input"].clone())
    _compare("bytes", values.view(torch.uint8), golden["heads.power_of_two.values"])
    _compare("scale bytes", scale_bytes, golden["heads.power_of_two.bytes"])
    return f"{values.numel():,} bytes and their scales as stored"


def _grid(golden: Tensors) -> str:
    _compare(
        "numbers", quantise_module.snap_rows(golden["grid.input"].clone()), golden["grid.values"]
    )
    return f"{golden['grid.values'].numel():,} numbers as stored"


def _decode(golden: Tensors) -> str:
    codes = golden["decode.input"]
    _compare("numbers", quantise_module.decode_e4m3(codes.view(E4M3)), golden["decode.values"])
    _compare("numbers of torch's cast", codes.view(E4M3).float(), golden["decode.values"])
    return f"all {codes.numel()} finite ones"


def _compare(what: str, made: torch.Tensor, stored: torch.Tensor) -> None:
    """Bit for bit, NaN included.  Raises Fault naming the first difference."""
    if made.shape != stored.shape:
        raise Fault(f"{what}: shape {tuple(made.shape)}, stored is {tuple(stored.shape)}")
    differing = (bits_of(made) != bits_of(stored)).nonzero()
    if len(differing):
        place = tuple(differing[0].tolist())
        raise Fault(
            f"{len(differing):,} of {stored.numel():,} {what} differ, the first at {list(place)}: "
            f"{made[place].item():.9g}, stored is {stored[place].item():.9g}"
        )


if __name__ == "__main__":
    save_file(
        make_golden(),
        golden_file(),
        metadata={"made_by": "python -m isobit.proof.doctor_quantisers"},
    )
