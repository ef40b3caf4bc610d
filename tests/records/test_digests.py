"""Digests of what a step was given: each says so where its part has changed, and no other does."""

import struct
from collections.abc import Callable
from dataclasses import replace
from math import nextafter
from typing import Any

import numpy as np
import pytest

from isobit.records.digests import group_digests
from isobit.records.sequence import TokenSequence
from isobit.records.text import Completion, Group, Prompt


def groups() -> list[Group]:
    made = []
    for index in range(2):
        completions = [
            Completion(
                TokenSequence.of_answer(
                    (1, 2), (5, n), (-0.5, -0.25 * (n + 1)), (3, 3), routings=(7, 1 << 60)
                ),
                f"text {n}",
                "stop",
            )
            for n in range(3)
        ]
        made.append(Group(Prompt(f"train/{index}", "", (1, 2)), index, completions, [0.1, None, 1]))
    return made


def changed(of_group: int, place: int, **columns: Any) -> list[Group]:
    made = groups()
    one = made[of_group].completions[place]
    arrays = {
        name: np.array(column, getattr(one.sequence, name).dtype)
        for name, column in columns.items()
    }
    made[of_group].completions[place] = replace(one, sequence=replace(one.sequence, **arrays))
    return made


def next_float(x: float) -> float:
    """The FP32 number after it."""
    (bits,) = struct.unpack("<i", struct.pack("<f", x))
    return struct.unpack("<f", struct.pack("<i", bits + 1))[0]


def with_rewards(change: Callable[[Group], None]) -> list[Group]:
    made = groups()
    change(made[1])
    return made


CASES: dict[str, tuple[str, list[Group]]] = {
    "a token": ("tokens", changed(1, 2, token_ids=(1, 2, 5, 9))),
    "a token of a prompt": ("tokens", changed(1, 2, token_ids=(1, 3, 5, 2))),
    "a version": ("tokens", changed(0, 0, weights_versions=(-1, -1, 3, 4))),
    "two groups in the other order": ("tokens", groups()[::-1]),
    "a log-probability": (
        "log_probs",
        changed(0, 1, log_probs=(0.0, 0.0, -0.5, next_float(-0.5))),
    ),
    "an expert": ("log_probs", changed(0, 1, routings=(0, 0, 7, (1 << 60) + 1))),
    "a reward": (
        "rewards",
        with_rewards(lambda group: group.rewards.__setitem__(0, nextafter(0.1, 1))),
    ),
    "no reward": ("rewards", with_rewards(lambda group: group.rewards.__setitem__(2, None))),
    "a part": ("rewards", with_rewards(lambda group: group.reward_parts.update(form=[1.0]))),
    "a turn's reward": (
        "rewards",
        with_rewards(
            lambda group: group.completions.__setitem__(
                0,
                replace(
                    group.completions[0],
                    sequence=group.completions[0].sequence.with_columns(turn_rewards=(0, 0.1)),
                ),
            )
        ),
    ),
    "a baseline": ("rewards", with_rewards(lambda group: setattr(group, "baseline", 0.5))),
}


def test_equal_groups_have_equal_digests() -> None:
    found = group_digests(groups())
    assert found == group_digests(groups())
    assert list(found) == ["tokens", "log_probs", "rewards"] and len(set(found.values())) == 3


@pytest.mark.parametrize("case", CASES)
def test_a_change_shows_in_its_own_digest(case: str) -> None:
    name, made = CASES[case]
    whole, found = group_digests(groups()), group_digests(made)
    assert [key for key, value in found.items() if value != whole[key]] == [name]


def test_where_one_completion_ends_and_the_next_begins_counts() -> None:
    def of(*answers: tuple[int, ...]) -> dict[str, str]:
        completions = [
            Completion(TokenSequence.of_answer((1,), answer, (0.0,) * len(answer)), "", "stop")
            for answer in answers
        ]
        return group_digests([Group(Prompt("a", "", (1,)), 0, completions, [0.0] * len(answers))])

    assert of((1, 1, 1), (1,))["tokens"] != of((1, 1), (1, 1))["tokens"]
