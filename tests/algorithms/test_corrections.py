"""Corrections: by hand, nothing on-policy, and what must not matter."""

import math
from typing import Any, get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from isobit.algorithms.corrections import correction_weights
from isobit.algorithms.sample_size import effective_sample_size
from isobit.config.corrections import (
    Correction,
    IcePopCorrection,
    K3Correction,
    MisCorrection,
    NormaliseCorrection,
    TisCorrection,
)
from tests.suites import examples

SEQUENCE = torch.tensor([0, 0, 0, 1, 1, 2])
RHO = [1.5, 0.5, 4.0, 1.0, 1.001, 0.1]
LOG_RHO = torch.tensor(RHO, dtype=torch.float64).log()
PRODUCTS = [3.0, 3.0, 3.0, 1.001, 1.001, 0.1]
EVERY: list[Any] = [
    kind(**keys)
    for kind in get_args(get_args(Correction)[0])
    for keys in (
        [{"level": level} for level in get_args(kind.model_fields["level"].annotation)]
        if "level" in kind.model_fields
        else [{}]
    )
]


def divergence(rho: float) -> float:
    return rho - 1 - math.log(rho)


BY_HAND: list[tuple[Any, list[float]]] = [
    (TisCorrection(), [1.5, 0.5, 2.0, 1.0, 1.001, 0.1]),
    (TisCorrection(max=1.2, min=0.4), [1.2, 0.5, 1.2, 1.0, 1.001, 0.4]),
    (TisCorrection(level="sequence"), [2.0, 2.0, 2.0, 1.001, 1.001, 0.1]),
    (MisCorrection(), [1.5, 0.5, 0.0, 1.0, 1.001, 0.1]),
    (MisCorrection(level="sequence"), [0.0, 0.0, 0.0, 1.001, 1.001, 0.1]),
    (MisCorrection(level="sequence", min=0.2, max=5), [3.0, 3.0, 3.0, 1.001, 1.001, 0.0]),
    (MisCorrection(level="geometric"), [0.0, 0.0, 0.0, 1.0, 1.0, 0.0]),
    (MisCorrection(level="geometric", max=1.5), [1.0, 1.0, 1.0, 1.0, 1.0, 0.0]),
    (IcePopCorrection(), [1.5, 0.5, 4.0, 1.0, 1.001, 0.0]),
    (IcePopCorrection(max=2.0), [1.5, 0.5, 0.0, 1.0, 1.001, 0.0]),
    (K3Correction(level="token", max=0.2), [1.0, 1.0, 0.0, 1.0, 1.0, 0.0]),
    (K3Correction(max=0.7), [1.0, 1.0, 1.0, 1.0, 1.0, 0.0]),
    (K3Correction(max=0.6), [0.0, 0.0, 0.0, 1.0, 1.0, 0.0]),
    (NormaliseCorrection(), [1.0] * 6),
]


@pytest.mark.parametrize(("correction", "expected"), BY_HAND, ids=str)
def test_weights_by_hand(correction: Any, expected: list[float]) -> None:
    found = correction_weights([correction], LOG_RHO, SEQUENCE)
    assert found.dtype == torch.float32
    assert found.tolist() == pytest.approx(expected, rel=1e-6)


SEQUENCE_WEIGHTS: list[tuple[list[Any], list[float]]] = [
    ([TisCorrection(level="sequence")], [2.0, 1.001, 0.1]),
    ([MisCorrection(level="sequence", max=5)], [3.0, 1.001, 0.1]),
    ([MisCorrection(level="geometric", max=1.5)], [1.0, 1.0, 0.0]),
    ([TisCorrection(level="sequence"), K3Correction(max=0.7)], [2.0, 1.001, 0.0]),
]


@pytest.mark.parametrize(("corrections", "weights"), SEQUENCE_WEIGHTS, ids=str)
def test_weights_of_sequences_are_normalised_over_sequences(
    corrections: list[Any], weights: list[float]
) -> None:
    """The self-normalised estimator: w_s / mean over the S sequences, whatever their lengths.  Seen
    before: over tokens, which is another by the factor of long sequences' weight.
    """
    found = correction_weights([*corrections, NormaliseCorrection()], LOG_RHO, SEQUENCE)
    mean = sum(weights) / 3
    assert found.tolist() == pytest.approx([weights[s] / mean for s in SEQUENCE], rel=1e-6)


