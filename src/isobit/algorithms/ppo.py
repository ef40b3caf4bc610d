"""PPO with a value head (arXiv 1707.06347; for language models: 2203.02155)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from isobit.algorithms.advantages import advantages_and_returns, token_credit, token_rewards, whiten
from isobit.algorithms.objective import Columns
from isobit.algorithms.policy_gradient import ClippedPolicyGradient, Terms
from isobit.config.algorithm import PpoConfig
from isobit.records.batch import PackedBatch, TokenScores
from isobit.records.sequence import TokenSequence
from isobit.records.text import Group


@dataclass(frozen=True, slots=True)
class Ppo(ClippedPolicyGradient):
    """PPO: the clipped surrogate with advantages of single tokens, and a critic.

    Advantages are those of generalised advantage estimation, token by token
    (``advantages_and_returns``), whitened over all tokens of the step.  The value head learns the
    returns R with a loss that is clipped around V_old, its value before the step (as the authors'
    code has it):

        l_value = max((V - R)^2, (V_old + clip(V - V_old, -value_clip, value_clip) - R)^2) / 2

    which joins the loss with ``value_coefficient``.  Reported are ``value/loss``,
    ``value/clip_fraction`` (tokens for which the clipped term was the larger) and four means from
    which the explained variance follows.
    """

    config: PpoConfig

    needs_values = True

    def credit(self, groups: Sequence[Group]) -> list[list[Columns | None]]:
        """Advantages and returns of tokens; a completion without tokens is left out."""
        return token_credit(groups, self._estimate, whiten)

    def _estimate(self, sequence: TokenSequence, reward: float) -> tuple[list[float], list[float]]:
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
    """The explained variance of the values, from the means that the loss reports over all tokens of
    an update; None where the returns are all equal.

        1 - (value_error_square - value_error^2) / (return_square - return_mean^2)
    """
    variance = means["return_square"] - means["return_mean"] ** 2
    if variance <= 0:
        return None
    return 1 - (means["value_error_square"] - means["value_error"] ** 2) / variance
