"""The metrics of an update: what each micro-batch reports, and the reduction over all of them in
their order, by every rank alike, whichever rank computed what.

How a metric is reduced stands in its row of the table (``isobit.records.metrics``).  Two things are
no metrics of single micro-batches and are added up beside them: the load of the experts, whose
busiest and idle ones are known at the end of the update only, and the log-probabilities that are
compared with the recorded ones.

A mixture of experts adds its router's losses to the objective's: over the S sequences of the update
and all sparse layers,

    1/S * sum over s, layers of  router_balance * balance_s + router_z * z_s

(``isobit.kernels.operands``), a mean over sequences, however they are cut into micro-batches.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from isobit.algorithms.objective import LossOutputs
from isobit.config.tables import OptimisationConfig
from isobit.models.layers import RouterCoefficients
from isobit.records.batch import PackedBatch, RouterScores, TokenScores
from isobit.records.metrics import Metrics, add_microbatch, of_update
from isobit.training.comparison import ComparedTokens, Comparison


def router_coefficients(
    config: OptimisationConfig, batches: Sequence[PackedBatch]
) -> RouterCoefficients:
    """The coefficients of one sequence of an update."""
    sequences = sum(len(batch.lengths) for batch in batches)
    return RouterCoefficients(config.router_balance / sequences, config.router_z / sequences)


@dataclass(frozen=True, slots=True)
class UpdateMetrics:
    """What one update did.  Where it was skipped, the metrics cover what ran before."""

    metrics: Metrics
    tokens: int
    """Response tokens."""
    comparison: Comparison
    mismatch: Metrics
    """Of the tokens compared; empty where none were."""
    skipped: str | None = None
    """Why it was not taken, or None."""


def microbatch_figures(scores: TokenScores, outputs: LossOutputs, compare: bool) -> dict[str, Any]:
    """What one micro-batch adds to an update's metrics, as a message
    (``isobit.parallel.world``); with ``compare`` its log-probabilities and experts as well.
    """
    router = scores.router
    return {
        "loss": float(outputs.loss.detach()),
        "metrics": {
            "entropy": float(scores.entropies.detach().double().sum()),
            **outputs.metrics,
        },
        "log_probs": scores.log_probs.detach() if compare else None,
        "routings": scores.routings if compare else None,
        "router": None if router is None else [router.balance, router.z, router.load],
    }


@dataclass(slots=True)
class UpdateTotals:
    """What the micro-batches of one update have added up to so far; ``compare`` adds the comparison
    with the recorded log-probabilities.
    """

    compare: bool
    loss: float = 0.0
    tokens: int = 0
    totals: Metrics = field(default_factory=dict)
    compared: ComparedTokens = field(default_factory=ComparedTokens.none)
    sequences: int = 0
    balance: float = 0.0
    z: float = 0.0
    load: torch.Tensor | None = None
    """int64 [layers, E], tokens of each expert; None for a model without experts."""

    def add(self, batch: PackedBatch, figures: Mapping[str, Any]) -> None:
        """Add the next micro-batch."""
        self.loss += figures["loss"]
        self.tokens += batch.rows.numel()
        add_microbatch(self.totals, figures["metrics"])
        if self.compare:
            self._compare(batch, figures["log_probs"], figures["routings"])
        if figures["router"] is not None:
            self._add_router(RouterScores(*figures["router"]))

    def _compare(
        self, batch: PackedBatch, log_probs: torch.Tensor, routings: torch.Tensor | None
    ) -> None:
        """Compare the fresh tokens: what is replayed, or was sampled ahead, was drawn from other
        weights and rightly has other log-probabilities.
        """
        fresh = slice(None) if batch.fresh is None else batch.fresh
        self.compared.add(batch.recorded_log_probs[fresh], log_probs[fresh])
        if batch.recorded_routings is not None and routings is not None:
            self.compared.add_routings(batch.recorded_routings[fresh], routings[fresh])

    def _add_router(self, scores: RouterScores) -> None:
        self.sequences += scores.balance.numel()
        self.balance += float(scores.balance.double().sum())
        self.z += float(scores.z.double().sum())
        self.load = scores.load if self.load is None else self.load + scores.load

    def metrics(
        self, norm: float, rate: float, changed: float, skipped: str | None
    ) -> UpdateMetrics:
        """The metrics of the update, with the gradient norm, the learning rate and the share of
        published bytes that changed.
        """
        metrics: Metrics = {
            "loss": self.loss,
            "grad_norm": norm,
            "learning_rate": rate,
            "response_tokens": self.tokens,
            "weight_bytes_changed": changed,
            **of_update(self.totals, self.tokens),
            **self._router_metrics(),
        }
        comparison, mismatch = self.compared.comparison(), self.compared.mismatch()
        return UpdateMetrics(metrics, self.tokens, comparison, mismatch, skipped)

    def _router_metrics(self) -> Metrics:
        if self.load is None:
            return {}
        shares = self.load / self.load.sum(1, keepdim=True)
        return {
            "router/balance": self.balance / self.sequences,
            "router/z": self.z / self.sequences,
            "router/busiest": float(shares.max()),
            "router/idle": float((self.load == 0).sum()),
        }
