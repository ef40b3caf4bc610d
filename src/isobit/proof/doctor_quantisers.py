"""Checks of the doctor that compare the quantisers of this machine with stored bytes.

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

from isobit.kernels.backend import backend_of
from isobit.kernels.spec import quantise
from isobit.kernels.spec.linear import has_int8_products, int_mm_is_exact
from isobit.precision.quant_tensor import E4M3, QuantTensor, ScaleKind
from isobit.proof.doctor_findings import Caution, Check, Fault, bits_of

Tensors = dict[str, torch.Tensor]


_FIX = (
    "do not train in 8 bits here: every stored weight would differ; reinstall torch in a supported "
    "version, and report this line"
)


_SLOWER = (
    "nothing is wrong: the bits are the same, and int8 flows are slower; a processor with VNNI or "
    "AMX has exact ones"
)


INT8_COLUMNS = (128, 96)
"""Columns of the stored rows, with Hadamard matrices of 128 and of 32 rows."""


def golden_file() -> Path:
    """The file shipped with Isobit."""
    return Path(str(files("isobit.proof"))) / "golden.safetensors"


def load_golden() -> Tensors:
    """The stored tensors: ``decode``, ``rows``, ``tokens``, ``blocks``, ``heads`` and ``grid``,
    each with its input and results, and ``int8`` of rows and heads.
    """
    return load_file(golden_file())


def quantiser_checks() -> list[Check]:
    """A check a granularity, with both kinds of scales, infinities, NaN and every edge that the
    stored inputs hold; and whether torch multiplies INT8 exactly.
    """
    golden = load_golden()
    return [
        Check("E4M3 bytes to numbers", partial(_decode, golden), _FIX),
        Check("quantise 1x128", partial(_both_kinds, golden, "rows", "quantise_rows"), _FIX),
        Check("quantise 128x128", partial(_both_kinds, golden, "blocks", "quantise_blocks"), _FIX),
        Check("quantise 128x1", partial(_both_kinds, golden, "tokens", "quantise_tokens"), _FIX),
        Check("quantise Q, K and V", partial(_heads, golden), _FIX),
        Check("quantise INT8", partial(_int8, golden), _FIX),
        Check("snap to the grid", partial(_grid, golden), _FIX),
        Check("INT8 products of torch", _int8_products, _SLOWER),
    ]


def _both_kinds(golden: Tensors, name: str, quantiser: str) -> str:
    function: Callable[[torch.Tensor, ScaleKind], QuantTensor] = getattr(quantise, quantiser)
    x = golden[f"{name}.input"]
    for kind in get_args(ScaleKind):
        quantised, stored = function(x.clone(), kind), f"{name}.{kind}"
        codes = quantised.values.view(torch.uint8)
        _compare(f"bytes with {kind} scales", codes, golden[f"{stored}.values"])
        _compare(f"{kind} scales", quantised.scales, golden[f"{stored}.scales"])
    return f"{2 * x.numel():,} bytes and their scales as stored, power-of-two and FP32"


def _heads(golden: Tensors) -> str:
    values, scale_bytes = quantise.quantise_heads(golden["heads.input"].clone())
    _compare("bytes", values.view(torch.uint8), golden["heads.power_of_two.values"])
    _compare("scale bytes", scale_bytes, golden["heads.power_of_two.bytes"])
    return f"{values.numel():,} bytes and their scales as stored"


def _int8(golden: Tensors) -> str:
    total = 0
    for columns in INT8_COLUMNS:
        quantised = quantise.quantise_int8(golden["rows.input"][:, :columns])
        _compare(f"bytes of {columns} columns", quantised.values, golden[f"int8.{columns}.values"])
        _compare(f"scales of {columns} columns", quantised.scales, golden[f"int8.{columns}.scales"])
        total += quantised.values.numel()
    values, scales = quantise.round_to_int8(golden["heads.input"].clone())
    _compare("bytes of Q, K and V", values, golden["int8.heads.values"])
    _compare("scales of Q, K and V", scales, golden["int8.heads.scales"])
    return f"{total + values.numel():,} bytes and their scales as stored, with and without Hadamard"


def _int8_products() -> str:
    product = backend_of(torch.device("cpu")).describe()["INT8 GEMM"]
    if has_int8_products() and not int_mm_is_exact():
        raise Caution(f"linears in INT8 use {product}")
    return f"exact: linears in INT8 use {product}"


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
