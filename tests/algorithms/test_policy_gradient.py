"""KL estimators: expectations over a small categorical distribution, value and gradient, computed
exactly.

Weights of tokens: they sum to one over a step, and no cut into micro-batches changes them.
"""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from isobit.algorithms.policy_gradient import (
    k1,
    k2,
    k3,
    mean_weights,
    sequence_mean_weights,
    token_kl,
    token_mean_weights,
)
from isobit.util.errors import ConfigError

LOGITS = torch.tensor([0.3, -1.2, 0.8, 0.1, -0.4], dtype=torch.float64)
REFERENCE = torch.log_softmax(torch.tensor([0.1, -0.9, 1.1, -0.2, 0.0], dtype=torch.float64), 0)


def kl(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """KL(p || q) of log-probabilities."""
    return (p.exp() * (p - q)).sum()


def expected_gradient(
    estimator: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """Gradient by the logits of the estimator's mean under samples whose probabilities are held
    fixed, as a loss sees it.
    """
    logits = LOGITS.clone().requires_grad_()
    log_probs = torch.log_softmax(logits, 0)
    (log_probs.detach().exp() * estimator(log_probs, REFERENCE)).sum().backward()
    assert logits.grad is not None
    return logits.grad


def gradient_of_kl(forward: bool) -> torch.Tensor:
    logits = LOGITS.clone().requires_grad_()
    log_probs = torch.log_softmax(logits, 0)
    (kl(log_probs, REFERENCE) if forward else kl(REFERENCE, log_probs)).backward()
    assert logits.grad is not None
    return logits.grad


def test_k1_and_k3_are_unbiased() -> None:
    policy = torch.log_softmax(LOGITS, 0)
    expected = kl(policy, REFERENCE)
    torch.testing.assert_close((policy.exp() * k1(policy, REFERENCE)).sum(), expected)
    torch.testing.assert_close((policy.exp() * k3(policy, REFERENCE)).sum(), expected)


def test_k2_is_biased_but_close_for_close_policies() -> None:
    policy = torch.log_softmax(LOGITS, 0)
    mean, expected = (policy.exp() * k2(policy, REFERENCE)).sum(), kl(policy, REFERENCE)
    assert 0.001 < abs(mean / expected - 1) < 0.1


def test_k2_and_k3_are_never_negative_and_k1_is() -> None:
    generator = torch.Generator().manual_seed(0)
    policy, reference = torch.randn(2, 1000, generator=generator)
    assert (k2(policy, reference) >= 0).all()
    assert (k3(policy, reference) >= 0).all()
    assert (k1(policy, reference) < 0).any()


def test_equal_policies_have_no_divergence() -> None:
    policy = torch.log_softmax(LOGITS, 0)
    assert all(
        torch.equal(estimator(policy, policy), torch.zeros_like(policy))
        for estimator in (k1, k2, k3)
    )


def test_k3_keeps_its_digits_for_close_policies() -> None:
    difference = torch.tensor([1e-3], dtype=torch.float32)
    torch.testing.assert_close(
        k3(torch.zeros(1), difference), difference**2 / 2, rtol=1e-2, atol=0.0
    )


def test_expected_gradients() -> None:
    torch.testing.assert_close(
        expected_gradient(k1), torch.zeros_like(LOGITS), rtol=0.0, atol=1e-15
    )
    torch.testing.assert_close(expected_gradient(k2), gradient_of_kl(forward=True))
    torch.testing.assert_close(expected_gradient(k3), gradient_of_kl(forward=False))


def test_an_estimator_is_taken_by_its_name() -> None:
    policy = torch.log_softmax(LOGITS, 0)
    assert torch.equal(token_kl("k1", policy, REFERENCE), k1(policy, REFERENCE))
    assert torch.equal(token_kl("k2", policy, REFERENCE), k2(policy, REFERENCE))
    assert torch.equal(token_kl("k3", policy, REFERENCE), k3(policy, REFERENCE))


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
