"""INT8 operands and products have the digests that every back end must have, with
``torch._int_mm`` and without it.
"""

import pytest
import torch

from isobit.kernels.backend import backend_of
from isobit.kernels.operands import LinearWeight, Operand
from isobit.kernels.routing import Routing
from isobit.kernels.spec import int8_backward, linear
from isobit.kernels.spec.experts import one_expert
from isobit.precision.quant_tensor import Int8Rows
from tests.int8_products import BACKWARDS, EXPECTED, PRODUCTS, backward_digests, digests

SPEC = backend_of(torch.device("cpu"))


def grouped(x: Operand, routing: Routing, weight: LinearWeight) -> torch.Tensor:
    """Token by token, each a linear of its own."""
    assert isinstance(x, Int8Rows)
    count = routing.logits.shape[1]
    rows = [
        [linear.linear(x.rows(token, token + 1), one_expert(weight, expert, count)[0])[0]
         for expert in experts]
        for token, experts in enumerate(routing.experts.tolist())
    ]  # fmt: skip
    return torch.stack([torch.stack(of_token) for of_token in rows])


@pytest.mark.parametrize("name", list(PRODUCTS))
def test_digests(name: str) -> None:
    assert digests(name, SPEC, grouped) == EXPECTED[name]


@pytest.mark.parametrize("name", list(PRODUCTS))
def test_without_instructions_for_bytes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "int_mm_is_exact", lambda: False)
    assert digests(name, SPEC, grouped)["product"] == EXPECTED[name]["product"]


@pytest.mark.parametrize("has_instructions", [True, False])
@pytest.mark.parametrize("name", list(BACKWARDS))
def test_digests_of_the_backward(
    name: str, has_instructions: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_instructions:
        monkeypatch.setattr(linear, "int_mm_is_exact", lambda: False)
    assert backward_digests(name, SPEC, int8_backward) == EXPECTED[name]


def test_every_case_has_digests() -> None:
    assert list(EXPECTED) == [*PRODUCTS, *BACKWARDS]
