"""Grading: numbers of every kind, and failures that are counted and never become zeros."""

import re
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from isobit.errors import RewardError
from isobit.records.sequence import TokenSequence
from isobit.records.text import Completion, Group, Prompt
from isobit.rewards.function import RewardFunction
from isobit.rewards.grade import grade


def groups(*texts: list[str]) -> list[Group]:
    def completion(text: str) -> Completion:
        return Completion(TokenSequence.of_answer((1,), (2,)), text, "stop")

    return [
        Group(Prompt(f"train/{index}", "", (1,)), 0, [completion(text) for text in group])
        for index, group in enumerate(texts)
    ]


def returns(value: Any) -> RewardFunction:
    return lambda prompt, completion: value


def length_or_fail(prompt: Prompt, completion: Completion) -> float:
    """1.0 a character, but ``!`` raises, ``?`` is NaN and ``-`` is no number."""
    match completion.text:
        case "!":
            raise KeyError("answer")
        case "?":
            return float("nan")
        case "-":
            return "1.0"  # pyright: ignore[reportReturnType]
        case text:
            return float(len(text))


def test_rewards_keep_the_order_of_groups_and_completions() -> None:
    graded = groups(["a", "bbb"], ["cc", ""])
    stats = grade(graded, length_or_fail)
    assert [group.rewards for group in graded] == [[1.0, 3.0], [2.0, 0.0]]
    assert (stats.graded, stats.failed, stats.failures, stats.first_error) == (4, 0, {}, None)


@pytest.mark.parametrize(
    "value", [1, True, 1.0, np.float32(1), np.float64(1), np.int64(1), np.bool_(True), Fraction(1)]
)
def test_every_kind_of_number_is_a_float(value: Any) -> None:
    (group,) = graded = groups(["a"])
    grade(graded, returns(value))
    assert group.rewards == [1.0]
    assert type(group.rewards[0]) is float


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (float("nan"), "not finite"),
        (float("-inf"), "not finite"),
        (np.float32("inf"), "not finite"),
        (10**400, "not finite"),
        (1e30, "too large"),
        (-1.7e308, "too large"),
        (None, "not a number"),
        ("1.0", "not a number"),
        ([1.0], "not a number"),
        (1j, "not a number"),
        (np.ones(2), "not a number"),
    ],
)
def test_what_is_no_finite_number_is_excluded_and_counted(value: Any, kind: str) -> None:
    graded = groups(["a", "b"])
    values = iter([value, 0.5])
    stats = grade(graded, lambda prompt, completion: next(values))
    assert graded[0].rewards == [None, 0.5]
    assert (stats.graded, stats.failed, stats.failures) == (1, 1, {kind: 1})


class MischiefError(Exception):
    def __str__(self) -> str:
        raise KeyError("text")

    def __repr__(self) -> str:
        raise MischiefError


@pytest.mark.parametrize(
    ("value", "kind", "message"),
    [
        (torch.zeros((), device="meta"), "RuntimeError", "RuntimeError: .*meta"),
        (MischiefError(), "MischiefError", "MischiefError, whose text raises KeyError"),
    ],
)
def test_what_raises_when_it_is_asked_is_a_failure(value: Any, kind: str, message: str) -> None:
    graded = groups(["a", "b"])
    stats = grade(graded, lambda prompt, one: value if one.text == "a" else 1.0)
    assert graded[0].rewards == [None, 1.0] and stats.failures == {kind: 1}
    assert stats.first_error is not None and re.search(message, stats.first_error)


def test_a_message_of_a_failure_is_bounded() -> None:
    def fails(prompt: Prompt, completion: Completion) -> float:
        raise type("E" * 1000, (Exception,), {})("x" * 10**6)

    graded = groups(["a"])
    with pytest.raises(RewardError) as told:
        grade(graded, fails)
    assert len(str(told.value)) < 3000


def test_failures_are_counted_by_kind_with_the_first_message() -> None:
    graded = groups(["a", "!"], ["?", "!", "-", "b"])
    stats = grade(graded, length_or_fail)
    assert [group.rewards for group in graded] == [[1.0, None], [None, None, None, 1.0]]
    assert stats.failures == {"KeyError": 2, "not finite": 1, "not a number": 1}
    assert stats.first_error == "prompt train/0, sample 1: KeyError: 'answer'"
    assert stats.failed_fraction == pytest.approx(4 / 6)


def test_a_reward_that_exits_is_a_failure_not_an_end() -> None:
    def leaves(prompt: Prompt, completion: Completion) -> float:
        if completion.text == "!":
            raise SystemExit(0)
        return 1.0

    stats = grade(groups(["a", "!"]), leaves)
    assert stats.failures == {"SystemExit": 1}


def test_too_many_failures_stop_the_run_with_the_first_error() -> None:
    assert grade(groups(["a", "!"]), length_or_fail, max_failed_fraction=0.5).failed == 1
    with pytest.raises(
        RewardError,
        match=(
            r"2 of 3 rewards failed, more than .* 0.5 .*prompt train/0, sample 1: KeyError: "
            r"'answer'"
        ),
    ):
        grade(groups(["a", "!", "?"]), length_or_fail, max_failed_fraction=0.5)


def test_all_failing_stops_the_run_at_any_limit() -> None:
    with pytest.raises(RewardError, match="2 of 2 rewards failed"):
        grade(groups(["!", "?"]), length_or_fail)


def test_a_reward_error_of_the_reward_itself_ends_the_run() -> None:
    def refuses(prompt: Prompt, completion: Completion) -> float:
        raise RewardError("no such scorer")

    with pytest.raises(RewardError, match="no such scorer"):
        grade(groups(["a"]), refuses)


def test_grading_again_replaces_the_rewards() -> None:
    graded = groups(["a", "b"])
    grade(graded, returns(1))
    grade(graded, returns(2))
    assert graded[0].rewards == [2.0, 2.0]
