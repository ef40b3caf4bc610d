"""The figures of an evaluation set from graded groups."""

import math

import pytest

from isobit.observe.console import describe_result
from isobit.observe.eval_result import result_of
from isobit.records.sequence import TokenSequence
from isobit.records.text import Completion, Group, Prompt


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


def test_a_mean_is_an_accuracy_only_where_every_reward_can_be_a_share() -> None:
    assert result_of([group([0.0]), group([0.5]), group([1.0])], 1).figures()["accuracy"] == 0.5
    beyond = result_of([group([2.0]), group([0.0]), group([0.0])], 1)
    assert beyond.figures()["accuracy"] is None
    assert describe_result("held_out", beyond).startswith("held_out mean reward 0.667 (95%")


def test_a_problem_without_a_reward_is_left_out_and_never_counts_as_wrong() -> None:
    result = result_of([group([1.0]), group([None])], samples=1)
    assert (result.accuracy, result.problems, result.failed) == (1.0, 1, 1)


def test_pass_at_k_takes_powers_of_two_and_needs_full_reward() -> None:
    result = result_of([group([1.0, 0.5, 0.0, 0.0]), group([0.99] * 4)], samples=4)
    assert result.pass_at == pytest.approx({1: 0.125, 2: 0.25, 4: 0.5})
    assert result_of([group([1.0])], samples=1).pass_at == {}


def test_pass_at_k_leaves_out_problems_with_too_few_graded_samples() -> None:
    result = result_of([group([1.0, None]), group([0.0, 0.0])], samples=2)
    assert result.pass_at == {1: 0.5, 2: 0.0}


def test_scalars_carry_the_sets_name_and_a_missing_interval_is_nan() -> None:
    scalars = result_of([group([0.5], tokens=4)], samples=1).scalars("sums")
    assert scalars["eval/sums/accuracy"] == 0.5
    assert scalars["eval/sums/response_length"] == 4
    assert scalars["eval/sums/truncated"] == 1.0
    assert math.isnan(scalars["eval/sums/low"])
