"""The losses of the family: by hand, their gradients by finite differences in FP64, and what must
not matter.
"""

import math
from dataclasses import replace
from itertools import pairwise
from typing import Any, get_args

import pytest
import torch

from isobit.algorithms.family import Grpo
from isobit.algorithms.objective import Algorithm, LossOutputs, Shares
from isobit.algorithms.policy_gradient import (
    ClipBounds,
    ClippedPolicyGradient,
    PolicyGradient,
    clipped_surrogate,
)
from isobit.algorithms.ppo import Ppo, explained_variance
from isobit.algorithms.registry import build_algorithm
from isobit.config.algorithm import (
    AlgorithmConfig,
    CispoConfig,
    CustomConfig,
    DrGrpoConfig,
    GrpoConfig,
    GspoConfig,
    LossConfig,
    PpoConfig,
)
from isobit.config.keys import tag_of
from isobit.records.batch import PackedBatch, TokenScores
from isobit.records.metrics import Metrics, add_microbatch
from tests.algorithms.batches import batch_of, random_batch

KINDS: list[Any] = [kind for kind in get_args(get_args(AlgorithmConfig)[0]) if kind != CustomConfig]
LENGTHS = [3, 1, 5, 2]
EVERYTHING = {"kl_coefficient": 0.3, "kl_in": "loss", "kl_estimator": "k2"}
VARIANTS: list[tuple[type[LossConfig], dict[str, Any]]] = [
    *((kind, {}) for kind in KINDS),
    *((kind, {**EVERYTHING, "entropy_coefficient": 0.2}) for kind in KINDS),
    (GrpoConfig, {"dual_clip": 1.1}),
    (GrpoConfig, {"clip": "none"}),
    (GrpoConfig, {"covariance": "kl_cov", "covariance_fraction": 0.4}),
    (GrpoConfig, {"covariance": "clip_cov", "covariance_low": 0.1, "covariance_fraction": 0.4}),
    (GrpoConfig, {"kl_coefficient": 0.3, "kl_estimator": "k3"}),
    (GspoConfig, {"clip_low": 0.2, "clip_high": 0.2}),
    (PpoConfig, {"value_clip": 0.1, "value_coefficient": 3.0}),
    (DrGrpoConfig, {"loss_constant": 7}),
]


def built(kind: type[LossConfig], keys: dict[str, Any]) -> PolicyGradient:
    found = build_algorithm(kind(**keys), 64)  # pyright: ignore[reportArgumentType]
    assert isinstance(found, PolicyGradient)
    return found


def one_loss(algorithm: Algorithm, scores: TokenScores, batch: PackedBatch) -> LossOutputs:
    (shares,) = algorithm.shares([batch])
    return algorithm.loss(scores, batch, Shares(shares.mean.double(), shares.selected))


def leaves(scores: TokenScores) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    assert scores.values is not None
    return scores.log_probs, scores.entropies, scores.values


@pytest.mark.few(16)
@pytest.mark.parametrize(("kind", "keys"), VARIANTS)
def test_gradients_agree_with_finite_differences(
    kind: type[LossConfig], keys: dict[str, Any]
) -> None:
    algorithm = built(kind, keys)
    scores, batch = random_batch(1, LENGTHS)

    def value(*changed: torch.Tensor) -> float:
        moved = TokenScores(changed[0], changed[1], changed[2])
        return float(loss_for_differences(algorithm, scores, moved, batch))

    gradients = torch.autograd.grad(
        one_loss(algorithm, scores, batch).loss, leaves(scores), allow_unused=True
    )
    plain = [leaf.detach() for leaf in leaves(scores)]
    step = 1e-6
    for place, gradient in enumerate(gradients):
        for token in range(sum(LENGTHS)):
            ends = []
            for sign in (1, -1):
                moved = [leaf.clone() for leaf in plain]
                moved[place][token] += sign * step
                ends.append(value(*moved))
            found = 0.0 if gradient is None else float(gradient[token])
            assert found == pytest.approx((ends[0] - ends[1]) / (2 * step), rel=1e-5, abs=1e-9)


