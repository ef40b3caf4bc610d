"""The quantisers of this machine against the stored golden bytes."""

from collections.abc import Callable

import torch

from isobit.kernels.spec import e4m3, grid, quantise
from isobit.precision.formats import E4M3
from isobit.precision.quant_tensor import QuantTensor
from isobit.proof.doctor.bits import bits_of
from isobit.proof.doctor.finding import Check, Fault
from isobit.proof.doctor.golden import Tensors, load_golden
from isobit.proof.doctor.specification import ScaleKind

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
    _compare("numbers", grid.snap_rows(golden["grid.input"].clone()), golden["grid.values"])
    return f"{golden['grid.values'].numel():,} numbers as stored"


def _decode(golden: Tensors) -> str:
    codes = golden["decode.input"]
    _compare("numbers", e4m3.decode_e4m3(codes.view(E4M3)), golden["decode.values"])
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
