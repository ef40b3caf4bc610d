"""The scorer: log-probabilities and entropies of given sequences under published weights, and
the values of their states where the model has a head for them (a reward model's are its scores, and
all it has).

It is what training, ``isobit verify`` and ``isobit verify --bisect`` compute with; it needs no
masters and no optimiser.  With ``ScoredPass`` the same forward can be taken back.
"""

from typing import Generic, TypeVar

import torch

from isobit.config.training import Recompute
from isobit.errors import NonFiniteError
from isobit.kernels.operands import RouterLoss
from isobit.kernels.router_loss import sequence_means
from isobit.models.packed_pass import PackedPass
from isobit.models.policy import Policy
from isobit.models.routes import RouterCoefficients, Routes
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
        routes = policy.decoder.routes()
        hidden = policy.decoder.hidden_states(weights, token_ids, attend, routes)
        rows = to_device(batch.rows)
        targets, temperatures = to_device(batch.targets), to_device(batch.temperatures)
        made = _scores(policy, hidden.index_select(0, rows), targets, temperatures)
        return _on_host(made, routes, rows)


class ScoredPass:
    """The scores of one batch, and the way back from their gradient to the masters."""

    def __init__(
        self,
        policy: Policy,
        batch: PackedBatch,
        recompute: Recompute,
        coefficients: RouterCoefficients | None = None,
    ) -> None:
        """``coefficients`` are of the router's own losses of each sequence, which the backward adds
        where the policy has experts.
        """
        self.batch = batch
        self._policy, to_device = policy, policy.backend.to_device
        self._routes = _routes_with_loss(policy, batch, coefficients)
        self._pass = PackedPass(
            policy,
            to_device(batch.token_ids),
            to_device(batch.positions),
            batch.lengths,
            recompute,
            self._routes,
        )
        self._rows, self._targets = to_device(batch.rows), to_device(batch.targets)
        self._temperatures = to_device(batch.temperatures)
        self._hidden: torch.Tensor | None = None

    @torch.no_grad()
    def forward(self) -> TokenScores:
        """The bits of ``Scorer.score``; raises as it does."""
        self._hidden = self._pass.forward().index_select(0, self._rows)
        made = _scores(self._policy, self._hidden, self._targets, self._temperatures)
        return _on_host(made, self._routes, self._rows)

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
        self._pass.backward(self._d_hidden(d_log_probs, d_entropies, d_values))

    def _d_hidden(
        self,
        d_log_probs: torch.Tensor | None,
        d_entropies: torch.Tensor | None,
        d_values: torch.Tensor | None,
    ) -> torch.Tensor:
        """The gradient of the hidden states [T, C], through the heads.  What it is made of is gone
        when the layers' turn comes.
        """
        assert self._hidden is not None, "the forward comes first"
        hidden, self._hidden = self._hidden, None
        d_rows = self._through_head(hidden, d_log_probs, d_entropies)
        if d_values is not None:
            through = self._through_value(hidden, d_values)
            d_rows = through if d_rows is None else d_rows.add_(through)
        assert d_rows is not None, "the loss depends on no score"
        tokens = self.batch.token_ids.numel()
        return d_rows.new_zeros((tokens, hidden.shape[1])).index_copy_(0, self._rows, d_rows)

    def _through_head(
        self,
        hidden: torch.Tensor,
        d_log_probs: torch.Tensor | None,
        d_entropies: torch.Tensor | None,
    ) -> torch.Tensor | None:
        """[N, C], through lm_head."""
        if d_log_probs is None:
            if d_entropies is None:
                return None
            d_log_probs = torch.zeros_like(d_entropies)
        policy = self._policy
        return policy.decoder.lm_head.backward(
            policy.weights("training"),
            policy.gradient,
            hidden,
            self._targets,
            self._temperatures,
            self._on_device(d_log_probs),
            None if d_entropies is None else self._on_device(d_entropies),
        )

    def _through_value(self, hidden: torch.Tensor, d_values: torch.Tensor) -> torch.Tensor:
        """[N, C], through the scalar head."""
        policy = self._policy
        assert policy.decoder.value is not None, "a model without a scalar head has no values"
        weights, d = policy.weights("training"), self._on_device(d_values)
        return policy.decoder.value.backward(weights, policy.gradient, hidden, d)

    def _on_device(self, d: torch.Tensor) -> torch.Tensor:
        """As kernels read it: autograd's gradient of a mean is one number, spread."""
        return self._policy.backend.to_device(d.contiguous())


def _scores(
    policy: Scorable, hidden: torch.Tensor, targets: torch.Tensor, temperatures: torch.Tensor
) -> TokenScores:
    """By every head that the decoder has, of the hidden states [N, C] that predict the targets; on
    the policy's device.
    """
    decoder, weights = policy.decoder, policy.weights("training")
    log_probs = entropies = temperatures.new_empty(0)
    if decoder.head is not None:
        log_probs, entropies = decoder.head.token_log_probs(weights, hidden, targets, temperatures)
    values = None if decoder.value is None else decoder.value.forward(weights, hidden)
    return TokenScores(log_probs, entropies, values)


def _routes_with_loss(
    policy: Policy, batch: PackedBatch, coefficients: RouterCoefficients | None
) -> Routes | None:
    """What notes the routing of a batch that is learnt from; None for a dense policy."""
    if not policy.decoder.is_sparse:
        return None
    wanted = coefficients or RouterCoefficients()
    means = policy.backend.to_device(sequence_means(batch.lengths))
    return policy.decoder.routes(RouterLoss(means, wanted.balance, wanted.z))


def _on_host(found: TokenScores, routes: Routes | None, rows: torch.Tensor) -> TokenScores:
    """With the routing of the rows, int64 [N], that predict the targets; raises NonFiniteError."""
    log_probs = found.log_probs.cpu()
    if not torch.isfinite(log_probs).all():
        raise NonFiniteError(
            "training forward: the log-probability of a sampled token is not finite"
        )
    return TokenScores(
        log_probs,
        found.entropies.cpu(),
        None if found.values is None else found.values.cpu(),
        None if routes is None else routes.digests().index_select(0, rows).cpu(),
        None if routes is None else routes.scores(),
    )
