"""The figures of an update: what each micro-batch says, and the sums over all of them, added in
their order by every rank, whichever computed what.

The router's own losses in an update: their coefficients, and the figures that show whether the
experts are used.

The loss of an update is the objective's and, over its S sequences and all sparse layers,

    1/S * sum over s, layers of  router_balance * balance_s + router_z * z_s

(``isobit.kernels.operands``): a mean over sequences, however they are cut into micro-batches.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from isobit.algorithms.objective import LossOutputs
from isobit.config.tables import OptimisationConfig
from isobit.models.layers import RouterCoefficients
from isobit.records.batch import PackedBatch, RouterScores, TokenScores
from isobit.training.comparison import ComparedTokens, Comparison, Mismatch


def router_coefficients(
    config: OptimisationConfig, batches: Sequence[PackedBatch]
) -> RouterCoefficients:
    """Of one sequence of an update."""
    sequences = sum(len(batch.lengths) for batch in batches)
    return RouterCoefficients(config.router_balance / sequences, config.router_z / sequences)


@dataclass(slots=True)
class RouterTotals:
    """Sums over the micro-batches of an update."""

    sequences: int = 0
    balance: float = 0.0
    z: float = 0.0
    load: torch.Tensor | None = None
    """int64 [layers, E]"""

    def add(self, scores: RouterScores) -> None:
        """Another micro-batch."""
        self.sequences += scores.balance.numel()
        self.balance += float(scores.balance.double().sum())
        self.z += float(scores.z.double().sum())
        self.load = scores.load if self.load is None else self.load + scores.load

    def figures(self) -> dict[str, float]:
        """By name; nothing for a model without experts.

        ``router/busiest``: the largest share of a layer's choices that fell on one expert.
        ``router/idle``: experts of all layers that no token chose.
        """
        if self.load is None:
            return {}
        shares = self.load / self.load.sum(1, keepdim=True)
        return {
            "router/balance": self.balance / self.sequences,
            "router/z": self.z / self.sequences,
            "router/busiest": float(shares.max()),
            "router/idle": float((self.load == 0).sum()),
        }


@dataclass(frozen=True, slots=True)
class UpdateMetrics:
    """What one update did.  ``skipped`` says why it was not taken, or is None; then the
    means cover what ran before.
    """

    loss: float
    grad_norm: float  # before clipping
    learning_rate: float
    tokens: int  # response tokens
    entropy: float  # mean over those tokens, nats
    objective: dict[str, float]  # its own: means, maxima, minima over the tokens
    comparison: Comparison
    mismatch: Mismatch | None  # of the tokens compared; None where none were
    # share of the linears' published bytes that are others now; of numbers where they are BF16
    weight_bytes_changed: float
    skipped: str | None = None

    def scalars(self) -> dict[str, float]:
        """The figures by name, flat; names that end in ``_max`` are maxima, in ``_min`` minima."""
        return {
            "loss": self.loss,
            "grad_norm": self.grad_norm,
            "learning_rate": self.learning_rate,
            "response_tokens": self.tokens,
            "entropy": self.entropy,
            "weight_bytes_changed": self.weight_bytes_changed,
            **self.objective,
        }


def microbatch_figures(scores: TokenScores, outputs: LossOutputs, compare: bool) -> dict[str, Any]:
    """What one micro-batch adds to an update's figures, as a message
    (``isobit.parallel.world``); with ``compare`` its log-probabilities and experts as well.
    """
    router = scores.router
    return {
        "loss": float(outputs.loss.detach()),
        "entropy": float(scores.entropies.detach().double().sum()),
        "sums": dict(outputs.sums),
        "maxima": dict(outputs.maxima),
        "minima": dict(outputs.minima),
        "log_probs": scores.log_probs.detach() if compare else None,
        "routings": scores.routings if compare else None,
        "router": None if router is None else [router.balance, router.z, router.load],
    }


@dataclass(slots=True)
class UpdateTotals:
    """Sums over the micro-batches of one update; ``compare`` adds the comparison with the recorded
    log-probabilities.
    """

    compare: bool
    loss: float = 0.0
    tokens: int = 0
    entropy: float = 0.0
    sums: dict[str, float] = field(default_factory=dict)
    maxima: dict[str, float] = field(default_factory=dict)
    minima: dict[str, float] = field(default_factory=dict)
    compared: ComparedTokens = field(default_factory=ComparedTokens.none)
    router: RouterTotals = field(default_factory=RouterTotals)

    def add(self, batch: PackedBatch, figures: Mapping[str, Any]) -> None:
        """The next micro-batch."""
        self.loss += figures["loss"]
        self.tokens += batch.rows.numel()
        self.entropy += figures["entropy"]
        for name, value in figures["sums"].items():
            self.sums[name] = self.sums.get(name, 0.0) + value
        for name, value in figures["maxima"].items():
            self.maxima[name] = max(self.maxima.get(name, value), value)
        for name, value in figures["minima"].items():
            self.minima[name] = min(self.minima.get(name, value), value)
        if self.compare:
            self._compare(batch, figures["log_probs"], figures["routings"])
        if figures["router"] is not None:
            self.router.add(RouterScores(*figures["router"]))

    def _compare(
        self, batch: PackedBatch, log_probs: torch.Tensor, routings: torch.Tensor | None
    ) -> None:
        """What is replayed, or was sampled ahead, was drawn from other weights, and has other
        log-probabilities by right.
        """
        fresh = slice(None) if batch.fresh is None else batch.fresh
        self.compared.add(batch.recorded_log_probs[fresh], log_probs[fresh])
        if batch.recorded_routings is not None and routings is not None:
            self.compared.add_routings(batch.recorded_routings[fresh], routings[fresh])

    def metrics(
        self, norm: float, rate: float, changed: float, skipped: str | None
    ) -> UpdateMetrics:
        """Of the update that they are of."""
        means = {name: value / self.tokens for name, value in self.sums.items()}
        objective = means | self.maxima | self.minima | self.router.figures()
        return UpdateMetrics(
            self.loss,
            norm,
            rate,
            self.tokens,
            self.entropy / self.tokens,
            objective,
            self.compared.comparison(),
            self.compared.mismatch(),
            changed,
            skipped,
        )
