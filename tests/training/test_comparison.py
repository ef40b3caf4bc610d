"""Bit comparison of log-probabilities."""

import math

import pytest
import torch

from isobit.records.metrics import METRICS
from isobit.training.comparison import Comparison, mismatch


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


def test_the_distance_by_hand() -> None:
    recorded = torch.tensor([-1.0, -2.0, -3.0, -4.0])
    trained = torch.tensor([-1.0, -1.5, -4.0, -4.0])
    differences = [0.0, 0.5, -1.0, 0.0]
    ratios = [math.exp(d) for d in differences]
    found = mismatch(recorded, trained)
    assert found["mismatch/k1"] == pytest.approx(0.125)
    assert found["mismatch/k3"] == pytest.approx(
        sum(r - 1 - d for r, d in zip(ratios, differences, strict=True)) / 4
    )
    assert found["mismatch/mult_prob_error"] == pytest.approx(
        sum(math.exp(abs(d)) for d in differences) / 4
    )
    assert found["log_prob_diff/p99"] == 1.0
    assert (found["mismatch/ratio_min"], found["mismatch/ratio_max"]) == pytest.approx(
        (min(ratios), max(ratios))
    )
    assert found["mismatch/ratio_mean"] == pytest.approx(sum(ratios) / 4)
    assert found["mismatch/effective_sample_size"] == pytest.approx(
        sum(ratios) ** 2 / (4 * sum(r * r for r in ratios))
    )


def test_equal_bits_are_no_distance() -> None:
    log_probs = torch.tensor([-0.1, -7.3, -20.0])
    found = mismatch(log_probs, log_probs.clone())
    assert len(found) == 8
    assert all(value == METRICS[name].exact for name, value in found.items())
    assert mismatch(torch.empty(0), torch.empty(0)) == {}


def test_the_99th_percentile_leaves_out_the_largest_of_a_hundred() -> None:
    trained = -torch.arange(100.0)
    found = mismatch(torch.zeros(100), trained)
    assert found["log_prob_diff/p99"] == 98.0


def test_a_vanished_probability_does_not_drown_the_means() -> None:
    found = mismatch(torch.tensor([-500.0, -1.0]), torch.tensor([-1.0, -1.0]))
    assert found["mismatch/ratio_max"] == pytest.approx(math.exp(20.0))
    assert math.isfinite(found["mismatch/k3"])
