"""The scorer computes log-probabilities and entropies of given sequences under published weights,
and values if the model has a scalar head (a reward model has only those, its scores).

Training, ``isobit verify`` and ``isobit verify --bisect`` use it; scoring needs no masters and no
optimiser. ``ScoredPass`` runs the same forward, bit for bit, and then a backward that adds
gradients to the masters (``isobit.models.packed_pass``).
"""

from dataclasses import replace
from typing import Generic, TypeVar

import torch

from isobit.config.training import Recompute
from isobit.kernels.routing import RouterLoss, sequence_means
from isobit.models.decoder import Scorable
from isobit.models.mlp import RouterCoefficients, Routes
from isobit.models.packed_pass import PackedPass, target_states
from isobit.models.policy import Policy
from isobit.models.shared_prefix import SharedRows
from isobit.models.teacher import Teacher
from isobit.precision.quant_tensor import Side
from isobit.records.batch import PackedBatch, TokenScores
from isobit.util.errors import ModelError, NonFiniteError

Model = TypeVar("Model", bound=Scorable)


class Scorer(Generic[Model]):
    """Scores packed sequences with the training side of a policy, or with a frozen model; with a
    teacher also how far the policy is from it.
    """

    def __init__(self, policy: Model, teacher: Teacher | None = None) -> None:
        self.policy, self._teacher = policy, teacher

    @torch.no_grad()
    def score(self, batch: PackedBatch) -> TokenScores:
        """Raises NonFiniteError if a log-probability is not finite."""
        policy = self.policy
        _check_targets(policy, batch)
        routes, to_device = policy.decoder.routes(), policy.backend.to_device
        hidden, rows = self.hidden_states(batch, routes)
        targets, temperatures = to_device(batch.targets), to_device(batch.temperatures)
        scores = _scores(policy, hidden, targets, temperatures)
        if (teacher := self._teacher) is not None:
            teacher_hidden = teacher.hidden_states(batch)
            divergences = teacher.divergences(policy, hidden, teacher_hidden, temperatures)
            scores = replace(scores, divergences=divergences)
        return _on_host(scores, routes, rows)

    @torch.no_grad()
    def hidden_states(
        self, batch: PackedBatch, routes: Routes | None = None, side: Side = "training"
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The hidden states that predict the targets, and their rows (``target_states``)."""
        return target_states(self.policy, batch, routes, side)


class ScoredPass:
    """The scores of one batch, and the backward from their gradients to the masters."""

    def __init__(
        self,
        policy: Policy,
        batch: PackedBatch,
        recompute: Recompute,
        coefficients: RouterCoefficients | None = None,
        teacher: Teacher | None = None,
    ) -> None:
        """``coefficients`` weigh the router's losses of each sequence, if there are experts."""
        _check_targets(policy, batch)
        self.batch = batch
        self._policy, to_device = policy, policy.backend.to_device
        self._routes = _routes_with_loss(policy, batch, coefficients)
        self._shared = None if batch.row_of is None else SharedRows.of(batch, to_device)
        self._pass = PackedPass(
            policy,
            to_device(batch.token_ids),
            to_device(batch.positions),
            batch.lengths,
            recompute,
            self._routes,
            self._shared,
        )
        self._rows = to_device(batch.rows) if self._shared is None else self._shared.predicting
        self._targets = to_device(batch.targets)
        self._temperatures = to_device(batch.temperatures)
        self._hidden: torch.Tensor | None = None
        self._teacher, self._teacher_hidden = teacher, None

    @torch.no_grad()
    def forward(self) -> TokenScores:
        """The bits of ``Scorer.score``; raises as it does."""
        teacher = self._teacher
        if teacher is not None:  # before the pass fills the memory
            self._teacher_hidden = teacher.hidden_states(self.batch)
        self._hidden = self._pass.forward().index_select(0, self._rows)
        scores = _scores(self._policy, self._hidden, self._targets, self._temperatures)
        if teacher is not None and self._teacher_hidden is not None:
            pair = self._hidden, self._teacher_hidden
            divergences = teacher.divergences(self._policy, *pair, self._temperatures)
            scores = replace(scores, divergences=divergences)
        return _on_host(scores, self._routes, self._rows)

    @torch.no_grad()
    def backward(
        self,
        d_log_probs: torch.Tensor | None,
        d_entropies: torch.Tensor | None = None,
        d_values: torch.Tensor | None = None,
        d_divergences: torch.Tensor | None = None,
    ) -> None:
        """Add the gradients to the masters' ``grad``. The arguments are the loss's gradients by
        each score, FP32 [N], None where the loss does not depend on it. A pass has one backward.
        """
        self._pass.backward(self._d_hidden(d_log_probs, d_entropies, d_values, d_divergences))

    def _d_hidden(
        self,
        d_log_probs: torch.Tensor | None,
        d_entropies: torch.Tensor | None,
        d_values: torch.Tensor | None,
        d_divergences: torch.Tensor | None,
    ) -> torch.Tensor:
        """The gradient of the hidden states [T, C], through the heads, whose tensors are freed
        here.
        """
        assert self._hidden is not None, "the forward comes first"
        hidden, self._hidden = self._hidden, None
        d_rows = self._through_head(hidden, d_log_probs, d_entropies)
        if d_divergences is not None:
            through = self._through_teacher(hidden, d_divergences)
            d_rows = through if d_rows is None else d_rows.add_(through)
        if d_values is not None:
            through = self._through_value(hidden, d_values)
            d_rows = through if d_rows is None else d_rows.add_(through)
        assert d_rows is not None, "the loss depends on no score"
        if self._shared is not None:
            return self._shared.predicting_sum(d_rows)
        tokens = self.batch.token_ids.numel()
        return d_rows.new_zeros((tokens, hidden.shape[1])).index_copy_(0, self._rows, d_rows)

    def _through_head(
        self,
        hidden: torch.Tensor,
        d_log_probs: torch.Tensor | None,
        d_entropies: torch.Tensor | None,
    ) -> torch.Tensor | None:
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

    def _through_teacher(self, hidden: torch.Tensor, d_divergences: torch.Tensor) -> torch.Tensor:
        teacher_hidden, self._teacher_hidden = self._teacher_hidden, None
        assert self._teacher is not None
        assert teacher_hidden is not None, "the forward comes first"
        d = self._on_device(d_divergences)
        return self._teacher.backward(self._policy, hidden, teacher_hidden, self._temperatures, d)

    def _through_value(self, hidden: torch.Tensor, d_values: torch.Tensor) -> torch.Tensor:
        policy = self._policy
        assert policy.decoder.value is not None, "a model without a scalar head has no values"
        weights, d = policy.weights("training"), self._on_device(d_values)
        return policy.decoder.value.backward(weights, policy.gradient, hidden, d)

    def _on_device(self, d: torch.Tensor) -> torch.Tensor:
        """Contiguous, as kernels need it: autograd's gradient of a mean is one expanded number."""
        return self._policy.backend.to_device(d.contiguous())


def _check_targets(policy: Scorable, batch: PackedBatch) -> None:
    """Raises ModelError for a target outside of the distribution, in a batch on the host."""
    head, targets = policy.decoder.head, batch.targets
    if head is None or targets.device.type != "cpu" or not targets.numel():
        return
    if (largest := int(targets.max())) >= head.num_drawn:
        raise ModelError(
            f"token {largest} is to be scored, but the distribution holds 0 to "
            f"{head.num_drawn - 1}, the tokens of the tokenizer; it comes from another model or "
            "from a run of an older Isobit, which drew every row of lm_head: draw it again"
        )


def _scores(
    policy: Scorable, hidden: torch.Tensor, targets: torch.Tensor, temperatures: torch.Tensor
) -> TokenScores:
    """Scores by every head, from the hidden states [N, C] that predict the targets."""
    decoder, weights = policy.decoder, policy.weights("training")
    log_probs = entropies = temperatures.new_empty(0)
    if decoder.head is not None:
        log_probs, entropies = decoder.head.token_log_probs(weights, hidden, targets, temperatures)
    values = None if decoder.value is None else decoder.value.forward(weights, hidden)
    return TokenScores(log_probs, entropies, values)


def _routes_with_loss(
    policy: Policy, batch: PackedBatch, coefficients: RouterCoefficients | None
) -> Routes | None:
    """The routing of a batch that is trained on; None for a dense policy."""
    if not policy.decoder.is_sparse:
        return None
    weights = coefficients or RouterCoefficients()
    means = policy.backend.to_device(sequence_means(batch.lengths, batch.row_of))
    return policy.decoder.routes(RouterLoss(means, weights.balance, weights.z))


def _on_host(scores: TokenScores, routes: Routes | None, rows: torch.Tensor) -> TokenScores:
    """Adds the routing of ``rows``, int64 [N], which predict the targets. Raises NonFiniteError."""
    log_probs = scores.log_probs.cpu()
    if not torch.isfinite(log_probs).all():
        raise NonFiniteError(
            "training forward: the log-probability of a sampled token is not finite"
        )
    divergences = None if scores.divergences is None else scores.divergences.cpu()
    if divergences is not None and not torch.isfinite(divergences).all():
        raise NonFiniteError("the teacher's forward: its logits are not finite")
    return TokenScores(
        log_probs,
        scores.entropies.cpu(),
        None if scores.values is None else scores.values.cpu(),
        None if routes is None else routes.digests().index_select(0, rows).cpu(),
        None if routes is None else routes.scores(),
        divergences,
    )