def loss_for_differences(
    algorithm: PolicyGradient, fixed: TokenScores, changed: TokenScores, batch: PackedBatch
) -> torch.Tensor:
    """The loss, of CISPO with the weights of before the change, which its gradient takes as
    constants.
    """
    if not isinstance(algorithm.config, CispoConfig):
        return one_loss(algorithm, changed, batch).loss
    config = algorithm.config
    ratio = (fixed.log_probs.detach() - batch.old_log_probs).exp()
    weight = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
    (shares,) = algorithm.shares([batch])
    assert batch.importance is not None
    surrogate = -weight * batch.advantages * changed.log_probs * batch.importance
    others = one_loss(algorithm, changed, replace(batch, advantages=0 * batch.advantages)).loss
    return (shares.mean.double() * surrogate).sum() + others


@pytest.mark.parametrize("mean", ["token", "sequence"])
def test_grpo_has_the_bits_of_the_plain_expression(mean: str) -> None:
    scores, batch = random_batch(2, LENGTHS, torch.float32)
    batch = replace(batch, importance=None)
    algorithm = Grpo(GrpoConfig.model_validate({"loss_mean": mean}))
    (shares,) = algorithm.shares([batch])
    found = algorithm.loss(scores, batch, shares).loss
    ratio = torch.exp(scores.log_probs - batch.old_log_probs)
    clipped = ratio.clamp(1.0 - 0.2, 1.0 + 0.28)
    expected = (
        shares.mean * -torch.minimum(ratio * batch.advantages, clipped * batch.advantages)
    ).sum()
    assert torch.equal(found, expected)
    pair = [torch.autograd.grad(one, scores.log_probs)[0] for one in (found, expected)]
    assert torch.equal(*pair)


def test_without_a_clip_every_token_has_the_gradient_of_its_whole_ratio() -> None:
    scores, batch = random_batch(2, LENGTHS)
    batch = replace(batch, importance=None)
    outputs = one_loss(built(GrpoConfig, {"clip": "none"}), scores, batch)
    (gradient,) = torch.autograd.grad(outputs.loss, scores.log_probs)
    ratio = torch.exp(scores.log_probs.detach() - batch.old_log_probs)
    assert (ratio > 1.28).any() and (ratio < 0.8).any()
    torch.testing.assert_close(
        gradient, -ratio * batch.advantages / sum(LENGTHS), rtol=1e-6, atol=0
    )
    assert not any(name.startswith("clip_fraction") for name in outputs.metrics)


@pytest.mark.parametrize("kind", KINDS, ids=tag_of)
def test_on_policy_weights_of_one_change_no_bit_and_the_gradient_is_reinforces(
    kind: type[LossConfig],
) -> None:
    _, batch = random_batch(3, LENGTHS, torch.float32)
    algorithm = built(kind, {"loss_mean": "token"})
    (shares,) = algorithm.shares([batch])
    found = []
    for importance in (None, torch.ones(sum(LENGTHS))):
        log_probs = batch.old_log_probs.clone().requires_grad_()
        scores = TokenScores(log_probs, torch.zeros_like(log_probs), batch.values)
        outputs = algorithm.loss(scores, replace(batch, importance=importance), shares)
        (gradient,) = torch.autograd.grad(outputs.loss, log_probs)
        found.append((outputs.loss.detach(), gradient))
        assert outputs.metrics["ratio/min"] == outputs.metrics["ratio/max"] == 1.0
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])
    expected = -batch.advantages * shares.mean
    if isinstance(algorithm.config, GspoConfig):  # n times s / n
        torch.testing.assert_close(found[0][1], expected, rtol=1e-6, atol=0.0)
    else:
        assert torch.equal(found[0][1], expected)


@pytest.mark.parametrize(("kind", "keys"), VARIANTS)
@pytest.mark.parametrize("cuts", [(2,), (1, 2, 3)])
def test_a_cut_into_micro_batches_changes_rounding_only(
    kind: type[LossConfig], keys: dict[str, Any], cuts: tuple[int, ...]
) -> None:
    algorithm = built(kind, keys)
    scores, batch = random_batch(4, LENGTHS)
    whole = one_loss(algorithm, scores, batch)
    parts = [part_of(scores, batch, first, last) for first, last in pairwise((0, *cuts, 4))]
    shares = algorithm.shares([part for _, part in parts])
    outputs = [
        algorithm.loss(one, part, Shares(share.mean.double(), share.selected))
        for (one, part), share in zip(parts, shares, strict=True)
    ]
    torch.testing.assert_close(
        sum(output.loss for output in outputs), whole.loss, rtol=1e-6, atol=1e-12
    )
    found: Metrics = {}
    for output in outputs:
        add_microbatch(found, output.metrics)
    assert found == pytest.approx(whole.metrics, rel=1e-12)
    assert found["ratio/max"] == whole.metrics["ratio/max"]


