"""Credit by turn: against a slow definition in loops, and what must not matter."""

from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean, stdev
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from isobit.algorithms.advantages import (
    STD_EPSILON,
    advantages_and_returns,
    is_zero_variance,
    token_rewards,
    turn_credit,
)
from isobit.algorithms.objective import Columns
from isobit.algorithms.registry import build_algorithm
from isobit.config.algorithm import (
    CispoConfig,
    DrGrpoConfig,
    GrpoConfig,
    ReinforcePpBaselineConfig,
    ReinforcePpConfig,
    RlooConfig,
)
from isobit.records.packing import lay_end_to_end
from isobit.records.sequence import TokenSequence
from isobit.records.text import Completion, Group
from tests.sequences import group_of
from tests.suites import examples

BY_TURN = [GrpoConfig(), DrGrpoConfig(), RlooConfig(), CispoConfig(), ReinforcePpBaselineConfig()]
NUMBERS = st.sampled_from([0.0, 0.0, 1.0, 0.25, -0.7])
Turn = tuple[int, float, float]
"""Its tokens, its reward, and the penalty at each of its tokens."""
TURNS = st.lists(st.tuples(st.integers(1, 3), NUMBERS, NUMBERS), min_size=1, max_size=4)
EPISODES = st.tuples(TURNS, st.one_of(st.none(), NUMBERS))
STEPS = st.lists(st.lists(EPISODES, min_size=1, max_size=4), min_size=1, max_size=3)
Played = list[list[tuple[list[Turn], float | None]]]


def episode(turns: Sequence[Turn], columns: bool = True) -> Completion:
    """Turns with two tokens of results between them."""
    ids, given, rewards, penalties = list[int](), list[tuple[int, int]](), list[float](), []
    for place, (length, reward, penalty) in enumerate(turns):
        if place:
            given.append((1 + len(ids), 3 + len(ids)))
            ids += [9, 9]
        ids += [7] * length
        rewards += [0.0] * (length - 1) + [reward]
        penalties += [penalty] * length
    sequence = TokenSequence.of_answer([5], ids, given=given)
    if columns:
        sequence = sequence.with_columns(turn_rewards=rewards, kl_penalties=penalties)
    return Completion(sequence, "", "stop")


def groups_of(played: Played) -> list[Group]:
    return [
        group_of([episode(turns) for turns, _ in group], [reward for _, reward in group])
        for group in played
    ]


def by_turn(config: Any, groups: Sequence[Group], gamma: float) -> list[list[Columns | None]]:
    return turn_credit(groups, build_algorithm(config, 8).credit, gamma)


def tokens_of(groups: Sequence[Group], credit: Sequence[Sequence[Columns | None]]) -> list[Any]:
    """The whole column of each completion, by group; None for one that is left out."""
    return [
        [
            None if columns is None else one.sequence.with_columns(**columns).advantages.tolist()
            for one, columns in zip(group.completions, found, strict=True)
        ]
        for group, found in zip(groups, credit, strict=True)
    ]


def return_from(turns: Sequence[Turn], reward: float, turn: int, gamma: float) -> float:
    """The double sum, from a turn that the episode has, or from its last."""
    begin = min(turn, len(turns) - 1)
    return sum(
        gamma ** (k - begin)
        * (turns[k][1] - turns[k][0] * turns[k][2] + (reward if k == len(turns) - 1 else 0.0))
        for k in range(begin, len(turns))
    )


def slow(config: Any, played: Played, gamma: float) -> list[Any]:
    """What ``by_turn`` is to give, token by token of the whole sequence."""
    made: list[Any] = []
    for group in played:
        rows: list[Any] = []
        for turns, reward in group:
            valid = [(t, r) for t, r in group if r is not None]
            if reward is None or len(valid) < 2:
                rows.append(None)
                continue
            row = [0.0]
            for number, (length, _, _) in enumerate(turns):
                all_returns = [return_from(t, r, number, gamma) for t, r in valid]
                advantage = return_from(turns, reward, number, gamma) - fmean(all_returns)
                if config.name == "rloo":
                    advantage *= len(valid) / (len(valid) - 1)
                elif config.name in ("grpo", "cispo"):
                    advantage /= stdev(all_returns) + STD_EPSILON
                elif config.name == "reinforce_pp_baseline":
                    advantage /= step_deviation(played, number, gamma)
                row += [0.0, 0.0] * bool(number) + [advantage] * length
            rows.append(row)
        made.append(rows)
    return made


def step_deviation(played: Played, turn: int, gamma: float) -> float:
    centred = list[float]()
    for group in played:
        found = [return_from(t, r, turn, gamma) for t, r in group if r is not None]
        centred += [one - fmean(found) for one in found] if len(found) > 1 else []
    return stdev(centred) + STD_EPSILON


@pytest.mark.parametrize("config", BY_TURN, ids=lambda config: config.name)
@settings(max_examples=examples(30))
@given(played=STEPS, gamma=st.sampled_from([1.0, 0.5, 0.0]))
def test_turns_agree_with_the_slow_definition(config: Any, played: Played, gamma: float) -> None:
    groups = groups_of(played)
    found = tokens_of(groups, by_turn(config, groups, gamma))
    for rows, expected in zip(found, slow(config, played, gamma), strict=True):
        for row, one in zip(rows, expected, strict=True):
            assert (row is None) == (one is None)
            # returns that are equal but for rounding stand apart by far less than the epsilon
            assert row is None or row == pytest.approx(one, rel=1e-5, abs=1e-5)


