"""Weights of tokens: they sum to one over a step, and no cut into micro-batches changes them."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from isobit.algorithms.mean import mean_weights, sequence_mean_weights, token_mean_weights
from isobit.errors import ConfigError

counts_of_microbatches = st.lists(
    st.lists(st.integers(0, 9), min_size=1, max_size=6), min_size=1, max_size=5
).filter(lambda batches: any(map(any, batches)))


def sequences(counts: list[list[int]]) -> list[torch.Tensor]:
    return [torch.arange(len(batch)).repeat_interleave(torch.tensor(batch)) for batch in counts]


@given(counts_of_microbatches, st.sampled_from(["token", "sequence"]))
def test_weights_of_a_step_sum_to_one(counts: list[list[int]], mean: str) -> None:
    weights = mean_weights(mean, sequences(counts))  # pyright: ignore[reportArgumentType]
    assert [weight.numel() for weight in weights] == [sum(batch) for batch in counts]
    assert float(torch.cat(weights).double().sum()) == pytest.approx(1.0, rel=1e-6)


@given(counts_of_microbatches, st.sampled_from(["token", "sequence", "constant"]))
def test_weights_do_not_depend_on_the_cut(counts: list[list[int]], mean: str) -> None:
    joined = [[count for batch in counts for count in batch]]
    cut = mean_weights(mean, sequences(counts), 7)  # pyright: ignore[reportArgumentType]
    (whole,) = mean_weights(mean, sequences(joined), 7)  # pyright: ignore[reportArgumentType]
    assert torch.equal(torch.cat(cut), whole)


def test_token_mean_weighs_tokens_equally_and_sequence_mean_answers() -> None:
    cut = sequences([[1, 3], [4]])
    assert [weight.tolist() for weight in token_mean_weights(cut)] == [[0.125] * 4, [0.125] * 4]
    third = float(torch.tensor(1 / 3))
    ninth, twelfth = float(torch.tensor(1 / 9)), float(torch.tensor(1 / 12))
    assert [weight.tolist() for weight in sequence_mean_weights(cut)] == [
        [third, ninth, ninth, ninth],
        [twelfth] * 4,
    ]


def test_a_constant_weighs_every_token_alike_whatever_the_lengths() -> None:
    weights = mean_weights("constant", sequences([[1, 3], [4, 0]]), 100)
    assert [weight.tolist() for weight in weights] == [[float(torch.tensor(1 / 300))] * 4] * 2


def test_a_mean_by_a_constant_needs_one() -> None:
    with pytest.raises(ConfigError, match=r"algorithm\.loss_constant is not set"):
        mean_weights("constant", sequences([[1]]))
