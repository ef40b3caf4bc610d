"""log-softmax in one order, and what it refuses."""

import pytest
import torch

from isobit.errors import NonFiniteError
from isobit.kernels.spec.log_prob import log_softmax


def test_values_against_fp64_with_torch_as_the_yardstick() -> None:
    logits, temperature = 5 * torch.randn(40, 10_000), torch.linspace(0.5, 2, 40)
    exact = torch.log_softmax(logits.double() / temperature.double()[:, None], -1)
    ours, yardstick = (
        log_softmax(logits, temperature),
        torch.log_softmax(logits / temperature[:, None], -1),
    )
    assert (ours - exact).abs().max() <= 2 * (yardstick - exact).abs().max()


@pytest.mark.parametrize("width", [128, 320, 4096, 10_000])
def test_rows_do_not_depend_on_their_place(width: int) -> None:
    logits, temperatures = 5 * torch.randn(70, width), torch.full((70,), 0.7)
    whole = log_softmax(logits, temperatures)
    for rows in [slice(i, i + n) for i, n in ((0, 1), (1, 1), (3, 2), (10, 7), (33, 37), (69, 1))]:
        assert torch.equal(log_softmax(logits[rows], temperatures[rows]), whole[rows])


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_logits_that_are_not_finite_are_an_error_by_name(bad: float) -> None:
    logits = torch.randn(4, 128)
    logits[2, 3] = bad
    with pytest.raises(NonFiniteError, match="logits: 1 of 4 rows"):
        log_softmax(logits, torch.ones(4))