def part_of(
    scores: TokenScores, batch: PackedBatch, first: int, last: int
) -> tuple[TokenScores, PackedBatch]:
    """The sequences from ``first`` to ``last`` as a micro-batch of their own."""
    chosen = (batch.sequence >= first) & (batch.sequence < last)
    names = ("old_log_probs", "advantages", "reference_log_probs", "values", "returns")
    columns = {name: getattr(batch, name)[chosen] for name in (*names, "importance")}
    part = batch_of(LENGTHS[first:last], first=first, **columns)
    log_probs, entropies, values = (leaf[chosen] for leaf in leaves(scores))
    return TokenScores(log_probs, entropies, values), part


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_penalty_and_bonus_join_the_loss_with_their_coefficients(estimator: str) -> None:
    scores, batch = random_batch(6, LENGTHS)
    assert batch.reference_log_probs is not None
    plain = one_loss(built(GrpoConfig, {}), scores, batch).loss
    penalised = built(GrpoConfig, {"kl_coefficient": 0.3, "kl_estimator": estimator})
    x = (scores.log_probs - batch.reference_log_probs).detach()
    divergence = {"k2": x.square() / 2, "k3": torch.exp(-x) - 1 + x}[estimator].mean()
    found = one_loss(penalised, scores, batch).loss - plain
    assert float(found.detach()) == pytest.approx(0.3 * float(divergence), rel=1e-6)
    rewarded = built(GrpoConfig, {"entropy_coefficient": 0.2})
    found = one_loss(rewarded, scores, batch).loss - plain
    entropy = float(scores.entropies.detach().mean())
    assert float(found.detach()) == pytest.approx(-0.2 * entropy, rel=1e-6)


def test_a_penalty_in_the_reward_is_none_of_the_losss() -> None:
    scores, batch = random_batch(6, LENGTHS)
    plain, other = (
        one_loss(built(GrpoConfig, keys), scores, batch).loss
        for keys in ({}, {"kl_coefficient": 0.3, "kl_in": "reward"})
    )
    assert torch.equal(plain, other)


def by_hand(config: Any, ratio: float, advantage: float) -> float:
    clipped = min(max(ratio, 1 - config.clip_low), 1 + config.clip_high)
    return -min(ratio * advantage, clipped * advantage)


def loss_of_pair(algorithm: PolicyGradient, ratios: list[float], advantage: float) -> LossOutputs:
    """Of one sequence whose tokens have these ratios."""
    log_probs = torch.tensor(ratios, dtype=torch.float64).log().requires_grad_()
    advantages = torch.full_like(log_probs, advantage).detach()
    batch = batch_of([len(ratios)], advantages=advantages)
    return one_loss(algorithm, TokenScores(log_probs, torch.zeros_like(log_probs)), batch)


@pytest.mark.parametrize("advantage", [-2.0, 1.0])
@pytest.mark.parametrize("ratios", [[1.5, 0.5], [1.0004, 1.0001], [0.9990, 0.9999]])
def test_gspo_by_hand(ratios: list[float], advantage: float) -> None:
    algorithm = built(GspoConfig, {})
    ratio = math.sqrt(ratios[0] * ratios[1])
    found = loss_of_pair(algorithm, ratios, advantage)
    assert float(found.loss.detach()) == pytest.approx(by_hand(algorithm.config, ratio, advantage))
    assert found.metrics["ratio/max"] == pytest.approx(ratio)


def test_cispo_bounds_the_weight_and_no_token_loses_its_gradient() -> None:
    log_probs = torch.tensor([2.0, -1.0], dtype=torch.float64).requires_grad_()
    advantages = torch.tensor([1.0, -1.0], dtype=torch.float64)
    batch = batch_of([2], advantages=advantages)
    outputs = one_loss(
        built(CispoConfig, {}), TokenScores(log_probs, torch.zeros_like(log_probs)), batch
    )
    (gradient,) = torch.autograd.grad(outputs.loss, log_probs)
    assert gradient.tolist() == pytest.approx([-0.5 * 5, 0.5 * math.exp(-1)])
    assert (outputs.metrics["clip_fraction/high"], outputs.metrics["clip_fraction/low"]) == (1, 0)


