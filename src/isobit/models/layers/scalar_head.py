"""A head of one output on the final hidden states: the value of each state (PPO's critic), or the
score of a whole sequence at its last token (a reward model).
"""

from dataclasses import dataclass

import torch

from isobit.models.layers.unit import Gradient, Master
from isobit.models.weights import Weights


@dataclass(frozen=True, slots=True)
class ScalarHead:
    """The matrix [1, C], published in the format between operators; its sums are FP32."""

    path: str
    width: int
    checkpoint_name: str | None
    """None where no checkpoint has it: then it starts at zeros."""

    @property
    def master(self) -> str:
        """The name of its master."""
        return f"{self.path}.weight"

    def masters(self) -> dict[str, Master]:
        """The matrix."""
        parts = {} if self.checkpoint_name is None else {self.checkpoint_name: 1}
        return {self.master: Master((1, self.width), parts)}

    def forward(self, weights: Weights, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [N, C] -> FP32 [N]."""
        return weights.backend.scalar_head(hidden, weights.plain[self.master][0])

    def backward(
        self, weights: Weights, gradient: Gradient, hidden: torch.Tensor, d: torch.Tensor
    ) -> torch.Tensor:
        """The gradient of the outputs, FP32 [N] -> that of ``hidden`` [N, C]."""
        weight, grad = weights.plain[self.master][0], gradient(self.master)[0]
        return weights.backend.scalar_head_backward(hidden, weight, d, grad)
