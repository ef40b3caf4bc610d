"""The effective sample size: against its formula, exactly 1 on-policy, and whatever the cut."""

import math
from collections.abc import Sequence
from dataclasses import replace
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from isobit.algorithms.corrections import LARGEST_LOG_RATIO
from isobit.algorithms.objective import LossOutputs
from isobit.algorithms.registry import build_algorithm
from isobit.algorithms.sample_size import ratio_sums, sample_sizes
from isobit.config.algorithm import CispoConfig, GrpoConfig, GspoConfig, PpoConfig
from tests.algorithms.batches import random_batch
from tests.suites import examples

NAMES = "ratio/effective_sample_size", "ratio/effective_sequences"
Pairs = list[tuple[torch.Tensor, torch.Tensor]]


def random_pairs(seed: int, lengths: Sequence[int], spread: float) -> Pairs:
    """Log-probabilities of each sequence by the policy, and by what drew it."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for length in lengths:
        drawn = torch.rand(length, generator=generator) * -9
        found.append((drawn + spread * torch.randn(length, generator=generator), drawn))
    return found


def sums_of(pairs: Pairs) -> torch.Tensor:
    """Of one micro-batch."""
    lengths = torch.tensor([len(drawn) for _, drawn in pairs])
    sequence = torch.arange(len(pairs)).repeat_interleave(lengths)
    policy, drawn = (torch.cat(column) for column in zip(*pairs, strict=True))
    return ratio_sums(policy, drawn, sequence)


def plain(weights: Sequence[float]) -> float:
    return sum(weights) ** 2 / (len(weights) * sum(weight**2 for weight in weights))


lengths = st.lists(st.integers(1, 40), min_size=1, max_size=12)
seeds = st.integers(0, 2**31)


@settings(max_examples=examples(60), deadline=None)
@given(lengths, seeds, st.sampled_from([0.01, 0.3, 2.0]))
def test_both_are_the_formula(lengths: list[int], seed: int, spread: float) -> None:
    pairs = random_pairs(seed, lengths, spread)
    logs = [(policy - drawn).double().tolist() for policy, drawn in pairs]
    found = sample_sizes([sums_of(pairs)], sum(lengths))
    assert found.keys() == set(NAMES)
    of_tokens = plain([math.exp(log) for of_one in logs for log in of_one])
    of_sequences = plain([math.exp(sum(of_one)) for of_one in logs])
    assert found[NAMES[0]] == pytest.approx(of_tokens, rel=1e-12)
    assert found[NAMES[1]] == pytest.approx(of_sequences, rel=1e-12)
    assert 1 / sum(lengths) <= found[NAMES[0]] <= 1.0
    assert 0.999 / len(lengths) <= found[NAMES[1]] <= 1.0


@settings(max_examples=examples(40), deadline=None)
@given(lengths, seeds, st.randoms(use_true_random=False))
def test_neither_the_cut_nor_the_order_changes_a_bit(
    lengths: list[int], seed: int, random: Random
) -> None:
    pairs = random_pairs(seed, lengths, 0.5)
    expected = sample_sizes([sums_of(pairs)], sum(lengths))
    random.shuffle(pairs)
    size = random.randint(1, len(pairs))
    parts = [pairs[first : first + size] for first in range(0, len(pairs), size)]
    assert sample_sizes(list(map(sums_of, parts)), sum(lengths)) == expected


@given(lengths, seeds)
def test_on_policy_they_are_exactly_1(lengths: list[int], seed: int) -> None:
    pairs = [(drawn, drawn) for _, drawn in random_pairs(seed, lengths, 0.0)]
    assert sample_sizes([sums_of(pairs)], sum(lengths)) == dict.fromkeys(NAMES, 1.0)


def test_a_thousand_tokens_at_the_limit_overflow_nothing() -> None:
    drawn = torch.full((1000,), -100.0)
    pairs = [(torch.zeros(1000), drawn), (drawn, drawn)]
    found = sample_sizes([sums_of(pairs)], 2000)
    assert found[NAMES[1]] == 0.5, "one sequence has all the weight"
    of_tokens = plain([math.exp(LARGEST_LOG_RATIO)] * 1000 + [1.0] * 1000)
    assert found[NAMES[0]] == pytest.approx(of_tokens, rel=1e-12)


def test_there_is_none_without_ratios() -> None:
    assert sample_sizes([], 7) == {}


def sums(outputs: LossOutputs) -> torch.Tensor:
    assert outputs.ratios is not None
    return outputs.ratios


@pytest.mark.parametrize(
    "config", [GrpoConfig(), GrpoConfig(clip="none"), GspoConfig(), CispoConfig(), PpoConfig()]
)
def test_every_loss_reports_its_ratios(config: GrpoConfig) -> None:
    """To the old log-probabilities, and with corrections to the recorded ones."""
    scores, batch = random_batch(5, [3, 1, 4])
    recorded = torch.rand(8, dtype=torch.float64) - 3
    batch = replace(batch, recorded_log_probs=recorded)
    algorithm = build_algorithm(config)
    for given_batch, drawn in (
        (replace(batch, importance=None), batch.old_log_probs),
        (batch, recorded),
    ):
        (shares,) = algorithm.shares([given_batch])
        found = sums(algorithm.loss(scores, given_batch, shares))
        expected = ratio_sums(scores.log_probs.detach(), drawn, batch.sequence)
        assert torch.equal(found, expected)


def test_a_sequence_is_added_up_in_its_order() -> None:
    """Of 9 tokens, alone and as the last of others, where a vector loop cuts it elsewhere."""
    alone, others = random_pairs(3, [9], 0.7), random_pairs(4, [1, 5, 3, 8], 0.7)
    for count in range(5):
        assert torch.equal(sums_of([*others[:count], *alone])[-1:], sums_of(alone))
