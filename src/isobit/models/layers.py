"""What the units share: descriptions of masters, access to gradients, and bytes.

What one side of the flow reads: published weights, the rotary table, and the back end that
computes with them.

What a forward notes of its routing, layer by layer: a digest of each token's experts, and, where
it is learnt from, the router's own losses and the load of the experts.

The digest of a token is one int64: with c_1 .. c_n its experts of all sparse layers, in the order
of the layers and of their ranks,

    digest = sum over i of (c_i + 1) M^(n - i)   mod 2^64

Two tokens that went other ways have the same digest once in 2^64.  All of it is a few integer
operations on the device at the end of a forward, so that a captured step has it as well.

A linear: its matrix, perhaps of several of the checkpoint's, and its three products.

    FProp  Y = X W^T       DGrad  dX = dY W       WGrad  dW += dY^T X

A bias is a master here, but is added by whoever reads Y (``QkvTransform``).

RMSNorm at the start of a unit: h = h + x, y = RMSNorm(h), as the linear behind it reads y.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal, Protocol

import torch

from isobit.kernels.backend import Backend
from isobit.kernels.operands import (
    LinearInput,
    LinearWeight,
    Operand,
    OutputGradient,
    RopeTable,
    RouterLoss,
    Routing,
    expert_load,
    observe,
    router_losses,
)
from isobit.kernels.sizes import Sizes
from isobit.models.tensor_parallel import WHOLE, Cuts, TensorParallel
from isobit.precision.flow import Graph, LinearShape, SiteShape
from isobit.records.batch import RouterScores


@dataclass(slots=True)
class Weights:
    """A LinearWeight for each linear by path, and the other tensors in the format between operators
    by the names of their masters; lm_head's matrix as ``head``.
    """

    backend: Backend
    rope: RopeTable
    graph: Graph
    linears: dict[str, LinearWeight] = field(default_factory=dict)
    plain: dict[str, torch.Tensor] = field(default_factory=dict)
    tensor_parallel: TensorParallel = WHOLE
    """Which part of each linear these are."""


_MULTIPLIER = 0x9E3779B97F4A7C15
_WORD = 1 << 64


@dataclass(frozen=True, slots=True)
class RouterCoefficients:
    """Of the losses of one sequence in one layer."""

    balance: float = 0.0
    z: float = 0.0


class Routes:
    """Collects the routing of one forward."""

    def __init__(self, loss: RouterLoss | None = None) -> None:
        """With a ``loss`` the router's figures are collected as well, whatever its coefficients."""
        self.loss = loss
        self._experts: list[torch.Tensor] = []
        self._losses: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._load: list[torch.Tensor] = []

    def add(self, routing: Routing) -> None:
        """The routing of the next sparse layer."""
        self._experts.append(routing.experts)
        if self.loss is not None:
            self._losses.append(router_losses(routing, self.loss.means))
            self._load.append(expert_load(routing))

    @property
    def loss_to_learn(self) -> RouterLoss | None:
        """The loss, where any coefficient is not 0."""
        return self.loss if self.loss is not None and (self.loss.balance or self.loss.z) else None

    def digests(self) -> torch.Tensor:
        """int64 [T]."""
        return digests(self._experts)

    def scores(self) -> RouterScores | None:
        """The router's figures, on the host; None where none were collected."""
        if not self._losses:
            return None
        balance, z = (torch.stack(kind).mean(0).cpu() for kind in zip(*self._losses, strict=True))
        return RouterScores(balance, z, torch.stack(self._load).long().cpu())


