"""Estimators against brute force and published figures.

The figures of an evaluation set from graded groups.
"""

import json
import math
from dataclasses import asdict
from itertools import combinations
from statistics import fmean, pstdev

import pytest

from isobit.observe.console import describe_gain, describe_result, shares_right
from isobit.observe.evaluation import EvalResult, result_of
from isobit.observe.group_metrics import reward_metrics
from isobit.observe.intervals import bootstrap_interval, mean_interval, pass_at_k, wilson_interval
from isobit.records.sequence import TokenSequence
from isobit.records.text import Completion, Group, Prompt


@pytest.mark.parametrize(("samples", "right"), [(1, 0), (1, 1), (6, 0), (6, 1), (6, 4), (6, 6)])
def test_pass_at_k_is_the_share_of_subsets_with_a_right_sample(samples: int, right: int) -> None:
    outcomes = [True] * right + [False] * (samples - right)
    for k in range(1, samples + 1):
        assert pass_at_k(samples, right, k) == pytest.approx(
            fmean(any(subset) for subset in combinations(outcomes, k))
        )


@pytest.mark.parametrize(("samples", "right", "k"), [(4, 2, 5), (4, 2, 0), (4, 5, 1), (4, -1, 1)])
def test_pass_at_k_refuses_impossible_counts(samples: int, right: int, k: int) -> None:
    with pytest.raises(ValueError, match="cannot be estimated"):
        pass_at_k(samples, right, k)


