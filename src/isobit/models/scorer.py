"""The scorer computes log-probabilities and entropies of given sequences under published weights,
and values if the model has a scalar head (a reward model has only those, its scores).

Training, ``isobit verify`` and ``isobit verify --bisect`` use it; scoring needs no masters and no
optimiser. ``ScoredPass`` runs the same forward, bit for bit, and then a backward that adds
gradients to the masters. With d the gradient of the residual stream after an operation, each linear
computes dX = dY W and adds dY^T X to its master's gradient; each norm gives d + (gradient through
the norm). Gradients between operators have the activations' format; those of masters are FP32,
summed in a fixed order with one addition per element and micro-batch
(``isobit.parallel.gradient_sum``), which is told when a group of masters
(``Decoder.backward_groups``) is complete.

``recompute`` saves memory by computing activations again in the backward, to the same bits: ``mlp``
leaves out everything after the second norm, about half of all; ``full`` keeps only the residual
stream of each layer. What will be computed again is first computed as in rollout, without WGrad's
copies.

**A teacher.** With p the policy's distribution of a token and q a frozen model's of the same place,
over the tokens of the tokenizer and at the same temperature:

    forward   KL(q || p) = sum over v of q (log q - log p)     d logits = (p - q) / temperature
    reverse   KL(p || q) = sum over v of p (log p - log q)     d logits = p (log p - log q - KL) /
                                                                          temperature

(forward: Hinton et al., arXiv 1503.02531; reverse: MiniLLM, arXiv 2306.08543; both on the policy's
own samples: GKD, arXiv 2306.13649). log p and log q have the bits of each model's own scores, so
equal models have a divergence and a gradient of exactly 0. With ``top_k`` the tokens outside of the
teacher's k likeliest (and of those as likely as the last of them) count as one outcome, with their
whole probability under p and under q: a lower bound of the divergence, for which outside

    log q  =  log p + log(sum of q outside) - log(sum of p outside)

takes the place of log q in all formulas above. The logits of a few rows exist at a time
(``Sizes.logits_at_once``), and the backward computes them again. The sum over v is of integers, in
units of 2^-40 nats, which has no order: a token's divergence depends on its row alone.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import torch

from isobit.config.algorithm import KlDirection
from isobit.config.training import Recompute
from isobit.kernels.operands import RouterLoss, sequence_means
from isobit.models.attention import SavedAttention
from isobit.models.decoder import Layer, Scorable
from isobit.models.mlp import RouterCoefficients, Routes
from isobit.models.policy import Policy
from isobit.parallel.world import run_and_gather
from isobit.precision.quant_tensor import Side
from isobit.records.batch import PackedBatch, TokenScores, first_fit_decreasing
from isobit.util.errors import ModelError, NonFiniteError

Saved = torch.Tensor | tuple[SavedAttention, Any]
"""What the halves of a layer save, or a tensor, the residual stream, to compute them from again."""


class PackedPass:
    """One forward over packed sequences of the training side, and its backward."""

    def __init__(
        self,
        policy: Policy,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        lengths: tuple[int, ...],
        recompute: Recompute,
        routes: Routes | None = None,
    ) -> None:
        """token_ids, positions: int64 [T], on the device. ``routes`` adds its loss to the router's
        gradient.
        """
        self._policy, self._decoder = policy, policy.decoder
        self._weights = policy.weights("training")
        if policy.kv_scales is not None and policy.kv_scales.calibration == "trainer":
            self._weights = replace(self._weights, kv_maxima=policy.kv_scales.learnt)
        self._token_ids, self._positions, self._recompute = token_ids, positions, recompute
        self._routes = routes
        graph = policy.flow.training
        self._attend = policy.backend.packed_attention(graph, lengths, positions)
        self._saved: list[Saved] = []
        self._last_h: torch.Tensor | None = None

    @torch.no_grad()
    def forward(self) -> torch.Tensor:
        """Hidden states [T, C], after the final norm."""
        h, x = self._decoder.embedding.forward(self._weights, self._token_ids), None
        for layer in self._decoder.layers:
            h, x = self._layer(layer, h, x)
        self._last_h, hidden = self._decoder.norm.final(self._weights, h, x)
        return hidden

    def backward(self, d_hidden: torch.Tensor) -> None:
        """Add the gradients of everything but lm_head to the masters' ``grad``; once per pass."""
        assert self._last_h is not None, "the forward comes first"
        weights, gradient = self._weights, self._policy.gradient
        with torch.no_grad():  # a decorator would hold d_hidden until the end
            norm = self._decoder.norm
            d = norm.backward(weights, gradient, d_hidden.contiguous(), self._last_h, None)
            self._last_h = None
            del d_hidden
            gradient.done(0)
            for done, layer in enumerate(reversed(self._decoder.layers), start=1):
                d = self._layer_backward(layer, d)
                gradient.done(done)
            self._decoder.embedding.backward(weights, gradient, d, self._token_ids)
            gradient.done(len(self._decoder.layers) + 1)

    def _layer(
        self, layer: Layer, h: torch.Tensor, x: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run a layer, saving what the backward reads unless it is to be computed again."""
        weights = self._weights
        if self._recompute == "full":
            h, x = layer.attention.forward(weights, h, x, self._attend)
            self._saved.append(h)
            return layer.mlp.forward(weights, h, x, self._routes)
        h, x, attention = layer.attention.saving_forward(weights, h, x, self._attend)
        if self._recompute == "mlp":
            h, x = layer.mlp.forward(weights, h, x, self._routes)
            self._saved.append((attention, h))
            return h, x
        h, x, mlp = layer.mlp.saving_forward(weights, h, x, self._routes)
        self._saved.append((attention, mlp))
        return h, x

    def _layer_backward(self, layer: Layer, d: torch.Tensor) -> torch.Tensor:
        """The gradient of the residual stream after a layer -> before it."""
        weights, gradient = self._weights, self._policy.gradient
        attention, mlp = self._take(layer)
        d = layer.mlp.backward(weights, gradient, mlp, d, self._routes)
        del mlp  # else it would be held beside the gradients of attention
        attend, positions = self._attend, self._positions
        return layer.attention.backward(weights, gradient, attend, positions, attention, d)

    def _take(self, layer: Layer) -> tuple[SavedAttention, Any]:
        """What the backward of a layer reads, computed again if it was not saved."""
        saved, weights = self._saved.pop(), self._weights
        if isinstance(saved, torch.Tensor):
            h, x, attention = layer.attention.saving_forward(weights, saved, None, self._attend)
            return attention, layer.mlp.again(weights, h, x)
        attention, mlp = saved
        if isinstance(mlp, torch.Tensor):
            mlp = layer.mlp.again(weights, mlp, None)
        return attention, mlp


Model = TypeVar("Model", bound=Scorable)


@dataclass(frozen=True, slots=True)
class Teacher:
    """A frozen model of the policy's tokens, and the divergence of the policy from it."""

    model: Scorable
    kl: KlDirection
    top_k: int = 0
    """Tokens of the teacher's distribution that count one by one; 0 is all."""

    def hidden_states(self, batch: PackedBatch) -> torch.Tensor:
        """What predicts the N targets of a batch, [N, its own C]."""
        return Scorer(self.model).hidden_states(batch, self.model.decoder.routes())[0]

    @torch.no_grad()
    def divergences(
        self,
        policy: Scorable,
        hidden: torch.Tensor,
        taught: torch.Tensor,
        temperatures: torch.Tensor,
    ) -> torch.Tensor:
        """hidden [N, C] of the policy and ``taught`` of the teacher, which predict the same tokens,
        temperatures FP32 [N] -> FP32 [N], nats; NaN where logits are not finite.
        """
        found = torch.empty_like(temperatures)
        for part, log_p, log_q in self._parts(policy, hidden, taught, temperatures):
            found[part] = self._divergence(log_p, log_q)
        return found

    @torch.no_grad()
    def backward(
        self,
        policy: Policy,
        hidden: torch.Tensor,
        taught: torch.Tensor,
        temperatures: torch.Tensor,
        d: torch.Tensor,
    ) -> torch.Tensor:
        """The gradient of the divergences, FP32 [N] -> that of hidden; adds lm_head's."""
        head, weights, d_hidden = policy.decoder.lm_head, policy.weights("training"), []
        grad = None if head.is_frozen else policy.gradient(head.master)
        scaled = (d / temperatures)[:, None]
        for part, log_p, log_q in self._parts(policy, hidden, taught, temperatures):
            d_logits = self._d_logits(log_p, log_q).mul_(scaled[part])
            del log_p, log_q
            d_hidden.append(
                policy.backend.head_logits_backward(hidden[part], weights.lm_head, d_logits, grad)
            )
        return torch.cat([hidden[:0], *d_hidden])

    def _parts(
        self,
        policy: Scorable,
        hidden: torch.Tensor,
        taught: torch.Tensor,
        temperatures: torch.Tensor,
    ) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
        """Some rows, and their log p and log q, FP32 [n, V]."""
        backend = policy.backend
        rows = max(1, backend.sizes.logits_at_once // policy.decoder.lm_head.num_drawn)
        for first in range(0, hidden.shape[0], rows):
            part = slice(first, first + rows)
            log_p, log_q = (
                backend.log_softmax(
                    model.decoder.lm_head.logits(model.weights("training"), states[part]),
                    temperatures[part],
                )
                for model, states in ((policy, hidden), (self.model, taught))
            )
            yield part, log_p, self._with_rest(log_p, log_q)

    def _with_rest(self, log_p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
        """log q in which all but the likeliest tokens stand for one outcome."""
        if not 0 < self.top_k < log_q.shape[1]:
            return log_q
        inside = log_q >= log_q.topk(self.top_k, -1).values[:, -1:]
        rest_q, rest_p = (
            torch.logsumexp(x.masked_fill(inside, -torch.inf), -1, keepdim=True)
            for x in (log_q, log_p)
        )
        shift = torch.where(inside.all(-1, keepdim=True), 0.0, rest_q - rest_p)
        return torch.where(inside, log_q, log_p + shift)

    def _divergence(self, log_p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
        """[n, V] each -> [n]."""
        if self.kl == "forward":
            log_p, log_q = log_q, log_p
        terms = log_p.exp() * (log_p - log_q)
        finite = torch.isfinite(terms).all(-1)
        total = terms.double().mul_(_UNITS).round_().long().sum(-1)
        return torch.where(finite, (total.double() / _UNITS).float(), torch.nan)

    def _d_logits(self, log_p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
        if self.kl == "forward":
            return log_p.exp().sub_(log_q.exp())
        divergence = self._divergence(log_p, log_q)[:, None]
        return (log_p - log_q).sub_(divergence).mul_(log_p.exp())


_UNITS = 2.0**40


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
        made = _scores(policy, hidden, targets, temperatures)
        if (teacher := self._teacher) is not None:
            taught = teacher.hidden_states(batch)
            found = teacher.divergences(policy, hidden, taught, temperatures)
            made = replace(made, divergences=found)
        return _on_host(made, routes, rows)

    @torch.no_grad()
    def hidden_states(
        self, batch: PackedBatch, routes: Routes | None = None, side: Side = "training"
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What predicts the N targets of a batch, [N, C] after the final norm, in the formats of a
        side, and its rows, int64 [N], on the device. Routing goes to ``routes``.
        """
        policy, to_device = self.policy, self.policy.backend.to_device
        positions, rows = to_device(batch.positions), to_device(batch.rows)
        attend = policy.backend.packed_attention(policy.flow.graph(side), batch.lengths, positions)
        token_ids = to_device(batch.token_ids)
        hidden = policy.decoder.hidden_states(policy.weights(side), token_ids, attend, routes)
        return hidden.index_select(0, rows), rows


def calibrate_kv_scales(
    policy: Policy, prompts: Sequence[Sequence[int]], tokens_per_batch: int
) -> None:
    """Set a policy's scales of Q, K and V by a forward of its rollout side over ``prompts``, of
    which each rank of its world takes some; all ranks call it with the same ones, while no engine
    has a live sample. The scales do not depend on batches and ranks
    (``isobit.precision.kv_scales``).
    """
    scales, world, to_device = policy.kv_scales, policy.world, policy.backend.to_device
    assert scales is not None, "the flow has scales a token"

    @torch.no_grad()
    def measure() -> list[list[float]]:
        mine = prompts[world.rank :: world.size]
        for members in first_fit_decreasing([len(ids) for ids in mine], tokens_per_batch):
            lengths = tuple(len(mine[place]) for place in members)
            token_ids = torch.tensor([token for place in members for token in mine[place]])
            positions = to_device(torch.cat([torch.arange(length) for length in lengths]))
            attend = policy.backend.packed_attention(policy.flow.rollout, lengths, positions)
            weights, routes = policy.weights("rollout"), policy.decoder.routes()
            policy.decoder.hidden_states(weights, to_device(token_ids), attend, routes)
        return scales.sampled.tolist()

    with scales.measuring():
        maxima = run_and_gather(world, measure)
    scales.take_prompts(maxima)


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
        self._teacher, self._taught = teacher, None

    @torch.no_grad()
    def forward(self) -> TokenScores:
        """The bits of ``Scorer.score``; raises as it does."""
        teacher = self._teacher
        if teacher is not None:  # before the pass fills the memory
            self._taught = teacher.hidden_states(self.batch)
        self._hidden = self._pass.forward().index_select(0, self._rows)
        made = _scores(self._policy, self._hidden, self._targets, self._temperatures)
        if teacher is not None and self._taught is not None:
            pair = self._hidden, self._taught
            found = teacher.divergences(self._policy, *pair, self._temperatures)
            made = replace(made, divergences=found)
        return _on_host(made, self._routes, self._rows)

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
        taught, self._taught = self._taught, None
        assert self._teacher is not None
        assert taught is not None, "the forward comes first"
        d = self._on_device(d_divergences)
        return self._teacher.backward(self._policy, hidden, taught, self._temperatures, d)

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
    wanted = coefficients or RouterCoefficients()
    means = policy.backend.to_device(sequence_means(batch.lengths))
    return policy.decoder.routes(RouterLoss(means, wanted.balance, wanted.z))


def _on_host(found: TokenScores, routes: Routes | None, rows: torch.Tensor) -> TokenScores:
    """Adds the routing of ``rows``, int64 [N], which predict the targets. Raises NonFiniteError."""
    log_probs = found.log_probs.cpu()
    if not torch.isfinite(log_probs).all():
        raise NonFiniteError(
            "training forward: the log-probability of a sampled token is not finite"
        )
    divergences = None if found.divergences is None else found.divergences.cpu()
    if divergences is not None and not torch.isfinite(divergences).all():
        raise NonFiniteError("the teacher's forward: its logits are not finite")
    return TokenScores(
        log_probs,
        found.entropies.cpu(),
        None if found.values is None else found.values.cpu(),
        None if routes is None else routes.digests().index_select(0, rows).cpu(),
        None if routes is None else routes.scores(),
        divergences,
    )
