"""The page and the picture of the proof: every arm in every chart in its own colour, nothing to
load, both readable as XML or HTML.
"""

import pytest

from experiments.proof.page import charts, series_of
from experiments.proof.suite import ARMS
from tests.experiments.test_proof_rows import small


def test_a_point_is_the_mean_of_its_steps_and_the_last_one_of_what_is_left() -> None:
    row = small("fp8")
    row["steps"] = {
        **row["steps"],
        "step": list(range(1, 8)),
        "entropy": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, None],
        "log_prob_diff/tokens_differing": [0, 1, 0, 0, 0, None, 0],
        "log_prob_diff/tokens_compared": [10, 10, 10, 10, 10, None, 0],
    }
    assert series_of(row, "entropy") == {5: 3.0, 7: 6.0}
    assert series_of(row, "differing share") == {5: pytest.approx(0.02)}
    assert series_of(row, "accuracy").keys() == {0, 25}


def test_curves_are_means_of_seeds_between_the_lowest_and_the_highest() -> None:
    found = [small("fp8-rollout", seed) for seed in range(3)]
    drawn = {chart.panel.title: chart for chart in charts([*found, small("bf16")])}
    accuracy = drawn["Held-out accuracy"]
    assert [(mark.label, mark.place) for mark in accuracy.marks] == [
        ("bf16", 1),
        ("fp8-rollout", 1 + list(ARMS).index("fp8-rollout")),
    ]
    assert accuracy.columns == ("step", "bf16", "fp8-rollout", "low", "high")
    last = [sum(row["evaluations"][-1]["rewards"]) / 20 for row in found]
    texts = [f"{100 * value:.1f}%" for value in (sum(last) / 3, min(last), max(last))]
    assert list(accuracy.rows[-1][2:]) == texts
    assert accuracy.marks[1].band and not accuracy.marks[0].band
    assert len(drawn) == 8
