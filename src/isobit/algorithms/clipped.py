"""The clipped surrogate of PPO, token by token.

For a token with ratio r = pi(token) / pi_old(token) and advantage A (PPO, arXiv 1707.06347,
equation 7; two clip bounds: DAPO, arXiv 2503.14476, section 3.1):

    l = -min(r * A, clip(r, 1 - clip_low, 1 + clip_high) * A)

The gradient vanishes where the clip is active: r above the upper bound with A > 0, r below the
lower bound with A < 0.  Where the policy that sampled is the one being trained, bit for bit, r is
exactly 1 and l has the gradient of -A * log pi: REINFORCE's.

Dual clip (arXiv 1912.09729, equation 5) bounds what r * A can do where A < 0 and r is large, which
the minimum does not:

    l = -max(min(r * A, clip(r) * A), dual_clip * A)        where A < 0

Clip-Cov and KL-Cov (arXiv 2505.22617, section 4) treat the tokens that
``isobit.algorithms.clipped`` picks: Clip-Cov's give nothing (l = 0), and KL-Cov, which has no
clip, has

    l = -r * A + covariance_kl * |log r|  of those,   l = -r * A  of the others

The tokens of an update whose log-probability and advantage covary most.

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
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Self

import torch

from isobit.algorithms.objective import Shares
from isobit.algorithms.policy_gradient import PolicyGradient, Terms
from isobit.config.algorithm import TokenClipConfig
from isobit.records.batch import PackedBatch, TokenScores


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
