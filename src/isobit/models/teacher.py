"""A frozen model of the policy's tokens, and the divergence of the policy from it.

With p the policy's distribution of a token and q a frozen model's of the same place, over the
tokens of the tokenizer and at the same temperature:

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

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from isobit.config.algorithm import KlDirection
from isobit.models.decoder import Scorable
from isobit.models.packed_pass import target_states
from isobit.models.policy import Policy
from isobit.records.batch import PackedBatch

_UNITS = 2.0**40
"""Units of a nat in which the divergence is summed."""


@dataclass(frozen=True, slots=True)
class Teacher:
    """A frozen model of the policy's tokens, and the divergence of the policy from it."""

    model: Scorable
    kl: KlDirection
    top_k: int = 0
    """Tokens of the teacher's distribution that count one by one; 0 is all."""

    def hidden_states(self, batch: PackedBatch) -> torch.Tensor:
        """The teacher's hidden states that predict the N targets of a batch, [N, its own C]."""
        return target_states(self.model, batch, self.model.decoder.routes())[0]

    @torch.no_grad()
    def divergences(
        self,
        policy: Scorable,
        hidden: torch.Tensor,
        teacher_hidden: torch.Tensor,
        temperatures: torch.Tensor,
    ) -> torch.Tensor:
        """hidden [N, C] of the policy and ``teacher_hidden`` of the teacher, which predict the same
        tokens, temperatures FP32 [N] -> FP32 [N], nats; NaN where logits are not finite.
        """
        divergences = torch.empty_like(temperatures)
        for part, log_p, log_q in self._parts(policy, hidden, teacher_hidden, temperatures):
            divergences[part] = self._divergence(log_p, log_q)
        return divergences

    @torch.no_grad()
    def backward(
        self,
        policy: Policy,
        hidden: torch.Tensor,
        teacher_hidden: torch.Tensor,
        temperatures: torch.Tensor,
        d: torch.Tensor,
    ) -> torch.Tensor:
        """The gradient of the divergences, FP32 [N] -> that of hidden; adds lm_head's."""
        head = policy.decoder.lm_head
        weights = policy.weights("training")
        d_hidden = []
        grad = None if head.is_frozen else policy.gradient(head.master)
        scaled = (d / temperatures)[:, None]
        for part, log_p, log_q in self._parts(policy, hidden, teacher_hidden, temperatures):
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
        teacher_hidden: torch.Tensor,
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
                for model, states in ((policy, hidden), (self.model, teacher_hidden))
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
