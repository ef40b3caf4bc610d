"""Run in Triton's interpreter by test_interpreted.py: linears have the specification's bits."""

from collections.abc import Iterable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from triton.runtime import interpreter

from isobit.kernels.operands import LinearWeight
from isobit.kernels.spec import linear as specification
from isobit.kernels.triton import int8, linear
from isobit.kernels.triton.int8 import Dots, Tiles, int8_gemm_nt
from isobit.kernels.triton.products import PortableProducts
from isobit.kernels.triton.quantise import publish, quantise_int8
from isobit.precision.flow import Site
from isobit.precision.quant_tensor import Int8Rows
from tests.int8_products import EXPECTED, digests
from tests.kernels.hopper.interpreted_int8 import _dot4
from tests.kernels.hopper.interpreted_int8_backward import check
from tests.kernels.triton.interpreted_qkv import convert


def no_experts(*_: object) -> torch.Tensor:
    raise AssertionError("no product of experts is portable yet")


def prepare() -> Any:
    """What the interpreter lacks, and the operations as one object."""
    interpreter._convert_float = convert
    int8._dot4 = _dot4
    torch.manual_seed(0)
    operations = {
        "linear_input": linear.linear_input,
        "linear": partial(linear.linear, PortableProducts),
    }
    return SimpleNamespace(device=torch.device("cpu"), publish=publish, **operations)


def check_products(names: Iterable[str]) -> None:
    """By the digests that the CPU has made."""
    backend = prepare()
    for name in names:
        assert digests(name, backend, no_experts) == EXPECTED[name], name


def check_cuts(columns: int) -> None:
    """No division of a product changes a bit."""
    prepare()
    site = Site("qkv_proj", "linear", "int8", parts=(21,))
    weight = publish(site, torch.randn(21, columns))
    assert isinstance(weight, Int8Rows)
    x = quantise_int8(torch.randn(7, columns).bfloat16())
    exact = specification.linear(x, LinearWeight(site, weight))
    cuts = [int8.tiles(m, 21, columns) for m in (5, 33, 65, 200)]
    if columns % 16 == 0:
        few = Int8Rows(x.values[:3], x.scales[:3])
        assert torch.equal(int8_gemm_nt(few, weight, Dots(4, words=128)), exact[:3])
        cuts.append(Tiles(16, 64, 4, 1, swaps=True))
    for cut in cuts:
        assert torch.equal(int8_gemm_nt(x, weight, cut), exact), cut


def check_backward(parts: tuple[int, ...], columns: int, tokens: int, *spoilt: float) -> None:
    prepare()
    check(parts, columns, tokens, *spoilt, products=PortableProducts)


def quick() -> None:
    check_cuts(48)
    check_backward((24, 8), 16, 3)


def whole() -> None:
    """What the interpreter computes within minutes; a card's tests have the larger products."""
    check_products(("odd sizes",))
    check_cuts(1152)
    check_backward((96,), 40, 140)
    for spoilt in (torch.nan, torch.inf):
        check_backward((40, 24), 80, 5, spoilt)
