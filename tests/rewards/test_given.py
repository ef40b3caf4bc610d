"""Rewards given from Python: their names, and the copies that grading processes get."""

from collections.abc import Callable
from typing import Any

import pytest

from isobit.config.reward import RewardConfig
from isobit.errors import RewardError
from isobit.rewards.function import load_reward
from isobit.rewards.given import PREFIX, give_reward, packed_reward
from isobit.rewards.grading import Graders
from isobit.starter.tasks import correct_answer
from tests.rewards.test_grading import group as make_group

BONUS = 0.25


def test_a_function_that_can_be_imported_has_a_name_as_in_a_recipe() -> None:
    assert give_reward(correct_answer).name == "isobit.starter.tasks:correct_answer"


def closing(weight: float) -> Callable[..., float]:
    def score(prompt: Any, completion: Any) -> float:
        return weight * len(completion.text) + BONUS

    return score


def batch(weight: float) -> Callable[..., list[float]]:
    return lambda completions, answer: [weight + len(one) for one in completions]


class Judge:
    def __init__(self, least: int) -> None:
        self.least = least

    def __call__(self, solution_str: str, ground_truth: str) -> float:
        return float(len(solution_str) >= self.least)


def test_other_functions_are_handed_to_the_processes_as_copies() -> None:
    held = [give_reward(one) for one in (closing(2.0), batch(1.0), Judge(2), lambda **_: 0.0)]
    assert [one.name.partition("@")[0] for one in held] == [
        f"{PREFIX}score", f"{PREFIX}lambda", f"{PREFIX}Judge", f"{PREFIX}lambda",
    ]  # fmt: skip
    parts = {name: {"function": one.name} for name, one in zip("abc", held, strict=False)}
    group = make_group("1", "22")
    with Graders(RewardConfig.model_validate({"parts": parts, "workers": 1})) as graders:
        first = graders.describe()[0]
        stats = graders.collect([group])
    assert first.startswith(f"reward a: {PREFIX}score@") and "Isobit's form" in first
    assert stats.failed == 0, stats.first_error
    assert group.reward_parts == {"a": [2.25, 4.25], "b": [2.0, 3.0], "c": [0.0, 1.0]}


def test_names_tell_functions_apart_and_are_forgotten() -> None:
    first, same, other = (give_reward(closing(weight)) for weight in (1.0, 1.0, 2.0))
    assert first is same and first.name != other.name
    name = first.name
    assert load_reward(name).name == name
    del first, same
    with pytest.raises(RewardError, match=r"given from Python.*reward=the same function"):
        load_reward(name)


def test_what_cannot_be_handed_over_is_said_before_a_process_is_started() -> None:
    bonuses = (1.0 for _ in range(9))

    def drawn(prompt: Any, completion: Any) -> float:
        return next(bonuses)

    given = give_reward(drawn)
    with pytest.raises(RewardError, match=r"drawn.* cannot be handed .*inside the function"):
        packed_reward(given.name)
    config = RewardConfig(function=given.name, in_process=True)
    group = make_group("1")
    with Graders(config) as graders:
        graders.collect([group])
    assert group.rewards == [1.0]
