"""Open groups of a world of one: what a step may choose while others are drawn."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count

import pytest

from isobit.parallel.world import ALONE
from isobit.records.schedule import Schedule
from isobit.records.text import Group
from isobit.rollout.open_groups import OpenGroup
from isobit.rollout.requests import Request
from isobit.rollout.shared_groups import SharedGroups
from isobit.util.errors import CheckpointError
from tests.rollout.history_model import make_engine, request

SCHEDULE = Schedule(ahead=2, per_step=2, steps=9)
LENGTHS = (2, 4, 6, 8, 10, 12)
"""Tokens of each group's samples, so that they become whole one behind the other."""


def shared_groups(graded: Callable[[str], bool], max_sequences: int = 16) -> SharedGroups:
    engine, _ = make_engine(max_sequences=max_sequences, kv_pages=200)
    numbers = count()

    def next_request() -> Request:
        index = next(numbers)
        return request(index, 5, samples=2, max_new_tokens=LENGTHS[index], stop_token_ids=())

    groups = SharedGroups(
        ALONE,
        engine,
        next_request,
        on_whole=lambda _: None,
        is_graded=lambda group: graded(group.prompt.id),
    )
    groups.begin_step(0, SCHEDULE.groups_begun(0))
    return groups


def chosen(groups: SharedGroups, stays: bool, most_turns: int = 1000) -> Sequence[Group]:
    turns = count()

    def watch() -> None:
        assert next(turns) < most_turns

    places, _ = groups.draw(lambda found: SCHEDULE.chosen(1, found), watch, stays)
    return groups.take(places)


def names(groups: Sequence[Group]) -> list[str]:
    return [group.prompt.id for group in groups]


@pytest.mark.parametrize("stays", [False, True])
def test_a_step_takes_the_first_groups_that_are_whole(stays: bool) -> None:
    groups = shared_groups(graded=lambda _: True)
    assert names(chosen(groups, stays)) == ["p/0", "p/1"]
    assert bool(groups.open.num_live) == stays


def test_a_group_whose_grades_are_waited_for_is_passed_over_where_drawing_goes_on() -> None:
    groups = shared_groups(graded=lambda name: name != "p/0")
    assert names(chosen(groups, stays=True)) == ["p/1", "p/2"]
    # in one process nobody draws meanwhile, and what is chosen does not depend on time
    assert names(chosen(shared_groups(lambda name: name != "p/0"), stays=False)) == ["p/0", "p/1"]


def test_grades_are_waited_for_where_nothing_is_left_to_draw() -> None:
    groups = shared_groups(graded=lambda _: False)
    assert names(chosen(groups, stays=True)) == ["p/0", "p/1"]
    assert not groups.open.num_live
    assert [group.group is not None for group in groups.groups] == [True] * 4


def test_groups_begin_while_a_step_learns_as_far_as_the_schedule_says() -> None:
    groups = shared_groups(graded=lambda _: True, max_sequences=4)
    groups.begin_step(0, 5)
    assert names(chosen(groups, stays=True)) == ["p/0", "p/1"]
    assert len(groups.groups) < 3, "there are places for two groups at once"
    groups.draw_on(lambda: False, lambda: None)
    groups.end_step()
    assert [group.name[0] for group in groups.groups] == ["p/2", "p/3", "p/4"]
    assert all(group.group is not None for group in groups.groups)


def test_drawing_beside_a_step_ends_when_it_has_learnt() -> None:
    groups = shared_groups(graded=lambda _: True, max_sequences=4)
    chosen(groups, stays=True)
    turns = count()
    groups.draw_on(lambda: next(turns) == 0, lambda: None)
    assert groups.open.num_live, "nothing was drawn"
    groups.end_step()
    assert not groups.open.num_live


@pytest.mark.parametrize("stays", [False, True])
def test_a_group_that_can_never_be_whole_is_an_error(stays: bool) -> None:
    groups = shared_groups(graded=lambda _: True)
    groups.draw(lambda found: SCHEDULE.chosen(1, found), lambda: None)
    groups.end_step()
    first = groups.groups[0]
    more = replace(first.request, samples=3)
    groups.open.groups = [OpenGroup(more, 0, dict(first.samples))]
    groups.begin_step(1, 0)
    with pytest.raises(CheckpointError, match=r"'p/0' has 2 of 3 samples, and nothing is drawn"):
        chosen(groups, stays)


@pytest.mark.parametrize("stays", [False, True])
def test_whole_groups_of_which_none_is_chosen_are_an_error(stays: bool) -> None:
    groups = shared_groups(graded=lambda _: True)
    groups.begin_step(0, 1)
    with pytest.raises(CheckpointError, match="all 1 groups that may begin are whole, and a step"):
        chosen(groups, stays)
