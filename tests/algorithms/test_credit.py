"""What is learnt from each completion, by every algorithm: against plain definitions, and what must
not matter.
"""

from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean, stdev
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isobit.algorithms.advantages import STD_EPSILON, advantages_and_returns
from isobit.algorithms.objective import Columns
from isobit.algorithms.registry import build_algorithm
from isobit.config.algorithm import (
    CispoConfig,
    DapoConfig,
    DrGrpoConfig,
    GrpoConfig,
    GspoConfig,
    PpoConfig,
    ReinforcePpBaselineConfig,
    ReinforcePpConfig,
    ReMaxConfig,
    RlooConfig,
)
from isobit.records.text import Group
from tests.sequences import answer_of, group_of
from tests.suites import examples

RELATIVE = [
    GrpoConfig(),
    DrGrpoConfig(),
    DapoConfig(),
    RlooConfig(),
    GspoConfig(),
    CispoConfig(),
    ReinforcePpBaselineConfig(),
]
"""Their advantages are relative to a group."""
SINGLE = [ReMaxConfig(), ReinforcePpConfig(), PpoConfig(gamma=0.9, lam=0.8)]

REWARDS = st.one_of(st.none(), st.sampled_from([0.0, 1.0, 0.1, -0.7, 3.0]))
STEPS = st.lists(st.lists(REWARDS, min_size=1, max_size=5), min_size=1, max_size=4)


def step_of(rewards: Sequence[Sequence[float | None]], shift: float = 0.0) -> list[Group]:
    """Groups with these rewards, each completion of another length and with values."""
    groups = []
    for number, group in enumerate(rewards):
        completions = []
        for index in range(len(group)):
            length = 1 + (number + 2 * index) % 4
            values = [0.3 * token - 0.1 * index for token in range(length)]
            completions.append(answer_of(length, values=values))
        shifted = [None if reward is None else reward + shift for reward in group]
        groups.append(group_of(completions, shifted, 0.25 + shift))
    return groups


def chosen(group: Group, indices: Sequence[int]) -> Group:
    """With these completions, in this order."""
    completions = [group.completions[index] for index in indices]
    return replace(
        group, completions=completions, rewards=[group.rewards[index] for index in indices]
    )


def credit(config: Any, groups: Sequence[Group]) -> list[list[Columns | None]]:
    return build_algorithm(config, 8).credit(groups)


def flat(credits: Sequence[Sequence[Columns | None]]) -> list[float | None]:
    """All advantages in order, a token or a completion each."""
    found: list[float | None] = []
    for one in (one for group in credits for one in group):
        advantages = None if one is None else one["advantages"]
        found += advantages if isinstance(advantages, Sequence) else [advantages]
    return found


@pytest.mark.parametrize("config", RELATIVE + SINGLE[:2], ids=lambda config: config.name)
@pytest.mark.parametrize("reward", [0.0, 0.1, -3.7, 1e9])
def test_equal_rewards_give_exactly_zero(config: Any, reward: float) -> None:
    groups = [replace(group, baseline=reward) for group in step_of([[reward] * 8, [reward] * 3])]
    found = flat(credit(config, groups))
    assert found == [0.0] * len(found)


def test_ppo_gives_exactly_zero_where_values_foretell_equal_rewards() -> None:
    completions = [answer_of(length, values=[0.75] * length) for length in (3, 1, 4)]
    groups = [group_of(completions, [0.75] * 3)]
    assert flat(credit(PpoConfig(), groups)) == [0.0] * 8


@pytest.mark.parametrize("config", RELATIVE, ids=lambda config: config.name)
def test_a_level_group_beside_others_stays_exactly_zero(config: Any) -> None:
    (level, other) = credit(config, step_of([[0.1] * 7, [0.0, 1.0, 1.0]]))
    assert level == [{"advantages": 0.0}] * 7
    assert all(one is not None and one["advantages"] != 0 for one in other)