def digests(experts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The chosen experts int32 [T, k] of each sparse layer -> int64 [T]."""
    chosen = torch.cat(list(experts), 1)
    return ((chosen.long() + 1) * _powers(chosen.shape[1], chosen.device)).sum(1)


@cache
def _powers(count: int, device: torch.device) -> torch.Tensor:
    """M^(count - 1) .. M^0 mod 2^64, int64 [count].  Kept: a step that is captured cannot copy from
    the host.
    """
    powers = [pow(_MULTIPLIER, exponent, _WORD) for exponent in reversed(range(count))]
    signed = [power - _WORD if power >= _WORD // 2 else power for power in powers]
    return torch.tensor(signed).to(device)


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


@dataclass(frozen=True, slots=True)
class Linear:
    """The linear ``path``, "layers.N.NAME", a site of the flow."""

    path: str
    shape: LinearShape
    checkpoint_path: str
    """Where the checkpoint has its matrices, up to their own names."""
    has_bias: bool = False

    def site(self, layer: int) -> SiteShape:
        """Its site in the flow, in layer ``layer``."""
        return SiteShape(self.path, "linear", layer, self.shape)

    def masters(self) -> dict[str, Master]:
        """The matrix, then the bias."""
        rows = self.shape.out_features
        shapes: dict[str, tuple[int, ...]] = {"weight": (rows, self.shape.in_features)}
        if self.has_bias:
            shapes["bias"] = (rows,)
        return {
            f"{self.path}.{name}": Master(
                shape,
                {
                    f"{self.checkpoint_path}.{part}.{name}": n
                    for part, n in self.shape.parts.items()
                },
                "matrix" if name == "weight" else "bias",
            )
            for name, shape in shapes.items()
        }

    def forward(self, weights: Weights, x: LinearInput) -> torch.Tensor:
        """[T, K] -> [T, N]."""
        observe_input(x, self.path)
        return observe(weights.backend.linear(x.read, weights.linears[self.path]), self.path)

    def joined(self, weights: Weights, x: LinearInput, cuts: Cuts) -> torch.Tensor:
        """``forward`` to the residual stream, of an input whose ``cuts`` ranks that share the
        weights have made: all of it is read, and all of [T, C] given.
        """
        split = weights.tensor_parallel
        whole = split.input(weights.backend, x, cuts)
        return split.columns(self.forward(weights, whole), split.hidden)

    def input(self, weights: Weights, x: torch.Tensor, save: bool) -> LinearInput:
        """x [T, K] as this linear reads it, with ``save`` also as its WGrad will."""
        return weights.backend.linear_input(x, weights.linears[self.path].site, save)

    def backward(
        self,
        weights: Weights,
        gradient: Gradient,
        dy: torch.Tensor | OutputGradient,
        x: Operand | None,
    ) -> torch.Tensor:
        """dY [T, N], as it is or as DGrad and WGrad read it -> dX [T, K]; the gradient of the
        matrix is added to.
        """
        assert x is not None, "the forward has saved"
        if isinstance(dy, torch.Tensor):
            dy = weights.backend.output_gradient(dy, weights.linears[self.path].site)
        weights.backend.wgrad(dy.tokens, x, gradient(f"{self.path}.weight"))
        return weights.backend.dgrad(dy.rows, weights.linears[self.path])


def observe_input(x: LinearInput, path: str) -> None:
    """Show the input of the linear ``path`` as FProp reads it."""
    if isinstance(x.read, torch.Tensor):
        observe(x.read, path, "input")
    else:
        observe(x.read.values, path, "input", scales=x.read.scales)


@dataclass(frozen=True, slots=True)
class Norm:
    """The norm ``path`` of the residual stream."""

    path: str
    width: int
    checkpoint_name: str
    epsilon: float
    residual: str
    """What an observer knows the sum h + x by."""
    linear: str | None = None
    """The linear that reads it; None for the last norm, which lm_head reads."""

    def masters(self) -> dict[str, Master]:
        """The weight."""
        return {f"{self.path}.weight": norm_master(self.width, self.checkpoint_name)}

    def forward(
        self, weights: Weights, h: torch.Tensor, x: torch.Tensor | None, save: bool
    ) -> tuple[torch.Tensor, LinearInput]:
        """h and x [T, C] -> the residual stream, and its norm as the linear reads it."""
        assert self.linear is not None
        h, _, made = self._forward(weights, h, x, save)
        assert made is not None
        return h, made

    def keeping(
        self, weights: Weights, h: torch.Tensor, x: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, LinearInput]:
        """h and x [T, C] -> the residual stream, its norm [T, C], and that as the linear reads
        it.
        """
        h, norm, made = self._forward(weights, h, x, save=False, keep=True)
        assert norm is not None
        assert made is not None
        return h, norm, made

    def final(
        self, weights: Weights, h: torch.Tensor, x: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """h and x [T, C] -> the residual stream, and its norm [T, C]."""
        h, norm, _ = self._forward(weights, h, x, save=False)
        assert norm is not None
        return h, norm

    def _forward(
        self,
        weights: Weights,
        h: torch.Tensor,
        x: torch.Tensor | None,
        save: bool,
        keep: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None, LinearInput | None]:
        site = None if self.linear is None else weights.linears[self.linear].site
        weight = weights.plain[f"{self.path}.weight"]
        made = weights.backend.add_rms_norm(h, x, weight, self.epsilon, site, save, keep)
        if x is not None:
            observe(made.h, self.residual)
        if made.norm is not None:
            observe(made.norm, self.path)
        return made.h, made.norm, made.input

    def backward(
        self,
        weights: Weights,
        gradient: Gradient,
        dy: torch.Tensor,
        h: torch.Tensor,
        d_residual: torch.Tensor | None,
    ) -> torch.Tensor:
        """d_residual + the gradient through the norm, [T, C]."""
        name = f"{self.path}.weight"
        return weights.backend.rms_norm_backward(
            dy, h, weights.plain[name], self.epsilon, d_residual, gradient(name)
        )
