"""Every operation with a gradient adds one finished sum to it: several micro-batches are then added
in the same order whoever computes them.
"""

import pytest
import torch

from isobit.kernels.backend import backend_of
from isobit.kernels.spec import head
from isobit.precision.quant_tensor import Format
from tests.finished_sums import SMALL, WHOLE, Case, Size, adds_one_finished_sum, others

SPEC = backend_of(torch.device("cpu"))


@pytest.mark.few(3)
@pytest.mark.parametrize("activations", ["bf16", "fp32"])
@pytest.mark.parametrize("size", [SMALL, WHOLE], ids=["small", "whole"])
def test_one_finished_sum(size: Size, activations: Format) -> None:
    assert others(Case(SPEC, size, activations)) == []


def test_so_does_the_head_in_several_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head, "CHUNK", 10 * SMALL.vocabulary)
    assert adds_one_finished_sum(Case(SPEC, SMALL).head(), SPEC.device)