@pytest.mark.parametrize(
    ("right", "problems", "low", "high"),
    [
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_wilson_interval_gives_newcombes_figures(
    right: int, problems: int, low: float, high: float
) -> None:
    """Newcombe 1998, Statistics in Medicine 17:857, table I, method 3."""
    assert wilson_interval(right, problems) == pytest.approx((low, high), abs=5e-5)


def test_wilson_interval_ends_at_0_and_1_where_none_or_all_are_right() -> None:
    for problems in range(1, 600):
        assert wilson_interval(0, problems)[0] == 0.0 < wilson_interval(1, problems)[0]
        assert wilson_interval(problems, problems)[1] == 1.0 > wilson_interval(0, problems)[1]


def test_bootstrap_interval_is_near_the_normal_one_for_many_even_scores() -> None:
    scores = [index / 400 for index in range(401)]
    low, high = bootstrap_interval(scores)
    half = 1.959964 * pstdev(scores) / math.sqrt(len(scores))
    assert (low, high) == pytest.approx((0.5 - half, 0.5 + half), abs=0.1 * half)
    assert (low, high) == bootstrap_interval(scores)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_an_interval_of_partial_credits_stays_within_them(sign: float) -> None:
    """The normal one is -1.4% to 9.4% here."""
    scores = [sign * score for score in [0.0] * 23 + [0.5, 0.5]]
    low, high = sorted(abs(end) for end in bootstrap_interval(scores))
    assert 0.0 <= low < 0.04 < high <= 0.5


def test_mean_interval_chooses_by_the_scores() -> None:
    assert mean_interval([0.0, 1.0, 1.0]) == wilson_interval(2, 3)
    assert mean_interval([0.0, 0.5, 1.0]) == bootstrap_interval([0.0, 0.5, 1.0])
    assert mean_interval([0.5]) is None
    assert mean_interval([]) is None


def group(rewards: list[float | None], tokens: int = 2) -> Group:
    completions = [
        Completion(
            TokenSequence.of_answer((1,), (5,) * tokens), "", "stop" if tokens < 4 else "length"
        )
        for _ in rewards
    ]
    return Group(Prompt("set/0", "", (1,)), 0, completions, rewards)


def test_accuracy_is_the_mean_over_problems_not_over_samples() -> None:
    result = result_of([group([1.0, 1.0, None, None]), group([0.0, 0.0, 0.0, 1.0])], samples=4)
    assert result.accuracy == pytest.approx((1.0 + 0.25) / 2)
    assert (result.problems, result.failed) == (2, 2)


@pytest.mark.parametrize(
    ("rewards", "accuracy", "right", "said"),
    [
        ([0.0, 1.0, 1.0, 0.0], 0.5, 0.5, "held_out accuracy 50.0% (95%"),
        ([0.0, 0.5, 1.0, 0.9], None, 0.25, "held_out mean reward 0.600 (95%"),
        ([2.0, 0.0, 0.0, 0.0], None, 0.25, "held_out mean reward 0.500 (95%"),
        ([-1.0, 1.0, 1.0, 1.0], None, 0.75, "held_out mean reward 0.500 (95%"),
    ],
)
def test_a_mean_is_an_accuracy_only_where_every_reward_is_0_or_1(
    rewards: list[float], accuracy: float | None, right: float, said: str
) -> None:
    """Seen before: an accuracy of 56.7% for answers of which 3.6% were right."""
    result = result_of([group([reward]) for reward in rewards], 1)
    figures = result.figures()
    assert (figures["accuracy"], figures["right"]) == (accuracy, right)
    text = describe_result("held_out", result)
    assert text.startswith(said)
    assert (f"{100 * right:.1f}% exactly right (reward at least 1)" in text) == (accuracy is None)
    assert ("eval/held_out/right" in result.scalars("held_out")) == (accuracy is None)
    assert EvalResult.from_json(json.loads(json.dumps(asdict(result)))) == result


def test_a_run_is_described_by_accuracies_only_where_both_ends_have_them() -> None:
    zeros, parts = (result_of([group([r]) for r in row], 1) for row in ([0.0, 0.0], [0.5, 1.0]))
    assert shares_right(zeros, zeros) is None
    assert shares_right(zeros, parts) == (0.0, 0.5) and shares_right(parts, zeros) == (0.5, 0.0)
    gain = describe_gain((0.0, 0.75), shares_right(zeros, parts))
    assert gain == "mean reward 0.000 -> 0.750, exactly right 0.0% -> 50.0%"
    assert describe_gain((0.5, 1.0), None, True) == "accuracy 50.0% -> 100.0% (+50.0 points)"


def test_a_problem_without_a_reward_is_left_out_and_never_counts_as_wrong() -> None:
    result = result_of([group([1.0]), group([None])], samples=1)
    assert (result.accuracy, result.problems, result.failed) == (1.0, 1, 1)


def test_pass_at_k_takes_powers_of_two_and_needs_full_reward() -> None:
    result = result_of([group([1.0, 0.5, 0.0, 0.0]), group([0.99] * 4)], samples=4)
    assert result.pass_at == pytest.approx({1: 0.125, 2: 0.25, 4: 0.5})
    assert result_of([group([1.0])], samples=1).pass_at == {}


def test_a_reward_that_is_1_but_for_rounding_is_right() -> None:
    added_up = sum([0.1] * 10)
    found = result_of([group([added_up, 0.1 + 0.2 - 0.3, None])], 3)
    assert added_up < 1.0 and found.is_accuracy
    assert (found.accuracy, found.pass_at[2]) == (0.5, 1.0)
    assert reward_metrics([group([0.3, 0.1 * 3])])["reward/std"] == 0.0


def test_pass_at_k_leaves_out_problems_with_too_few_graded_samples() -> None:
    result = result_of([group([1.0, None]), group([0.0, 0.0])], samples=2)
    assert result.pass_at == {1: 0.5, 2: 0.0}


def test_scalars_carry_the_sets_name_and_a_missing_interval_is_nan() -> None:
    scalars = result_of([group([0.5], tokens=4)], samples=1).scalars("sums")
    assert scalars["eval/sums/accuracy"] == 0.5
    assert scalars["eval/sums/response_length"] == 4
    assert scalars["eval/sums/truncated"] == 1.0
    assert math.isnan(scalars["eval/sums/low"])