@pytest.mark.parametrize("config", BY_TURN, ids=lambda config: config.name)
@settings(max_examples=examples(20))
@given(played=STEPS)
def test_a_reward_at_the_end_alone_gives_every_turn_the_bits_of_the_episode(
    config: Any, played: Played
) -> None:
    """Also where the episodes of a group have different numbers of turns, or one turn."""
    groups = [
        group_of([episode(turns, columns=False) for turns, _ in group], [r for _, r in group])
        for group in played
    ]
    found, whole = by_turn(config, groups, 1.0), build_algorithm(config, 8).credit(groups)
    assert found == whole
    packed = [
        lay_end_to_end(
            [
                one.sequence.with_columns(**columns)
                for group, rows in zip(groups, credit, strict=True)
                for one, columns in zip(group.completions, rows, strict=True)
                if columns is not None
            ]
            or [groups[0].completions[0].sequence]
        )
        for credit in (found, whole)
    ]
    assert torch.equal(packed[0].advantages, packed[1].advantages)


def test_a_discount_counts_turns_behind_and_no_tokens() -> None:
    groups = groups_of([[([(3, 0.0, 0.0), (1, 0.0, 0.0)], 1.0), ([(1, 0.0, 0.0)], 0.0)]])
    (rows,) = tokens_of(groups, by_turn(DrGrpoConfig(), groups, 0.5))
    assert rows == [[0.0, 0.25, 0.25, 0.25, 0.0, 0.0, 0.5], [0.0, -0.25]]


def test_equal_returns_are_exactly_level_in_whatever_order_rewards_came() -> None:
    orders = [(0.1, 0.2, 0.3), (0.3, 0.2, 0.1)]
    turns: list[list[Turn]] = [[(1, reward, 0.0) for reward in order] for order in orders]
    groups = groups_of([[(one, 0.0) for one in turns]])
    for rows in tokens_of(groups, by_turn(GrpoConfig(), groups, 1.0))[0]:
        assert rows[1] == 0.0
        assert 0.0 not in (rows[4], rows[7])


@settings(max_examples=examples(20))
@given(played=STEPS, seed=st.randoms(use_true_random=False))
def test_the_order_of_a_group_does_not_matter(played: Played, seed: Any) -> None:
    groups = groups_of(played)
    orders = [seed.sample(range(len(one.rewards)), len(one.rewards)) for one in groups]
    moved = [
        replace(
            one,
            completions=[one.completions[i] for i in order],
            rewards=[one.rewards[i] for i in order],
        )
        for one, order in zip(groups, orders, strict=True)
    ]
    found, again = (by_turn(GrpoConfig(), some, 0.9) for some in (groups, moved))
    assert again == [[rows[i] for i in order] for rows, order in zip(found, orders, strict=True)]


@pytest.mark.parametrize("config", BY_TURN, ids=lambda config: config.name)
def test_rewards_of_turns_are_part_of_an_episodes_return(config: Any) -> None:
    turns: list[list[Turn]] = [[(2, 0.5, 0.0), (1, 0.25, 0.0)], [(1, 0.0, 0.0)], [(1, -1.0, 0.0)]]
    given, whole = group_of(list(map(episode, turns)), [1.0, 0.0, 0.5]), [1.75, 0.0, -0.5]
    plain = group_of([episode(one, columns=False) for one in turns], whole)
    algorithm = build_algorithm(config, 8)
    assert algorithm.credit([given]) == algorithm.credit([plain])


def test_tokens_with_returns_of_their_own_have_a_turns_reward_at_its_last() -> None:
    sequence = episode([(2, 0.5, 0.125), (1, -1.0, 0.0)]).sequence
    rewards = token_rewards(sequence, 2.0)
    assert rewards == [-0.125, 0.375, 1.0]
    advantages, _ = advantages_and_returns(rewards, [0.0] * 3, 0.5, 1.0)
    assert advantages == [-0.125 + 0.5 * (0.375 + 0.5), 0.375 + 0.5, 1.0]
    config = ReinforcePpConfig(gamma=0.5)
    group = group_of([Completion(sequence, "", "stop")], [2.0])
    ((found,),) = build_algorithm(config, 8).credit([group])
    assert found is not None
    scale = stdev(advantages) + STD_EPSILON
    assert found["advantages"] == pytest.approx(
        [(one - fmean(advantages)) / scale for one in advantages]
    )


def test_a_group_is_level_where_all_returns_are_equal() -> None:
    longer: list[Turn] = [(1, 0.0, 0.5), (1, 0.0, 0.0)]
    shorter: list[Turn] = [(1, 0.0, 0.0)]
    (group,) = groups_of([[(longer, 1.0), (shorter, 1.0), (shorter, None)]])
    assert is_zero_variance(group)
    assert is_zero_variance(group, 1.0)
    assert not is_zero_variance(group, 0.5)
    (group,) = groups_of([[([(1, 0.1, 0.0), (1, 0.2, 0.0)], 0.0), (shorter, 0.3)]])
    assert is_zero_variance(group) and not is_zero_variance(group, 1.0), (
        "0.2 from the second turn on"
    )
    early: list[Turn] = [(1, 1.0, 0.0), (1, 0.0, 0.0)]
    (group,) = groups_of([[(early, 0.0), (shorter, 1.0)]])
    assert is_zero_variance(group)
    assert not is_zero_variance(group, 1.0), (
        "an episode that has ended counts with what its last turn got"
    )
    assert tokens_of([group], by_turn(DrGrpoConfig(), [group], 1.0)) == [
        [[0.0, 0.0, 0.0, 0.0, -0.5], [0.0, 0.0]]
    ]
