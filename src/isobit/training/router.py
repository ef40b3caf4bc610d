"""The router's own losses in an update: their coefficients, and the figures that show whether the
experts are used.

The loss of an update is the objective's and, over its S sequences and all sparse layers,

    1/S * sum over s, layers of  router_balance * balance_s + router_z * z_s

(``isobit.kernels.router_loss``): a mean over sequences, however they are cut into micro-batches.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from isobit.config.training import OptimisationConfig
from isobit.models.routes import RouterCoefficients
from isobit.records.batch import PackedBatch
from isobit.records.scores import RouterScores


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