@pytest.mark.parametrize("config", RELATIVE + SINGLE, ids=lambda config: config.name)
@settings(max_examples=examples(20))
@given(rewards=STEPS)
def test_completions_without_reward_are_left_out_and_touch_no_other(
    config: Any, rewards: list[list[float | None]]
) -> None:
    groups = step_of(rewards)
    found = credit(config, groups)
    without = [
        chosen(group, [i for i, reward in enumerate(group.rewards) if reward is not None])
        for group in groups
    ]
    assert [[one for one in group if one is not None] for group in found] == [
        [one for one in group if one is not None] for group in credit(config, without)
    ]
    for group, credits in zip(groups, found, strict=True):
        for reward, given_credit in zip(group.rewards, credits, strict=True):
            assert given_credit is None or reward is not None


@pytest.mark.parametrize("config", RELATIVE + SINGLE, ids=lambda config: config.name)
@settings(max_examples=examples(20))
@given(rewards=STEPS, seed=st.randoms(use_true_random=False))
def test_the_order_of_groups_and_samples_does_not_matter(
    config: Any, rewards: list[list[float | None]], seed: Any
) -> None:
    groups = step_of(rewards)
    found = credit(config, groups)
    places = [(g, s) for g, group in enumerate(groups) for s in range(len(group.rewards))]
    order = {
        g: seed.sample(range(len(group.rewards)), len(group.rewards))
        for g, group in enumerate(groups)
    }
    shuffled = seed.sample(range(len(groups)), len(groups))
    moved = credit(config, [chosen(groups[g], order[g]) for g in shuffled])
    for g, s in places:
        assert moved[shuffled.index(g)][order[g].index(s)] == found[g][s]


@pytest.mark.parametrize("config", [*RELATIVE, *SINGLE[:2]], ids=lambda config: config.name)
@settings(max_examples=examples(20))
@given(rewards=STEPS)
def test_a_shift_of_all_rewards_does_not_matter(
    config: Any, rewards: list[list[float | None]]
) -> None:
    found, shifted = (flat(credit(config, step_of(rewards, shift))) for shift in (0.0, 5.0))
    assert [one is None for one in found] == [one is None for one in shifted]
    values = [one for one in found if one is not None]
    assert [one for one in shifted if one is not None] == pytest.approx(values, rel=1e-6, abs=1e-6)


@pytest.mark.parametrize(
    "config",
    [GrpoConfig(), DapoConfig(), ReinforcePpConfig(), ReinforcePpBaselineConfig()],
    ids=lambda config: config.name,
)
def test_a_scale_of_all_rewards_does_not_matter_where_advantages_are_normalised(
    config: Any,
) -> None:
    rewards = [[0.0, 1.0, 0.5], [1.0, 2.0]]
    scaled = [[7 * one for one in group] for group in rewards]
    plain = flat(credit(config, step_of(rewards)))
    assert flat(credit(config, step_of(scaled))) == pytest.approx(plain, rel=1e-4)


@given(st.lists(st.floats(-3, 3), min_size=2, max_size=8))
def test_rloo_compares_with_the_mean_of_the_others(rewards: list[float]) -> None:
    (found,) = credit(RlooConfig(), step_of([rewards]))
    for index, one in enumerate(found):
        others = rewards[:index] + rewards[index + 1 :]
        assert one is not None
        assert one["advantages"] == pytest.approx(rewards[index] - fmean(others), abs=1e-12)


def test_remax_compares_with_the_greedy_completion_and_needs_one() -> None:
    graded = group_of([answer_of(2)] * 3, [1.0, None, 0.25], 0.25)
    failed = group_of([answer_of(2)], [1.0], None)
    assert credit(ReMaxConfig(), [graded, failed]) == [
        [{"advantages": 0.75}, None, {"advantages": 0.0}],
        [None],
    ]


