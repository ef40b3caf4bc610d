"""GRPO against a straightforward reference: Python floats, token by token, with the gradient
written out by hand.
"""

import math
from random import Random

import pytest
import torch

from isobit.algorithms.family import Grpo
from isobit.algorithms.objective import Shares
from isobit.config.algorithm import GrpoConfig
from isobit.records.batch import PackedBatch, TokenScores
from tests.sequences import answer_of, group_of

CLIP_LOW, CLIP_HIGH = 0.2, 0.28
Answer = tuple[list[float], list[float], float]  # log-probabilities, old ones, advantage


def random_answers(seed: int) -> list[Answer]:
    random = Random(seed)
    answers = []
    for _ in range(7):
        old = [random.uniform(-5, -0.01) for _ in range(random.randint(1, 12))]
        new = [value + random.gauss(0, 0.3) for value in old]
        answers.append((new, old, random.choice([-1.3, -0.4, 0.0, 0.7, 2.1])))
    return answers


def reference(answers: list[Answer], mean: str) -> tuple[float, list[float]]:
    """Loss and its gradient by each log-probability, from the definition."""
    total = sum(len(new) for new, _, _ in answers)
    loss, gradients = 0.0, []
    for new, old, advantage in answers:
        weight = 1 / total if mean == "token" else 1 / (len(answers) * len(new))
        for x, y in zip(new, old, strict=True):
            ratio = math.exp(x - y)
            clipped = min(max(ratio, 1 - CLIP_LOW), 1 + CLIP_HIGH)
            loss -= weight * min(ratio * advantage, clipped * advantage)
            active = ratio * advantage <= clipped * advantage
            gradients.append(-weight * ratio * advantage if active else 0.0)
    return loss, gradients


def log_probs_of(answers: list[Answer]) -> torch.Tensor:
    values = [x for new, _, _ in answers for x in new]
    return torch.tensor(values, dtype=torch.float64, requires_grad=True)


def scores_of(log_probs: torch.Tensor) -> TokenScores:
    return TokenScores(log_probs, torch.zeros_like(log_probs))


def batch_of(
    old: torch.Tensor, advantages: torch.Tensor, sequence: torch.Tensor | None = None
) -> PackedBatch:
    """A batch that knows of its tokens what the loss reads, and nothing else; by default they are
    of one sequence.
    """
    unread = torch.empty(0)
    return PackedBatch(
        token_ids=unread,
        positions=unread,
        lengths=(),
        rows=unread,
        targets=unread,
        sequence=torch.zeros(len(old), dtype=torch.int64) if sequence is None else sequence,
        temperatures=unread,
        recorded_log_probs=unread,
        old_log_probs=old,
        advantages=advantages,
    )


def batch_of_answers(answers: list[Answer]) -> PackedBatch:
    old = [x for _, values, _ in answers for x in values]
    advantages = [advantage for new, _, advantage in answers for _ in new]
    return batch_of(
        torch.tensor(old, dtype=torch.float64),
        torch.tensor(advantages, dtype=torch.float64),
        sequence_of(answers),
    )


def sequence_of(answers: list[Answer]) -> torch.Tensor:
    return torch.arange(len(answers)).repeat_interleave(
        torch.tensor([len(new) for new, _, _ in answers])
    )


def grpo(mean: str = "token") -> Grpo:
    return Grpo(
        GrpoConfig.model_validate({"clip_low": CLIP_LOW, "clip_high": CLIP_HIGH, "loss_mean": mean})
    )


@pytest.mark.parametrize("mean", ["token", "sequence"])
@pytest.mark.parametrize("seed", range(5))
def test_loss_and_gradient_against_the_reference(mean: str, seed: int) -> None:
    answers = random_answers(seed)
    batch = batch_of_answers(answers)
    (shares,) = grpo(mean).shares([batch])
    log_probs = log_probs_of(answers)
    loss = grpo(mean).loss(scores_of(log_probs), batch, Shares(shares.mean.double())).loss
    loss.backward()
    expected_loss, expected_gradient = reference(answers, mean)
    assert float(loss.detach()) == pytest.approx(expected_loss, rel=1e-6)  # weights are float32
    assert log_probs.grad is not None
    torch.testing.assert_close(
        log_probs.grad,
        torch.tensor(expected_gradient, dtype=torch.float64),
        rtol=1e-6,
        atol=1e-12,
    )


@pytest.mark.parametrize("mean", ["token", "sequence"])
@pytest.mark.parametrize("cuts", [(3,), (1, 2, 6), (2, 3, 4, 5)])
def test_any_cut_into_microbatches_adds_up(mean: str, cuts: tuple[int, ...]) -> None:
    answers = random_answers(3)
    parts = [
        answers[first:last] for first, last in zip((0, *cuts), (*cuts, len(answers)), strict=True)
    ]
    batches = [batch_of_answers(part) for part in parts]
    outputs = [
        grpo(mean).loss(scores_of(log_probs_of(part)), batch, Shares(shares.mean.double()))
        for part, batch, shares in zip(parts, batches, grpo(mean).shares(batches), strict=True)
    ]
    assert sum(float(output.loss.detach()) for output in outputs) == pytest.approx(
        reference(answers, mean)[0], rel=1e-6
    )


def test_on_policy_the_gradient_is_that_of_the_advantage_weighted_log_probability() -> None:
    log_probs = torch.tensor([-1.0, -2.0, -0.5], requires_grad=True)
    advantages = torch.tensor([0.5, -1.5, 2.0])
    weights = torch.full([3], 0.25)
    batch = batch_of(log_probs.detach().clone(), advantages)
    outputs = grpo().loss(scores_of(log_probs), batch, Shares(weights))
    outputs.loss.backward()
    assert log_probs.grad is not None
    assert torch.equal(log_probs.grad, -advantages * weights)
    assert outputs.metrics == {
        "ratio/mean": 3.0,
        "clip_fraction/low": 0.0,
        "clip_fraction/high": 0.0,
        "ratio/max": 1.0,
        "ratio/min": 1.0,
    }


def test_clip_fractions_count_the_tokens_without_gradient() -> None:
    ratios = torch.tensor([0.7, 0.7, 0.85, 1.2, 1.4, 1.4], dtype=torch.float64)
    advantages = torch.tensor([-1.0, 1.0, -1.0, 1.0, 1.0, -1.0], dtype=torch.float64)
    log_probs = ratios.log().requires_grad_()
    zeros = torch.zeros(6, dtype=torch.float64)
    weights = torch.full_like(zeros, 1 / 6)
    outputs = grpo().loss(scores_of(log_probs), batch_of(zeros, advantages), Shares(weights))
    outputs.loss.backward()
    assert log_probs.grad is not None
    assert (log_probs.grad == 0).tolist() == [True, False, False, False, True, False]
    assert outputs.metrics["clip_fraction/low"] == outputs.metrics["clip_fraction/high"] == 1.0
    assert outputs.metrics["ratio/mean"] == pytest.approx(6.25)
    assert outputs.metrics["ratio/max"] == pytest.approx(1.4)
    assert outputs.metrics["ratio/min"] == pytest.approx(0.7)


def test_normalise_by_std_reaches_the_advantages() -> None:
    plain = Grpo(GrpoConfig(normalise_by_std=False))
    group = group_of([answer_of(3)] * 2, [0.0, 1.0])
    assert plain.credit([group]) == [[{"advantages": -0.5}, {"advantages": 0.5}]]
    (found,) = grpo().credit([group])
    advantages = [columns["advantages"] for columns in found if columns is not None]
    assert advantages == pytest.approx([-(0.5**0.5), 0.5**0.5], rel=1e-5)
