"""The quantisers of this machine against stored bytes.

``golden.safetensors`` holds inputs of the quantisers and the bytes that must come out, for every
granularity and kind of scale.  ``tests/proof/golden.py`` makes it from the written specification,
in plain Python.  The inputs hold what a quantiser can meet: zeros of both signs, every E4M3 number
and the midpoints between neighbours, subnormals, amax at and just above 448 times a power of two,
1e-12 and smaller, the largest FP32, infinities, NaN, and numbers over wide ranges.
"""

from collections.abc import Callable
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import get_args

import torch
from safetensors.torch import load_file

from isobit.kernels.spec import quantise
from isobit.precision.quant_tensor import E4M3, QuantTensor, ScaleKind
from isobit.proof.doctor_findings import Check, Fault, bits_of

Tensors = dict[str, torch.Tensor]

_FIX = (
    "do not train in fp8 here: every stored weight would differ; reinstall torch in a supported "
    "version, and report this line"
)


def golden_file() -> Path:
    """The file shipped with Isobit."""
    return Path(str(files("isobit.proof"))) / "golden.safetensors"


def load_golden() -> Tensors:
    """The stored tensors: ``decode``, ``rows``, ``tokens``, ``blocks``, ``heads`` and ``grid``,
    each with its input and results.
    """
    return load_file(golden_file())


def quantiser_checks() -> list[Check]:
    """A check a granularity, with both kinds of scales, infinities, NaN and every edge that the
    stored inputs hold.
    """
    golden = load_golden()
    return [
        Check("E4M3 bytes to numbers", partial(_decode, golden), _FIX),
        Check("quantise 1x128", partial(_both_kinds, golden, "rows", "quantise_rows"), _FIX),
        Check("quantise 128x128", partial(_both_kinds, golden, "blocks", "quantise_blocks"), _FIX),
        Check("quantise 128x1", partial(_both_kinds, golden, "tokens", "quantise_tokens"), _FIX),
        Check("quantise Q, K and V", partial(_heads, golden), _FIX),
        Check("snap to the grid", partial(_grid, golden), _FIX),
    ]


def _both_kinds(golden: Tensors, name: str, quantiser: str) -> str:
    function: Callable[[torch.Tensor, ScaleKind], QuantTensor] = getattr(quantise, quantiser)
    x = golden[f"{name}.input"]
    for kind in get_args(ScaleKind):
        made, stored = function(x.clone(), kind), f"{name}.{kind}"
        codes = made.values.view(torch.uint8)
        _compare(f"bytes with {kind} scales", codes, golden[f"{stored}.values"])
        _compare(f"{kind} scales", made.scales, golden[f"{stored}.scales"])
    return f"{2 * x.numel():,} bytes and their scales as stored, power-of-two and FP32"


def _heads(golden: Tensors) -> str:
    values, scale_bytes = quantise.quantise_heads(golden["heads.input"].clone())
    _compare("bytes", values.view(torch.uint8), golden["heads.power_of_two.values"])
    _compare("scale bytes", scale_bytes, golden["heads.power_of_two.bytes"])
    return f"{values.numel():,} bytes and their scales as stored"


def _grid(golden: Tensors) -> str:
    _compare("numbers", quantise.snap_rows(golden["grid.input"].clone()), golden["grid.values"])
    return f"{golden['grid.values'].numel():,} numbers as stored"


def _decode(golden: Tensors) -> str:
    codes = golden["decode.input"]
    _compare("numbers", quantise.decode_e4m3(codes.view(E4M3)), golden["decode.values"])
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
