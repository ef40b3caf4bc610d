"""Bounds for FP8's ratios that cut off what BF16's would."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from isobit.algorithms.policy_gradient import ClipBounds
from isobit.training.calibration import calibrated_bounds
from tests.suites import examples

CONFIGURED = ClipBounds(0.2, 0.28)
PAIRS = st.lists(
    st.tuples(st.floats(-1, 1), st.sampled_from([-2.0, -0.5, 0.0, 1.0, 1.5])), max_size=30
)


def logs(ratios: list[float]) -> torch.Tensor:
    return torch.tensor(ratios, dtype=torch.float64).log()


def contributions(
    log_ratios: torch.Tensor, advantages: torch.Tensor, bounds: ClipBounds
) -> tuple[float, float]:
    """Positive and negative, of the tokens that the bounds leave."""
    positive = negative = 0.0
    for log_ratio, advantage in zip(log_ratios.tolist(), advantages.tolist(), strict=True):
        ratio = math.exp(log_ratio)
        if advantage > 0 and ratio <= 1 + bounds.clip_high:
            positive += ratio * advantage
        if advantage < 0 and ratio > 1 - bounds.clip_low:
            negative -= ratio * advantage
    return positive, negative


@settings(max_examples=examples(50))
@given(PAIRS)
def test_equal_ratios_keep_the_bounds(pairs: list[tuple[float, float]]) -> None:
    log_ratios = torch.tensor([log_ratio for log_ratio, _ in pairs], dtype=torch.float64)
    advantages = torch.tensor([advantage for _, advantage in pairs])
    found = calibrated_bounds(log_ratios, log_ratios.clone(), advantages, CONFIGURED)
    assert found == CONFIGURED


def test_on_policy_the_bounds_stand() -> None:
    zeros, advantages = torch.zeros(4), torch.tensor([1.0, -1.0, 1.0, -1.0])
    assert calibrated_bounds(zeros, zeros, advantages, CONFIGURED) == CONFIGURED


def test_bounds_by_hand() -> None:
    advantages = torch.tensor([-1.0] * 4 + [2.0] * 4)
    shadow = logs([0.7, 0.9, 1.0, 1.1, 0.9, 1.0, 1.1, 1.4])  # cut off: 0.7 and 1.4
    noisy = logs([0.5, 0.6, 1.0, 1.3, 0.8, 1.2, 1.5, 1.7])  # would be: 0.5, 0.6 and 1.5, 1.7
    found = calibrated_bounds(noisy, shadow, advantages, CONFIGURED)
    assert 1 - found.clip_low == pytest.approx(0.55), "one of four, between 0.5 and 0.6"
    # the shadow's balance: 2 (0.9 + 1.0 + 1.1) / (0.9 + 1.0 + 1.1) = 2; the noisy tokens give
    # 0.6 + 1.0 + 1.3 = 2.9 below, so 5.8 above: 2 (0.8 + 1.2) = 4 is too little, with 1.5 it is 7
    assert 1 + found.clip_high == pytest.approx(1.6), "between 1.5 and 1.7"
    fewer = logs([0.5, 0.6, 0.61, 0.7, 0.8, 1.1, 1.2, 1.7])
    # 0.6 + 0.61 + 0.7 = 1.91 below, so 3.82 above: 2 (0.8 + 1.1) = 3.8 is too little, with 1.2 it
    # is 6.2, and 1.28 lies before 1.7
    assert calibrated_bounds(fewer, shadow, advantages, CONFIGURED).clip_high == 0.28
    less = logs([0.5, 0.6, 0.61, 0.68, 0.8, 1.1, 1.2, 1.7])  # 1.89, so 3.78: 1.1 is enough
    found = calibrated_bounds(less, shadow, advantages, CONFIGURED)
    assert 1 + found.clip_high == pytest.approx(1.15), "between 1.1 and 1.2"


@settings(max_examples=examples(50))
@given(PAIRS, st.lists(st.floats(-0.5, 0.5), min_size=30, max_size=30))
def test_as_many_are_cut_off_below_and_the_balance_is_reached(
    pairs: list[tuple[float, float]], noise: list[float]
) -> None:
    shadow = torch.tensor([log_ratio for log_ratio, _ in pairs], dtype=torch.float64)
    advantages = torch.tensor([advantage for _, advantage in pairs])
    noisy = shadow + torch.tensor(noise[: len(pairs)], dtype=torch.float64)
    found = calibrated_bounds(noisy, shadow, advantages, CONFIGURED)
    assert 0 <= found.clip_low <= 1
    assert found.clip_high >= 0
    negative = advantages < 0
    cut = (shadow[negative].exp() <= 0.8).sum()
    if found.clip_low > 0:
        assert (noisy[negative].exp() <= 1 - found.clip_low).sum() == cut
    (high, low), (shadow_high, shadow_low) = (
        contributions(noisy, advantages, found),
        contributions(shadow, advantages, CONFIGURED),
    )
    everything = contributions(noisy, advantages, ClipBounds(1.0, math.inf))[0]
    if low and shadow_low and found.clip_low > 0 and high < everything:
        assert high / low >= shadow_high / shadow_low - 1e-9


def test_without_anything_to_go_by_the_bounds_stand() -> None:
    noisy, shadow = logs([0.5, 1.6]), logs([0.9, 1.1])
    for advantages in ([1.0, 1.0], [0.0, 0.0]):
        found = calibrated_bounds(noisy, shadow, torch.tensor(advantages), CONFIGURED)
        assert found == CONFIGURED
    found = calibrated_bounds(noisy, shadow, torch.tensor([-1.0, -1.0]), CONFIGURED)
    assert found.clip_high == 0.28
    assert 1 - found.clip_low < 0.5
