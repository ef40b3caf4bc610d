"""What the losses of the family have in common.

    loss = sum over tokens i of   w[i] * ( c[i] * l[i]  +  kl_coefficient * KL[i]
                                           -  entropy_coefficient * H[i] )

w is the mean over the update (``isobit.algorithms.mean``), l the algorithm's own term of a token
(its surrogate), c the weight of the corrections for tokens that another policy drew
(``isobit.algorithms.corrections``), KL an estimate of the divergence from the reference
(``isobit.algorithms.kl``), H the entropy of the distribution that the token was drawn from.  What
has no coefficient is not computed: without KL, entropy and corrections the loss has the bits of
``(w * l).sum()``.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from isobit.algorithms.kl import k1, k3, token_kl
from isobit.algorithms.mean import mean_weights
from isobit.algorithms.objective import Credit, JudgedGroup, LossOutputs, Shares
from isobit.config.algorithm import LossConfig
from isobit.records.batch import PackedBatch
from isobit.records.scores import TokenScores


@dataclass(frozen=True, slots=True)
class Terms:
    """A part of the loss, token by token, and what to report of it as ``LossOutputs`` does."""

    loss: torch.Tensor
    """[N]"""
    sums: dict[str, float] = field(default_factory=dict)
    maxima: dict[str, float] = field(default_factory=dict)
    minima: dict[str, float] = field(default_factory=dict)


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
    def credit(self, groups: Sequence[JudgedGroup]) -> list[list[Credit | None]]:
        """The groups of a step -> what is learnt from each completion; None leaves it out."""

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
        found, reports = terms.loss, [terms]
        if batch.importance is not None:
            found = found * batch.importance
        further = self.further_terms(scores, batch)
        if further is not None:
            found = found + further.loss
            reports.append(further)
        if self.config.kl_coefficient > 0 and self.config.kl_in == "loss":
            assert batch.reference_log_probs is not None, "a penalty needs the reference's scores"
            divergence = token_kl(
                self.config.kl_estimator, scores.log_probs, batch.reference_log_probs
            )
            found = found + self.config.kl_coefficient * divergence
        if self.config.entropy_coefficient > 0:
            found = found - self.config.entropy_coefficient * scores.entropies
        return LossOutputs(
            (shares.mean * found).sum(),
            {name: value for one in reports for name, value in one.sums.items()}
            | _divergences(scores, batch),
            {name: value for one in reports for name, value in one.maxima.items()},
            {name: value for one in reports for name, value in one.minima.items()},
        )


def _divergences(scores: TokenScores, batch: PackedBatch) -> dict[str, float]:
    """Sums of both estimates that are unbiased, where there is a reference."""
    if batch.reference_log_probs is None:
        return {}
    pair = scores.log_probs.detach().double(), batch.reference_log_probs.double()
    return {"kl_k1": float(k1(*pair).sum()), "kl_k3": float(k3(*pair).sum())}
