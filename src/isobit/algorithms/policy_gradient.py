"""What the losses of the family have in common.

    loss = sum over tokens i of   w[i] * ( c[i] * l[i]  +  kl_coefficient * KL[i]
                                           -  entropy_coefficient * H[i] )

w is the mean over the update (``mean_weights``), l the algorithm's own term of a token
(its surrogate), c the weight of the corrections for tokens that another policy drew
(``isobit.algorithms.corrections``), KL an estimate of the divergence from the reference
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
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from isobit.algorithms.objective import Columns, LossOutputs, Shares
from isobit.config.algorithm import KlEstimator, LossConfig, LossMean
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
    """The named estimate of each token, [N]: see the functions above."""
    return {"k1": k1, "k2": k2, "k3": k3}[estimator](log_probs, reference_log_probs)


def token_mean_weights(sequences: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """``1 / N`` for every token; takes and gives one tensor [N_m] a micro-batch, int64 and
    float32.
    """
    total = sum(sequence.numel() for sequence in sequences)
    return [
        torch.full(sequence.shape, 1.0 / max(total, 1), device=sequence.device)
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
        torch.full(sequence.shape, 1.0 / (max(total, 1) * constant), device=sequence.device)
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
