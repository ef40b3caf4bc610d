"""What graders met, counted."""

import json
from typing import Any

import pytest

from isobit.rewards.counts import LONGEST_KIND, MOST, MOST_KINDS, OTHER_KINDS, bounded, count, take


def test_counts_are_taken_once() -> None:
    take()
    count("code: time limit")
    count("code: time limit")
    count("code: no block")
    assert take() == {"code: time limit": 2, "code: no block": 1}
    assert take() == {}


def test_the_rarest_of_many_kinds_are_added_up() -> None:
    counts = {f"kind {n}": n for n in range(1, 101)} | {OTHER_KINDS: 1000}
    found = bounded(counts)
    assert len(found) == MOST_KINDS and sum(found.values()) == sum(counts.values())
    assert next(iter(found)) == "kind 100" and list(found)[-1] == OTHER_KINDS
    assert bounded(found) == found


@pytest.mark.parametrize("character", ["x", "\\", '"', "\n", "\x1b", "\N{PILE OF POO}", "\ud800"])
def test_the_largest_counts_fit_into_a_line(character: str) -> None:
    kinds = {f"{n:02}" + character * 10**4: 10**30 for n in range(100)}
    found = bounded(kinds)
    assert all(len(kind) <= LONGEST_KIND and number <= MOST for kind, number in found.items())
    assert len(json.dumps(found)) < 2600


@pytest.mark.parametrize("content", [{"a": "1"}, {"a": 1.5}, {"a": True}, {"a": -1}, {3: 1}])
def test_what_is_no_count_is_left_out(content: dict[Any, Any]) -> None:
    assert bounded({"b": 2} | content) == {"b": 2}
