"""The scorer: log-probabilities and entropies of given sequences under published weights.

It is what training, ``isobit verify`` and ``isobit verify --bisect`` compute with; it needs no
masters and no optimiser.  With ``ScoredPass`` the same forward can be taken back.
"""

from typing import Generic, TypeVar

import torch

from isobit.config.training import Recompute
from isobit.errors import NonFiniteError
from isobit.models.packed_pass import PackedPass
from isobit.models.policy import Policy
from isobit.models.scorable import Scorable
from isobit.records.batch import PackedBatch
from isobit.records.scores import TokenScores

Model = TypeVar("Model", bound=Scorable)


class Scorer(Generic[Model]):
    """Scores packed sequences with the training side of a policy, or with a frozen model."""

    def __init__(self, policy: Model) -> None:
        self.policy = policy

    @torch.no_grad()
    def score(self, batch: PackedBatch) -> TokenScores:
        """The targets of a batch; raises NonFiniteError where a log-probability is not finite."""
        policy, weights = self.policy, self.policy.weights("training")
        to_device = policy.backend.to_device
        positions = to_device(batch.positions)
        attend = policy.backend.packed_attention(policy.flow.training, batch.lengths, positions)
        token_ids = to_device(batch.token_ids)
        hidden = policy.decoder.hidden_states(weights, token_ids, attend)
        rows = hidden.index_select(0, to_device(batch.rows))
        targets, temperatures = to_device(batch.targets), to_device(batch.temperatures)
        return _finite(policy.decoder.head.token_log_probs(weights, rows, targets, temperatures))


class ScoredPass:
    """The scores of one batch, and the way back from their gradient to the masters."""

    def __init__(self, policy: Policy, batch: PackedBatch, recompute: Recompute) -> None:
        self.batch = batch
        self._policy, to_device = policy, policy.backend.to_device
        self._pass = PackedPass(
            policy, to_device(batch.token_ids), to_device(batch.positions), batch.lengths, recompute
        )
        self._rows, self._targets = to_device(batch.rows), to_device(batch.targets)
        self._temperatures = to_device(batch.temperatures)
        self._hidden: torch.Tensor | None = None

    @torch.no_grad()
    def forward(self) -> TokenScores:
        """The bits of ``Scorer.score``; raises as it does."""
        weights = self._policy.weights("training")
        self._hidden = self._pass.forward().index_select(0, self._rows)
        found = self._policy.decoder.head.token_log_probs(
            weights, self._hidden, self._targets, self._temperatures
        )
        return _finite(found)

    @torch.no_grad()
    def backward(
        self,
        d_log_probs: torch.Tensor | None,
        d_entropies: torch.Tensor | None = None,
        d_values: torch.Tensor | None = None,
    ) -> None:
        """Add the gradients to the masters' ``grad``: FP32 [N] each, the loss's gradient by each
        score, None where it does not depend on it.  The pass is used up.
        """
        assert d_log_probs is not None
        assert d_entropies is None
        assert d_values is None
        self._pass.backward(self._d_hidden(d_log_probs))

    def _d_hidden(self, d_log_probs: torch.Tensor) -> torch.Tensor:
        """The gradient of the hidden states [T, C], through lm_head.  What it is made of is gone
        when the layers' turn comes.
        """
        assert self._hidden is not None, "the forward comes first"
        policy, (hidden, self._hidden) = self._policy, (self._hidden, None)
        d_rows = policy.decoder.head.backward(
            policy.weights("training"),
            policy.gradient,
            hidden,
            self._targets,
            self._temperatures,
            policy.backend.to_device(d_log_probs),
        )
        tokens = self.batch.token_ids.numel()
        return d_rows.new_zeros((tokens, hidden.shape[1])).index_copy_(0, self._rows, d_rows)


def _finite(found: tuple[torch.Tensor, torch.Tensor]) -> TokenScores:
    log_probs, entropies = (values.cpu() for values in found)
    if not torch.isfinite(log_probs).all():
        raise NonFiniteError(
            "training forward: the log-probability of a sampled token is not finite"
        )
    return TokenScores(log_probs, entropies)
