"""What the losses of the family have in common, and the clipped surrogate of most of them.

    loss = sum over tokens i of   w[i] * ( c[i] * l[i]  +  kl_coefficient * KL[i]
                                           -  entropy_coefficient * H[i] )

w is the mean over the update (``mean_weights``), l the algorithm's own term of a token
(its surrogate), c the weight of the corrections for tokens that another policy drew
(``isobit.algorithms.family``), KL an estimate of the divergence from the reference
(``token_kl``), H the entropy of the distribution that the token was drawn from.  What
has no coefficient is not computed: without KL, entropy and corrections the loss has the bits of
``(w * l).sum()``.

Three estimators of KL(pi || reference) from tokens sampled by pi: k1, k2 and k3 of J. Schulman,
"Approximating KL divergence" (joschu.net/blog/kl-approx.html).  With rho = reference(token) /
pi(token):

    k1 = -log rho                   unbiased, high variance, negative for about half of the tokens
    k2 = (log rho)^2 / 2            biased (small while the two are close), low variance, never
                                    negative
    k3 = (rho - 1) - log rho        unbiased, low variance, never negative; GRPO's penalty (arXiv
                                    2402.03300, equation 4)

The value and the gradient are different matters.  As a term of the loss, differentiated through log
pi only, the expected gradient is

    k1   0: it penalises nothing
    k2   that of KL(pi || reference), the divergence one wants
    k3   that of KL(reference || pi), the other direction

because E[grad log pi] = 0, and the gradients are log(1/rho) grad log pi for k2 and (1 - rho) grad
log pi for k3.

The weight of each response token in the mean over one update.

Token mean, DAPO's (arXiv 2503.14476, section 3.3): with N tokens in the step, every token weighs
``1 / N``, so that a long answer counts for more than a short one.  Sequence mean, GRPO's own (arXiv
2402.03300, equation 3): with S answers in the step, a token of an answer of n tokens weighs ``1 /
(S * n)``.  Either way the weights of a step sum to one.

Constant, Dr. GRPO's (arXiv 2503.20783, section 3.1): ``1 / (S * C)`` with C tokens, the same for
every length, so that a long wrong answer is not punished less a token than a short one.  The
weights sum to the answers' mean length over C.

The clipped surrogate of PPO (``ClippedPolicyGradient``), for a token with ratio r = pi(token) /
pi_old(token) and advantage A (arXiv 1707.06347, equation 7; two clip bounds: DAPO, arXiv
2503.14476, section 3.1):

    l = -min(r * A, clip(r, 1 - clip_low, 1 + clip_high) * A)

The gradient vanishes where the clip is active: r above the upper bound with A > 0, r below the
lower bound with A < 0.  Where the policy that sampled is the one being trained, bit for bit, r is
exactly 1 and l has the gradient of -A * log pi: REINFORCE's.

Dual clip (arXiv 1912.09729, equation 5) bounds what r * A can do where A < 0 and r is large, which
the minimum does not:

    l = -max(min(r * A, clip(r) * A), dual_clip * A)        where A < 0

Clip-Cov and KL-Cov (arXiv 2505.22617, section 4) treat some picked tokens otherwise: Clip-Cov's
give nothing (l = 0), and KL-Cov, which has no clip, has

    l = -r * A + covariance_kl * |log r|  of those,   l = -r * A  of the others

A policy's entropy falls by what a step's log-probabilities and advantages covary, and a few tokens
carry most of that (arXiv 2505.22617, section 3).  With means over all N tokens of the update, a
token's part is

    cov[i] = (log pi_old[i] - mean log pi_old) * (A[i] - mean A)

Clip-Cov picks ``covariance_fraction`` * N of the tokens with cov in [covariance_low,
covariance_high] at random; KL-Cov picks as many with the largest cov.  At least one is picked where
there is any.

Unlike the published implementations, which take the current policy's log-probabilities in each
micro-batch, the choice is made from the old ones with the whole update in view, so that it does not
depend on how the update is cut.  Means are rounded once (``math.fsum``), and what is random, as
well as the order of equal covariances (many tokens have a log-probability of exactly 0), comes from
noise that is keyed by a sequence's token ids and the token's place in it.

PPO with a value head (arXiv 1707.06347; for language models: 2203.02155).

Advantages are those of generalised advantage estimation, token by token
(``isobit.algorithms.advantages``), whitened over all tokens of the step; the surrogate is clipped
(``isobit.algorithms.policy_gradient``).  The value head learns the returns R with a loss that is
clipped around V_old, its value before the step (as the authors' code has it):

    l_value = max((V - R)^2, (V_old + clip(V - V_old, -value_clip, value_clip) - R)^2) / 2

which joins the loss with ``value_coefficient``.  Reported are ``value_loss``,
``value_clip_fraction`` (tokens for which the clipped term was the larger) and four means from which
follows

    explained variance = 1 - (value_error_square - value_error^2) / (return_square - return_mean^2)

of the values now.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Self

import torch

from isobit.algorithms.advantages import advantages_and_returns, token_credit, token_rewards, whiten
from isobit.algorithms.objective import Columns, LossOutputs, Shares
from isobit.config.algorithm import KlEstimator, LossConfig, LossMean, PpoConfig, TokenClipConfig
from isobit.records.batch import PackedBatch, TokenScores
from isobit.records.sequence import TokenSequence
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
    """The named estimate of each token, [N]: see the functions above."""
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
    """The weights of the named mean: see the functions above.  Raises ConfigError for the mean by a
    constant without one.
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
    """An ``Algorithm`` of the form above; a subclass gives ``credit`` and ``surrogate``."""

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
        """See ``Algorithm``."""

    @abstractmethod
    def surrogate(self, scores: TokenScores, batch: PackedBatch, shares: Shares) -> Terms:
        """The algorithm's own term of each of the N tokens."""

    def further_terms(self, scores: TokenScores, batch: PackedBatch) -> Terms | None:
        """What else is learnt from the N tokens, whoever drew them."""
        return None

    def shares(self, batches: Sequence[PackedBatch]) -> list[Shares]:
        """See ``mean_weights``."""
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
        return LossOutputs((shares.mean * found).sum(), metrics | _divergences(scores, batch))