def test_weights_of_tokens_are_normalised_over_tokens() -> None:
    by_token = [TisCorrection(), MisCorrection(level="geometric", max=1.5)]
    found = correction_weights([*by_token, NormaliseCorrection()], LOG_RHO, SEQUENCE)
    weights = torch.tensor([1.5, 0.5, 2.0, 1.0, 1.001, 0.0])
    assert found.tolist() == pytest.approx((weights / weights.mean()).tolist(), rel=1e-6)


def test_the_divergences_that_are_rejected_are_those_of_the_definition() -> None:
    assert divergence(0.5) < 0.2 < divergence(4.0)
    assert 0.6 < sum(map(divergence, RHO[:3])) / 3 < 0.7


@pytest.mark.parametrize("correction", EVERY, ids=str)
def test_on_policy_every_weight_is_exactly_one(correction: Any) -> None:
    found = correction_weights([correction], torch.zeros(6), SEQUENCE)
    assert torch.equal(found, torch.ones(6))


def test_on_policy_all_together_are_exactly_one() -> None:
    found = correction_weights([*EVERY, NormaliseCorrection()], torch.zeros(6), SEQUENCE)
    assert torch.equal(found, torch.ones(6))


def test_weights_are_multiplied_and_normalised_last() -> None:
    corrections = [TisCorrection(), MisCorrection(level="geometric", max=1.5)]
    found = correction_weights([*corrections, NormaliseCorrection()], LOG_RHO, SEQUENCE)
    product = torch.tensor([1.5, 0.5, 2.0, 1.0, 1.001, 0.0], dtype=torch.float64)
    torch.testing.assert_close(found, (product / product.mean()).float())
    assert float(found.double().mean()) == pytest.approx(1.0)


def test_where_all_is_rejected_nothing_is_divided_by() -> None:
    rejected = [K3Correction(max=1e-9), NormaliseCorrection()]
    assert correction_weights(rejected, torch.ones(6), SEQUENCE).tolist() == [0.0] * 6


@pytest.mark.parametrize("correction", EVERY, ids=str)
def test_no_ratio_is_too_large(correction: Any) -> None:
    for extreme in (1e4, -1e4):
        found = correction_weights([correction], torch.full([6], extreme), SEQUENCE)
        assert torch.isfinite(found).all()


def test_a_log_ratio_counts_for_no_more_than_its_bound() -> None:
    large = torch.full([6], 50.0)
    for level in ("token", "sequence"):
        correction = TisCorrection.model_construct(level=level, max=1e12)
        found = correction_weights([correction], large, SEQUENCE)
        assert found.tolist() == pytest.approx([math.exp(20)] * 6, rel=1e-6)


@pytest.mark.parametrize("correction", EVERY, ids=str)
@settings(max_examples=examples(20))
@given(order=st.permutations(range(3)), log_rho=st.lists(st.floats(-3, 3), min_size=6, max_size=6))
def test_the_order_of_sequences_does_not_matter(
    correction: Any, order: list[int], log_rho: list[float]
) -> None:
    values = torch.tensor(log_rho)
    rows = torch.cat([SEQUENCE.eq(one).nonzero()[:, 0] for one in order])
    numbers = torch.tensor([order.index(int(one)) for one in SEQUENCE])[rows]
    moved = correction_weights([correction], values[rows], numbers)
    assert torch.equal(moved, correction_weights([correction], values, SEQUENCE)[rows])


@settings(max_examples=examples(30))
@given(st.lists(st.floats(0.01, 10), min_size=1, max_size=9), st.floats(0.1, 5))
def test_the_effective_sample_size_is_a_share_that_no_scale_changes(
    weights: list[float], scale: float
) -> None:
    found = effective_sample_size(torch.tensor(weights))
    assert 1 / len(weights) - 1e-6 <= found <= 1 + 1e-6
    assert effective_sample_size(scale * torch.tensor(weights)) == pytest.approx(found, rel=1e-5)


def test_effective_sample_sizes_by_hand() -> None:
    assert effective_sample_size(torch.ones(7)) == 1.0
    assert effective_sample_size(torch.tensor([1.0, 0.0, 0.0, 0.0])) == 0.25
    assert effective_sample_size(torch.tensor([3.0, 1.0])) == pytest.approx(16 / 20)
    assert effective_sample_size(torch.zeros(4)) == 0.0