def test_dual_clip_bounds_what_a_bad_token_can_do() -> None:
    algorithm = built(GrpoConfig, {"dual_clip": 3.0})
    outputs = loss_of_pair(algorithm, [10.0], -1.0)
    assert float(outputs.loss.detach()) == 3.0
    assert outputs.metrics["clip_fraction/dual"] == 1
    assert float(loss_of_pair(algorithm, [2.0], -1.0).loss.detach()) == pytest.approx(2.0)
    assert float(loss_of_pair(algorithm, [10.0], 1.0).loss.detach()) == pytest.approx(-1.28)


def test_what_becomes_of_the_tokens_that_covary_most() -> None:
    ratio = torch.tensor([1.5, 0.5, 0.9, 2.0], dtype=torch.float64)
    advantages = torch.tensor([1.0, -1.0, 1.0, -1.0], dtype=torch.float64)
    scores = TokenScores(ratio.log(), torch.zeros_like(ratio))
    batch = batch_of([4], advantages=advantages)
    shares = Shares(torch.ones(4, dtype=torch.float64), torch.tensor([True, False, False, True]))
    clip = built(GrpoConfig, {"covariance": "clip_cov"}).surrogate(scores, batch, shares)
    assert clip.loss.tolist() == pytest.approx([0.0, 0.8, -0.9, 0.0])
    keys = {"covariance": "kl_cov", "covariance_kl": 0.1}
    held = built(GrpoConfig, keys).surrogate(scores, batch, shares)
    penalties = [0.1 * math.log(1.5), 0.0, 0.0, 0.1 * math.log(2.0)]
    plain = [-1.5, 0.5, -0.9, 2.0]
    assert held.loss.tolist() == pytest.approx(
        [a + b for a, b in zip(plain, penalties, strict=True)]
    )
    assert not set(held.metrics) & {"clip_fraction/low", "clip_fraction/high"}, "it has no clip"


def test_the_divergence_is_reported_by_both_unbiased_estimates() -> None:
    scores, batch = random_batch(5, LENGTHS)
    assert batch.reference_log_probs is not None
    sums = one_loss(built(GrpoConfig, {}), scores, batch).metrics
    differences = (batch.reference_log_probs - scores.log_probs).tolist()
    assert sums["kl/k1"] == pytest.approx(-math.fsum(differences))
    assert sums["kl/k3"] == pytest.approx(math.fsum(math.exp(d) - 1 - d for d in differences))


def test_the_value_loss_and_its_explained_variance_by_hand() -> None:
    tensor = torch.tensor
    values = tensor([0.5, 1.0, -1.0], dtype=torch.float64)
    batch = batch_of(
        [3],
        values=tensor([0.0, 1.1, -1.5], dtype=torch.float64),
        returns=tensor([1.0, 0.0, -1.0], dtype=torch.float64),
    )
    zeros = torch.zeros(3, dtype=torch.float64)
    outputs = one_loss(Ppo(PpoConfig()), TokenScores(zeros, zeros, values), batch)
    # moved too far: 0.2 and -1.3 instead of 0.5 and -1.0, which are further off; 1.0 is near enough
    expected = 0.5 * (0.8**2 + 1.0**2 + 0.3**2)
    assert outputs.metrics["value/loss"] == pytest.approx(expected)
    assert float(outputs.loss) == pytest.approx(0.1 * expected / 3)
    assert outputs.metrics["value/clip_fraction"] == 2
    returns = batch.returns
    assert returns is not None
    errors = returns - values
    explained = 1 - float(errors.var(correction=0) / returns.var(correction=0))
    means = {name: value / 3 for name, value in outputs.metrics.items()}
    assert explained_variance(means) == pytest.approx(explained)
    assert explained_variance({**means, "return_square": means["return_mean"] ** 2}) is None


def test_other_bounds_make_another_algorithm_of_the_same_kind() -> None:
    grpo = Grpo(GrpoConfig(dual_clip=4.0))
    moved = grpo.with_clip(ClipBounds(0.5, 1.5))
    assert isinstance(moved, ClippedPolicyGradient)
    assert moved == Grpo(GrpoConfig(dual_clip=4.0, clip_low=0.5, clip_high=1.5))
    ratio, advantages = torch.tensor([0.4, 3.0]), torch.tensor([-1.0, 1.0])
    found = clipped_surrogate(ratio, advantages, 0.5, 1.5)
    assert found.tolist() == [0.5, -2.5]
