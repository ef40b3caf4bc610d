"""What the units share: descriptions of masters, access to gradients, and bytes."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch

from isobit.kernels.sizes import Sizes
from isobit.models.routes import Routes
from isobit.models.weights import Weights
from isobit.precision.flow import Graph, SiteShape

Gradient = Callable[[str], torch.Tensor]
"""A master's FP32 gradient by name, to be added to; zeros where it has none yet."""


@dataclass(frozen=True, slots=True)
class Master:
    """One FP32 tensor that the optimiser moves."""

    shape: tuple[int, ...]
    parts: Mapping[str, int]
    """The checkpoint's tensors that it puts together along its rows, with the rows of each.  None
    where checkpoints do not have it: then it starts at zeros, and no model folder gets it.
    """
    kind: Literal["matrix", "bias", "plain"] = "plain"
    """A linear's matrix [N, K], quantised as its site says; its bias [N]; or a tensor that is
    published in the format between operators.
    """

    def of_checkpoint(self, values: torch.Tensor) -> dict[str, torch.Tensor]:
        """The checkpoint's tensors by name: the parts' rows of ``values``, not copied."""
        if not self.parts:
            return {}
        return dict(zip(self.parts, values.split(list(self.parts.values())), strict=True))


Masters = Mapping[str, Master]
"""By name, in the order of the forward pass."""


@dataclass(frozen=True, slots=True)
class UnitBytes:
    """Bytes of a unit in a pass with a backward; a token each, but for the last."""

    saved: int
    """What its backward reads."""
    input: int
    """Of ``saved``, the residual stream: all that stays where the unit is computed again."""
    read: int
    """The norm as the first linear reads it, while the unit is computed."""
    kept: int
    """What else the forward makes beside what it saves."""
    made: int
    """What the forward makes where nothing is saved."""
    gradients: int
    """What the backward makes beside what was saved, and beside the residual stream's gradient."""
    once: int
    """The largest matrix that the backward makes for itself, whatever the tokens."""
    saved_once: int = 0
    """What its backward reads, whatever the tokens: rows that fill blocks."""
    made_once: int = 0
    """What the forward makes, whatever the tokens; then ``once`` comes beside ``gradients``, not
    behind them.
    """
    noted: int = 0
    """What a forward notes in ``Routes`` and keeps to its end, where nothing is saved."""


class MlpUnit(Protocol):
    """The second half of a layer, of whatever kind.  What it saves is its own, and no tensor: that
    is how a pass knows what it has to ask for again.  A unit that routes notes it in ``routes``,
    where a pass has any.
    """

    def sites(self) -> tuple[SiteShape, ...]:
        """In the order of the forward."""
        ...

    def masters(self) -> Masters:
        """In the order of the forward."""
        ...

    def forward(
        self, weights: Weights, h: torch.Tensor, x: torch.Tensor | None, routes: Routes | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """h and x [T, C] -> the residual stream, and what there is to add to it."""
        ...

    def saving_forward(
        self, weights: Weights, h: torch.Tensor, x: torch.Tensor | None, routes: Routes | None
    ) -> tuple[torch.Tensor, torch.Tensor, Any]:
        """The same bits, and what the backward reads."""
        ...

    def again(self, weights: Weights, h: torch.Tensor, x: torch.Tensor | None) -> Any:
        """What ``saving_forward`` saves, from the residual stream h + x."""
        ...

    def backward(
        self,
        weights: Weights,
        gradient: Gradient,
        saved: Any,
        d: torch.Tensor,
        routes: Routes | None,
    ) -> torch.Tensor:
        """The gradient of the residual stream behind this unit [T, C] -> before it."""
        ...

    def bytes(self, sizes: Sizes, graph: Graph) -> UnitBytes:
        """Of a token of the training forward."""
        ...


def norm_master(width: int, name: str) -> Master:
    """The weight [width] of an RMSNorm, which the checkpoint calls ``name``."""
    return Master((width,), {name: width})
