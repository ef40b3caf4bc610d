"""Bit comparison of log-probabilities."""

import math

import torch

from isobit.training.comparison import Comparison


def test_counts_differing_bits() -> None:
    recorded = torch.tensor([-1.0, -2.0, -3.0])
    trained = recorded.clone()
    assert Comparison.of(recorded, trained) == Comparison(3, 0, 0.0)
    trained[1] = torch.nextafter(trained[1], torch.tensor(0.0))
    assert Comparison.of(recorded, trained) == Comparison(3, 1, 2.0**-23, 2.0**-23)


def test_compares_bits_not_values() -> None:
    assert Comparison.of(torch.tensor([0.0]), torch.tensor([-0.0])) == Comparison(1, 1, 0.0)
    assert Comparison.of(torch.tensor([math.nan]), torch.tensor([math.nan])).tokens_differing == 0


def test_comparisons_add_up() -> None:
    assert Comparison(3, 1, 0.5, 0.75) + Comparison(5, 1, 0.25, 0.25) == Comparison(8, 2, 0.5, 1.0)
    assert Comparison(8, 2, 0.5, 1.0).mean_abs_diff == 0.125
    assert Comparison.of(torch.empty(0), torch.empty(0)) == Comparison()
