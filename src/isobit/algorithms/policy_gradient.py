"""The loss that the algorithms of the family share, and the clipped surrogate of most of them.

    loss = sum over tokens i of   w[i] * ( c[i] * l[i]  +  kl_coefficient * KL[i]
                                           -  entropy_coefficient * H[i] )

    w    the weight of the token in the mean over the update (``mean_weights``)
    l    the algorithm's own term of a token, its surrogate
    c    the weight of the corrections for tokens that another policy drew
         (``isobit.algorithms.corrections``)
    KL   an estimate of the divergence from the reference (``token_kl``)
    H    the entropy of the distribution that the token was drawn from

What has no coefficient is not computed: without KL, entropy and corrections the loss has the bits
of ``(w * l).sum()``.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Self

import torch

from isobit.algorithms.objective import Columns, LossOutputs, Shares
from isobit.algorithms.sample_size import ratio_sums
from isobit.config.algorithm import KlEstimator, LossConfig, LossMean, TokenClipConfig
from isobit.records.batch import PackedBatch, TokenScores
from isobit.records.text import Group
from isobit.util.errors import ConfigError


def k1(log_probs: torch.Tensor, reference_log_probs: torch.Tensor) -> torch.Tensor:
    """``log pi - log reference`` of each token, [N]: unbiased, of either sign."""
    return log_probs - reference_log_probs


def k2(log_probs: torch.Tensor, reference_log_probs: torch.Tensor) -> torch.Tensor:
    """Half the square of the log ratio of each token, [N]: biased, with the gradient of KL(pi ||
    reference).
    """
    return 0.5 * (log_probs - reference_log_probs).square()


def k3(log_probs: torch.Tensor, reference_log_probs: torch.Tensor) -> torch.Tensor:
    """``rho - 1 - log rho`` of each token, [N]: unbiased and never negative, with the gradient of
    KL(reference || pi).
    """
    log_ratio = reference_log_probs - log_probs
    return torch.expm1(log_ratio) - log_ratio


def token_kl(
    estimator: KlEstimator, log_probs: torch.Tensor, reference_log_probs: torch.Tensor
) -> torch.Tensor:
    """An estimate of KL(pi || reference) of each token, [N], from tokens sampled by pi: k1, k2 or
    k3 of J. Schulman, "Approximating KL divergence" (joschu.net/blog/kl-approx.html).  With rho =
    reference(token) / pi(token):

        k1 = -log rho               unbiased, high variance, negative for about half of the tokens
        k2 = (log rho)^2 / 2        biased (small while the two are close), low variance, never
                                    negative
        k3 = (rho - 1) - log rho    unbiased, low variance, never negative; GRPO's penalty (arXiv
                                    2402.03300, equation 4)

    The value and the gradient are different matters.  As a term of the loss, differentiated through
    log pi only, the expected gradient is

        k1   0: it penalises nothing
        k2   that of KL(pi || reference), the divergence one wants
        k3   that of KL(reference || pi), the other direction

    because E[grad log pi] = 0, and the gradients are log(1/rho) grad log pi for k2 and (1 - rho)
    grad log pi for k3.
    """
    return {"k1": k1, "k2": k2, "k3": k3}[estimator](log_probs, reference_log_probs)


def token_mean_weights(sequences: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """``1 / N`` for every token; takes and gives one tensor [N_m] a micro-batch, int64 and
    float32.
    """
    total = sum(sequence.numel() for sequence in sequences)
    return [
        torch.full(sequence.shape, 1.0 / max(total, 1), device=sequence.device, dtype=torch.float32)
        for sequence in sequences
    ]


def sequence_mean_weights(sequences: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """``1 / (S * n)`` for every token of an answer of n tokens; a sequence must lie in one
    micro-batch.
    """
    counts = [torch.bincount(sequence) for sequence in sequences]
    total = sum(int((count > 0).sum()) for count in counts)
    return [
        (1.0 / (total * count[sequence].double())).float()
        for sequence, count in zip(sequences, counts, strict=True)
    ]


def constant_mean_weights(sequences: Sequence[torch.Tensor], constant: int) -> list[torch.Tensor]:
    """``1 / (S * constant)`` for every token."""
    total = sum(int((torch.bincount(sequence) > 0).sum()) for sequence in sequences)
    return [
        torch.full(
            sequence.shape,
            1.0 / (max(total, 1) * constant),
            device=sequence.device,
            dtype=torch.float32,
        )
        for sequence in sequences
    ]


def mean_weights(
    mean: LossMean, sequences: Sequence[torch.Tensor], constant: int | None = None
) -> list[torch.Tensor]:
    """The weight of each response token in the mean over one update, a tensor a micro-batch.

    token      ``1 / N`` with N tokens in the step, so that a long answer counts for more than a
               short one (DAPO, arXiv 2503.14476, section 3.3)
    sequence   ``1 / (S * n)`` for a token of an answer of n tokens, with S answers in the step
               (GRPO's own, arXiv 2402.03300, equation 3)
    constant   ``1 / (S * C)``, the same for every length, so that a long wrong answer is not
               punished less a token than a short one (Dr. GRPO, arXiv 2503.20783, section 3.1)

    By token and by sequence the weights of a step sum to one, by a constant to the answers' mean
    length over C.  Raises ConfigError for the mean by a constant without one.
    """
    if mean == "constant":
        if constant is None:
            raise ConfigError(
                "algorithm.loss_mean is 'constant', but algorithm.loss_constant is not set; set it "
                "to the longest completion, in tokens"
            )
        return constant_mean_weights(sequences, constant)
    return token_mean_weights(sequences) if mean == "token" else sequence_mean_weights(sequences)


@dataclass(frozen=True, slots=True)
class Terms:
    """A part of the loss, token by token, and what to report of it as ``LossOutputs`` does."""

    loss: torch.Tensor
    """[N]"""
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PolicyGradient(ABC):
    """An ``Algorithm`` with the loss at the top of this file; a subclass gives ``credit`` and
    ``surrogate``.
    """

    config: LossConfig

    needs_values = False
    needs_greedy = False

    @property
    def has_other_terms(self) -> bool:
        """Whether there is something to learn from where every advantage is 0."""
        penalty = self.config.kl_coefficient > 0 and self.config.kl_in == "loss"
        return self.needs_values or penalty or self.config.entropy_coefficient > 0

    @abstractmethod
    def credit(self, groups: Sequence[Group]) -> list[list[Columns | None]]:
        """The columns that each completion is learnt from with (``Algorithm.credit``)."""

    @abstractmethod
    def surrogate(self, scores: TokenScores, batch: PackedBatch, shares: Shares) -> Terms:
        """The algorithm's own term of each of the N tokens."""

    def further_terms(self, scores: TokenScores, batch: PackedBatch) -> Terms | None:
        """What else is learnt from the N tokens, whoever drew them."""
        return None

    def shares(self, batches: Sequence[PackedBatch]) -> list[Shares]:
        """The shares by ``mean_weights``."""
        return [Shares(mean) for mean in self._means(batches)]

    def _means(self, batches: Sequence[PackedBatch]) -> list[torch.Tensor]:
        sequences = [batch.sequence for batch in batches]
        return mean_weights(self.config.loss_mean, sequences, self.config.loss_constant)

    def loss(self, scores: TokenScores, batch: PackedBatch, shares: Shares) -> LossOutputs:
        """The weighted sum over the N tokens, with what the terms report."""
        terms = self.surrogate(scores, batch, shares)
        found, metrics = terms.loss, dict(terms.metrics)
        if batch.importance is not None:
            found = found * batch.importance
        further = self.further_terms(scores, batch)
        if further is not None:
            found = found + further.loss
            metrics |= further.metrics
        if self.config.kl_coefficient > 0 and self.config.kl_in == "loss":
            assert batch.reference_log_probs is not None, "a penalty needs the reference's scores"
            divergence = token_kl(
                self.config.kl_estimator, scores.log_probs, batch.reference_log_probs
            )
            found = found + self.config.kl_coefficient * divergence
        if self.config.entropy_coefficient > 0:
            found = found - self.config.entropy_coefficient * scores.entropies
        drawn = batch.old_log_probs if batch.importance is None else batch.recorded_log_probs
        return LossOutputs(
            (shares.mean * found).sum(),
            metrics | _divergences(scores, batch),
            ratio_sums(scores.log_probs.detach(), drawn, batch.sequence),
        )


def _divergences(scores: TokenScores, batch: PackedBatch) -> dict[str, float]:
    """Sums of both estimates that are unbiased, where there is a reference."""
    if batch.reference_log_probs is None:
        return {}
    pair = scores.log_probs.detach().double(), batch.reference_log_probs.double()
    return {"kl/k1": float(k1(*pair).sum()), "kl/k3": float(k3(*pair).sum())}


def select(config: TokenClipConfig, batches: Sequence[PackedBatch]) -> list[torch.Tensor]:
    """The response tokens that Clip-Cov and KL-Cov treat otherwise (arXiv 2505.22617, section 4),
    bool [N_m] for each micro-batch of an update.

    A policy's entropy falls by what a step's log-probabilities and advantages covary, and a few
    tokens carry most of that (section 3).  Clip-Cov picks ``covariance_fraction`` * N of the tokens
    with a covariance in [covariance_low, covariance_high] at random; KL-Cov picks as many with the
    largest.  At least one is picked where there is any.

    Unlike the published implementations, which take the current policy's log-probabilities in each
    micro-batch, the choice is made from the old ones with the whole update in view, so that it does
    not depend on how the update is cut.  Means are rounded once (``math.fsum``), and what is
    random, as well as the order of equal covariances (many tokens have a log-probability of exactly
    0), comes from noise that is keyed by a sequence's token ids and the token's place in it.
    """
    found = covariances(batches)
    noise = torch.cat([_noise(batch) for batch in batches])
    number = max(int(config.covariance_fraction * found.numel()), 1)
    candidates = torch.arange(found.numel())
    if config.covariance == "clip_cov":
        within = (found >= config.covariance_low) & (found <= config.covariance_high)
        candidates = candidates[within]
        order = noise[candidates].argsort()
    else:
        order = noise.argsort()
        order = order[found[order].argsort(descending=True, stable=True)]
    picked = torch.zeros(found.numel(), dtype=torch.bool)
    picked[candidates[order[:number]]] = True
    return list(picked.split([batch.targets.numel() for batch in batches]))


def covariances(batches: Sequence[PackedBatch]) -> torch.Tensor:
    """Each token's part of the covariance, float64 [N] over all micro-batches; with means over all
    tokens of the update

        cov[i] = (log pi_old[i] - mean log pi_old) * (A[i] - mean A)
    """
    log_probs = torch.cat([batch.old_log_probs for batch in batches]).double()
    advantages = torch.cat([batch.advantages for batch in batches]).double()
    return _centred(log_probs) * _centred(advantages)


def _centred(values: torch.Tensor) -> torch.Tensor:
    return values - math.fsum(values.tolist()) / max(values.numel(), 1)


def _noise(batch: PackedBatch) -> torch.Tensor:
    """A number in [0, 1) for each response token, whatever the packing; float64 [N]."""
    starts = [0, *torch.tensor(batch.lengths).cumsum(0).tolist()]
    found = []
    for index, length in enumerate(batch.lengths):
        ids = batch.token_ids[starts[index] : starts[index] + length]
        random = Random(ids.numpy().tobytes())  # noqa: S311 - no secret
        found += [random.random() for _ in range(length)]
    return torch.tensor(found, dtype=torch.float64)[batch.rows]


@dataclass(frozen=True, slots=True)
class ClipBounds:
    """How far below and above 1 a ratio still has a gradient."""

    clip_low: float
    clip_high: float


@dataclass(frozen=True, slots=True)
class ClippedPolicyGradient(PolicyGradient):
    """A ``PolicyGradient`` with the clipped surrogate of PPO; a subclass gives ``credit``.

    For a token with ratio r = pi(token) / pi_old(token) and advantage A (arXiv 1707.06347,
    equation 7; two clip bounds: DAPO, arXiv 2503.14476, section 3.1):

        l = -min(r * A, clip(r, 1 - clip_low, 1 + clip_high) * A)

    The gradient vanishes where the clip is active: r above the upper bound with A > 0, r below the
    lower bound with A < 0.  Where the policy that sampled is the one being trained, bit for bit, r
    is exactly 1 and l has the gradient of -A * log pi: REINFORCE's.

    Dual clip (arXiv 1912.09729, equation 5) bounds what r * A can do where A < 0 and r is large,
    which the minimum does not:

        l = -max(min(r * A, clip(r) * A), dual_clip * A)        where A < 0

    With ``clip`` "none" there is no bound at all: l = -r * A, the importance-sampling estimate of
    the policy gradient, with the token's own ratio for the whole prefix.  Where pi_old is what drew
    the token, bit for bit, r has no noise but that of the lag.

    Of the tokens that ``select`` picks, Clip-Cov's give nothing (l = 0), and KL-Cov, which has no
    clip, has

        l = -r * A + covariance_kl * |log r|  of those,   l = -r * A  of the others
    """

    config: TokenClipConfig

    def with_clip(self, bounds: ClipBounds) -> Self:
        """The same algorithm with other bounds."""
        update = {"clip_low": bounds.clip_low, "clip_high": bounds.clip_high}
        return replace(self, config=self.config.model_copy(update=update))

    def shares(self, batches: Sequence[PackedBatch]) -> list[Shares]:
        """The shares by ``mean_weights`` and ``select``."""
        means = self._means(batches)
        if self.config.covariance is None:
            return [Shares(mean) for mean in means]
        picks = select(self.config, batches)
        return [Shares(mean, picked) for mean, picked in zip(means, picks, strict=True)]

    def surrogate(self, scores: TokenScores, batch: PackedBatch, shares: Shares) -> Terms:
        """The formula above."""
        config = self.config
        log_ratio = scores.log_probs - batch.old_log_probs
        ratio = torch.exp(log_ratio)
        if config.covariance == "kl_cov":
            assert shares.selected is not None, "the shares are of another configuration"
            penalty = config.covariance_kl * log_ratio.abs()
            loss = -ratio * batch.advantages + torch.where(shares.selected, penalty, 0.0)
            return Terms(loss, ratio_metrics(ratio.detach(), batch.advantages))
        if config.clip == "none":
            loss, bounds = -ratio * batch.advantages, None
        else:
            bounds = ClipBounds(config.clip_low, config.clip_high)
            loss = clipped_surrogate(ratio, batch.advantages, bounds.clip_low, bounds.clip_high)
        metrics = ratio_metrics(ratio.detach(), batch.advantages, bounds)
        if config.dual_clip is not None:
            bound = -config.dual_clip * batch.advantages
            beyond = (batch.advantages < 0) & (loss > bound)
            loss = torch.where(beyond, bound, loss)
            metrics["clip_fraction/dual"] = float(beyond.sum())
        if config.covariance == "clip_cov":
            assert shares.selected is not None, "the shares are of another configuration"
            loss = torch.where(shares.selected, 0.0, loss)
        return Terms(loss, metrics)


def clipped_surrogate(
    ratio: torch.Tensor, advantages: torch.Tensor, clip_low: float, clip_high: float
) -> torch.Tensor:
    """The loss of each token, [N], from ratios [N] and advantages [N]:
    ``-min(r * A, clip(r) * A)``.
    """
    clipped = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    return -torch.minimum(ratio * advantages, clipped * advantages)


def ratio_metrics(
    ratio: torch.Tensor, advantages: torch.Tensor, bounds: ClipBounds | None = None
) -> dict[str, float]:
    """The ratios' sum, maximum and minimum, and the number of tokens whose gradient a clip at
    ``bounds`` removes, below and above; nothing without tokens.
    """
    if not ratio.numel():
        return {}
    metrics = {
        "ratio/mean": float(ratio.double().sum()),
        "ratio/max": float(ratio.max()),
        "ratio/min": float(ratio.min()),
    }
    if bounds is not None:
        below, above = ratio < 1.0 - bounds.clip_low, ratio > 1.0 + bounds.clip_high
        metrics["clip_fraction/low"] = float((below & (advantages < 0)).sum())
        metrics["clip_fraction/high"] = float((above & (advantages > 0)).sum())
    return metrics
