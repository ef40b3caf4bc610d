"""On the GPU, too, every operation with a gradient adds one finished sum to it, cuBLAS's products
among them; lm_head's parts alone are added one by one.
"""

from dataclasses import replace

import pytest
import torch

from isobit.kernels.backend import backend_of
from isobit.kernels.triton import head
from tests.finished_sums import SMALL, WHOLE, Case, Size, others

LARGE = Size(8192, 4096, (32, 8, 128), 20_000, (16, 4, 768))
FEW = replace(LARGE, tokens=1000)
LONG = replace(WHOLE, tokens=20_011, hidden=128)  # cuBLAS cuts so long a sum of few results
SIZES = {"small": SMALL, "whole": WHOLE, "large": LARGE, "few": FEW, "long": LONG}


@pytest.mark.parametrize("name", list(SIZES))
def test_one_finished_sum(name: str) -> None:
    backend = backend_of(torch.device("cuda", torch.cuda.current_device()))
    assert others(Case(backend, SIZES[name])) == []


def test_parts_of_the_head_in_zeros_are_one_finished_sum_of_the_caller(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What ``Backend`` says of it: a caller who has a sum already gives zeros, and adds them."""
    backend = backend_of(torch.device("cuda", torch.cuda.current_device()))
    monkeypatch.setattr(head, "backward_rows", lambda _: 1000)
    operation = Case(backend, replace(WHOLE, tokens=4500)).head()
    made = [torch.zeros(operation.shapes[0], device="cuda") for _ in range(2)]
    for grad in made:
        operation.add([grad])
    assert torch.equal(made[0], made[1])