def _divergences(scores: TokenScores, batch: PackedBatch) -> dict[str, float]:
    """Sums of both estimates that are unbiased, where there is a reference."""
    if batch.reference_log_probs is None:
        return {}
    pair = scores.log_probs.detach().double(), batch.reference_log_probs.double()
    return {"kl/k1": float(k1(*pair).sum()), "kl/k3": float(k3(*pair).sum())}


def select(config: TokenClipConfig, batches: Sequence[PackedBatch]) -> list[torch.Tensor]:
    """All micro-batches of an update -> which of their response tokens are picked, bool [N_m]."""
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
    """Each token's part of the covariance, float64 [N] over all micro-batches; the formula is at
    the top of this file.
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
    """A ``PolicyGradient`` with this surrogate; a subclass gives ``credit``."""

    config: TokenClipConfig

    def with_clip(self, bounds: ClipBounds) -> Self:
        """The same algorithm with other bounds."""
        update = {"clip_low": bounds.clip_low, "clip_high": bounds.clip_high}
        return replace(self, config=self.config.model_copy(update=update))

    def shares(self, batches: Sequence[PackedBatch]) -> list[Shares]:
        """See ``mean_weights`` and ``select``."""
        means = self._means(batches)
        if self.config.covariance is None:
            return [Shares(mean) for mean in means]
        picks = select(self.config, batches)
        return [Shares(mean, picked) for mean, picked in zip(means, picks, strict=True)]

    def surrogate(self, scores: TokenScores, batch: PackedBatch, shares: Shares) -> Terms:
        """See the top of this file."""
        config = self.config
        log_ratio = scores.log_probs - batch.old_log_probs
        ratio = torch.exp(log_ratio)
        if config.covariance == "kl_cov":
            assert shares.selected is not None, "the shares are of another configuration"
            penalty = config.covariance_kl * log_ratio.abs()
            loss = -ratio * batch.advantages + torch.where(shares.selected, penalty, 0.0)
            return Terms(loss, ratio_metrics(ratio.detach(), batch.advantages))
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
    """The loss of each token, [N], from ratios [N] and advantages [N]; the formula is at the top of
    this file.
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


@dataclass(frozen=True, slots=True)
class Ppo(ClippedPolicyGradient):
    """The algorithm under one configuration (an ``Algorithm``)."""

    config: PpoConfig

    needs_values = True

    def credit(self, groups: Sequence[Group]) -> list[list[Columns | None]]:
        """See the top of this file; a completion without tokens is left out."""
        return token_credit(groups, self._judge, whiten)

    def _judge(self, sequence: TokenSequence, reward: float) -> tuple[list[float], list[float]]:
        assert sequence.values is not None, "advantages of tokens need values"
        values = sequence.of_response(sequence.values).tolist()
        rewards = token_rewards(sequence, reward)
        return advantages_and_returns(rewards, values, self.config.gamma, self.config.lam)

    def further_terms(self, scores: TokenScores, batch: PackedBatch) -> Terms:
        """The value loss, weighted."""
        assert scores.values is not None, "the policy needs a value head"
        assert batch.values is not None, "the batch needs the values of before the step"
        assert batch.returns is not None, "the batch needs returns"
        near = scores.values.clamp(
            batch.values - self.config.value_clip, batch.values + self.config.value_clip
        )
        plain, clipped = (scores.values - batch.returns).square(), (near - batch.returns).square()
        loss = 0.5 * torch.maximum(plain, clipped)
        returns = batch.returns.double()
        error = returns - scores.values.detach().double()
        sums = {
            "value/loss": loss.detach().double().sum(),
            "value/clip_fraction": (clipped > plain).sum(),
            "value_error": error.sum(),
            "value_error_square": error.square().sum(),
            "return_mean": returns.sum(),
            "return_square": returns.square().sum(),
        }
        return Terms(
            self.config.value_coefficient * loss,
            {name: float(value) for name, value in sums.items()},
        )


def explained_variance(means: Mapping[str, float]) -> float | None:
    """From the means that the loss reports, over all tokens of an update; None where the returns
    are all equal.
    """
    variance = means["return_square"] - means["return_mean"] ** 2
    if variance <= 0:
        return None
    return 1 - (means["value_error_square"] - means["value_error"] ** 2) / variance