def test_reinforce_pp_normalises_the_returns_of_all_tokens() -> None:
    groups = [
        group_of([answer_of(2, kl_penalties=(0.125, 0.25))], [1.0]),
        group_of([answer_of(1), answer_of(0), answer_of(3)], [-1.0, 2.0, None]),
    ]
    found = credit(ReinforcePpConfig(gamma=0.5), groups)
    returns = [-0.125 + 0.5 * 0.75, 0.75, -1.0]
    scale = stdev(returns) + STD_EPSILON
    expected = pytest.approx([(one - fmean(returns)) / scale for one in returns])
    assert [one is None for one in found[1]] == [False, True, True], "no tokens, no reward"
    assert flat(found)[:3] == expected


def test_reinforce_pp_baseline_divides_by_one_deviation_of_the_step() -> None:
    found = flat(credit(ReinforcePpBaselineConfig(), step_of([[0.0, 1.0], [0.0, 4.0]])))
    centred = [-0.5, 0.5, -2.0, 2.0]
    assert found == pytest.approx([one / (stdev(centred) + STD_EPSILON) for one in centred])


@pytest.mark.parametrize("config", [*RELATIVE, SINGLE[0]], ids=lambda config: config.name)
def test_penalties_are_taken_from_the_reward_of_a_completion(config: Any) -> None:
    rewards, penalties = [1.0, 0.0, 1.0], [(0.125, 0.375), (0.0,), (0.25,)]
    taken = [answer_of(len(kl), kl_penalties=kl) for kl in penalties]
    less = [reward - sum(kl) for reward, kl in zip(rewards, penalties, strict=True)]
    groups = group_of(taken, rewards, 0.5), group_of([answer_of(1)] * 3, less, 0.5)
    found, expected = (flat(credit(config, [group])) for group in groups)
    assert found == pytest.approx(expected, rel=1e-12)


def naive_gae(rewards: list[float], values: list[float], gamma: float, lam: float) -> list[float]:
    """The double sum: discounted errors of one step, from each token on."""
    following = [*values[1:], 0.0]
    return [
        sum(
            (gamma * lam) ** (k - t) * (rewards[k] + gamma * following[k] - values[k])
            for k in range(t, len(rewards))
        )
        for t in range(len(rewards))
    ]


NUMBERS = st.floats(-3, 3)


@given(
    st.lists(st.tuples(NUMBERS, NUMBERS), min_size=1, max_size=9),
    st.floats(0, 1),
    st.floats(0, 1),
)
def test_gae_agrees_with_the_double_sum(
    pairs: list[tuple[float, float]], gamma: float, lam: float
) -> None:
    rewards, values = map(list, zip(*pairs, strict=True))
    advantages, returns = advantages_and_returns(rewards, values, gamma, lam)
    expected = naive_gae(rewards, values, gamma, lam)
    assert advantages == pytest.approx(expected, abs=1e-9)
    assert returns == pytest.approx(
        [a + v for a, v in zip(expected, values, strict=True)], abs=1e-9
    )


def test_ppo_whitens_the_advantages_of_the_step_and_keeps_the_returns() -> None:
    kl, values = (0.125, 0.0), [(0.5, 0.25), (0.125, 0.375, -0.25), (0.0,)]
    groups = [
        group_of([answer_of(2, kl_penalties=kl, values=values[0])], [1.0]),
        group_of([answer_of(len(v), values=v) for v in values[1:]], [0.0, None]),
    ]
    found = credit(PpoConfig(gamma=0.9, lam=0.7), groups)
    first = naive_gae([-0.125, 1.0], [0.5, 0.25], 0.9, 0.7)
    second = naive_gae([0.0, 0.0, 0.0], [0.125, 0.375, -0.25], 0.9, 0.7)
    plain = first + second
    scale = stdev(plain) + STD_EPSILON
    assert flat(found)[:5] == pytest.approx([(a - fmean(plain)) / scale for a in plain])
    assert found[1][1] is None
    (one,), (two, _) = found
    assert one is not None
    assert two is not None
    assert one["returns"] == pytest.approx([first[0] + 0.5, first[1] + 0.25])
    expected = [second[0] + 0.125, second[1] + 0.375, second[2] - 0.25]
    assert two["returns"] == pytest.approx(expected)
