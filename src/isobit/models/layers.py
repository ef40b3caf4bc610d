"""What the units of a decoder share: published weights, masters, linears, norms, the routing of a
forward, and bytes for the memory plan.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Literal

import torch

from isobit.kernels.backend import Backend
from isobit.kernels.operands import (
    HeadWeight,
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
from isobit.models.quantised_checkpoint import MasterValues, master_of
from isobit.models.tensor_parallel import WHOLE, Cuts, TensorParallel
from isobit.precision.flow import Graph, LinearShape, SiteShape
from isobit.precision.kv_scales import KvScales
from isobit.records.batch import RouterScores


@dataclass(slots=True)
class Weights:
    """What one side of a flow reads: a LinearWeight for each linear by path, and the other tensors
    in the activations' format by the names of their masters.
    """

    backend: Backend
    rope: RopeTable
    graph: Graph
    linears: dict[str, LinearWeight] = field(default_factory=dict)
    plain: dict[str, torch.Tensor] = field(default_factory=dict)
    head: HeadWeight | None = None  # None in a reward model
    tensor_parallel: TensorParallel = WHOLE  # which part of each linear these are
    kv_scales: KvScales | None = None  # of both sides, where they have scales a tensor
    kv_maxima: torch.Tensor | None = None  # those of ``kv_scales`` that these weights raise

    @property
    def lm_head(self) -> HeadWeight:
        """``head`` of a language model."""
        assert self.head is not None, "a reward model has no lm_head"
        return self.head


_MULTIPLIER = 0x9E3779B97F4A7C15
_WORD = 1 << 64


@dataclass(frozen=True, slots=True)
class RouterCoefficients:
    """Weights of the router's losses for one sequence in one layer."""

    balance: float = 0.0
    z: float = 0.0


class Routes:
    """A forward's routing: a digest of each token's experts and, in training, router losses and
    load.
    """

    def __init__(self, loss: RouterLoss | None = None) -> None:
        """A ``loss`` collects the router's figures as well, even if its coefficients are 0."""
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
        """The loss, if any coefficient is not 0."""
        return self.loss if self.loss is not None and (self.loss.balance or self.loss.z) else None

    def digests(self) -> torch.Tensor:
        """int64 [T]."""
        return digests(self._experts)

    def scores(self) -> RouterScores | None:
        """The router's figures, on the host; None if none were collected."""
        if not self._losses:
            return None
        balance, z = (torch.stack(kind).mean(0).cpu() for kind in zip(*self._losses, strict=True))
        return RouterScores(balance, z, torch.stack(self._load).long().cpu())


def digests(experts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The chosen experts int32 [T, k] of each sparse layer -> a digest of each token, int64 [T].

    With c_1 .. c_n a token's experts, by layer and rank, the digest is the sum of (c_i + 1) M^(n -
    i) mod 2^64: different experts give the same one with a probability of 2^-64. It is computed on
    the device, so that a captured step includes it.
    """
    chosen = torch.cat(list(experts), 1)
    return ((chosen.long() + 1) * _powers(chosen.shape[1], chosen.device)).sum(1)


@cache
def _powers(count: int, device: torch.device) -> torch.Tensor:
    """M^(count - 1) .. M^0 mod 2^64, int64 [count]. Cached: a captured step cannot copy from the
    host.
    """
    powers = [pow(_MULTIPLIER, exponent, _WORD) for exponent in reversed(range(count))]
    signed = [power - _WORD if power >= _WORD // 2 else power for power in powers]
    return torch.tensor(signed).to(device)


Gradient = Callable[[str], torch.Tensor]
"""A master's FP32 gradient by name, to be added to; zeros if it has none yet."""


@dataclass(frozen=True, slots=True)
class Master:
    """One FP32 tensor that the optimiser updates."""

    shape: tuple[int, ...]
    parts: Mapping[str, int]
    """The checkpoint's tensors that are concatenated along its rows, with the rows of each. Empty
    if checkpoints do not have it: then it starts at zeros, and is not written to model folders.
    """
    kind: Literal["matrix", "bias", "plain"] = "plain"
    """A linear's matrix [N, K] or bias [N], or a tensor published in the activations' format."""

    def of_checkpoint(self, values: torch.Tensor) -> dict[str, torch.Tensor]:
        """The checkpoint's tensors by name: the parts' rows of ``values``, not copied."""
        if not self.parts:
            return {}
        return dict(zip(self.parts, values.split(list(self.parts.values())), strict=True))


Masters = Mapping[str, Master]  # by name, in the order of the forward


@dataclass(frozen=True, slots=True)
class UnitBytes:
    """Bytes of a unit in a pass with a backward, for each token or, as noted, in total."""

    saved: int  # what its backward reads
    input: int  # of `saved`, the residual stream: all that is kept if the unit is computed again
    read: int  # the norm as the first linear reads it, while the unit is computed
    kept: int  # what the forward makes beside `saved`
    made: int  # what the forward makes if nothing is saved
    gradients: int  # what the backward makes beside `saved` and the residual stream's gradient
    once: int  # in total: the largest matrix that the backward makes
    saved_once: int = 0  # in total: padding of rows to whole blocks in what the backward reads
    made_once: int = 0  # in total: what the forward makes; then `once` adds to `gradients`
    noted: int = 0  # what a forward keeps in `Routes` to its end, even if nothing is saved


def norm_master(width: int, name: str) -> Master:
    """The weight [width] of an RMSNorm, which the checkpoint calls ``name``."""
    return Master((width,), {name: width})


@dataclass(frozen=True, slots=True)
class Linear:
    """The linear ``path``, "layers.N.NAME", with its three products.

        FProp  Y = X W^T       DGrad  dX = dY W       WGrad  dW += dY^T X

    A bias is a master of the linear, but the reader of Y adds it (``QkvTransform``).
    """

    path: str
    shape: LinearShape
    checkpoint_path: str  # the checkpoint's module that contains its matrices
    has_bias: bool = False

    def site(self, layer: int) -> SiteShape:
        return SiteShape(self.path, "linear", layer, self.shape)

    def masters(self) -> dict[str, Master]:
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
        """``forward``, gathering its input, of which each rank has its ``cuts``, and its output [T,
        C].
        """
        split = weights.tensor_parallel
        whole = split.input(weights.backend, x, cuts)
        return split.columns(self.forward(weights, whole), split.hidden)

    def input(self, weights: Weights, x: torch.Tensor, save: bool, cuts: Cuts = ()) -> LinearInput:
        """x [T, K], of which each rank has its ``cuts``, as this linear reads it, with ``save``
        also as its WGrad does. What is quantised together is gathered before.
        """
        site, split = weights.linears[self.path].site, weights.tensor_parallel
        if split.cuts_groups(site, cuts):
            x = split.columns(x, cuts)
        return weights.backend.linear_input(x, site, save)

    def backward(
        self,
        weights: Weights,
        gradient: Gradient,
        dy: torch.Tensor | OutputGradient,
        x: Operand | None,
    ) -> torch.Tensor:
        """dY [T, N], plain or as DGrad and WGrad read it -> dX [T, K]; adds to W's gradient."""
        assert x is not None, "the forward has saved"
        if isinstance(dy, torch.Tensor):
            dy = weights.backend.output_gradient(dy, weights.linears[self.path].site)
        weights.backend.wgrad(dy.tokens, x, gradient(f"{self.path}.weight"))
        return weights.backend.dgrad(dy.rows, weights.linears[self.path])


def observe_input(x: LinearInput, path: str) -> None:
    """Pass the input of the linear ``path``, as FProp reads it, to the observer."""
    if isinstance(x.read, torch.Tensor):
        observe(x.read, path, "input")
    else:
        observe(x.read.values, path, "input", scales=x.read.scales)


@dataclass(frozen=True, slots=True)
class Norm:
    """RMSNorm at the start of a unit: h = h + x, y = RMSNorm(h), in the format of y's reader."""

    path: str
    width: int
    checkpoint_name: str
    epsilon: float
    residual: str  # the observer's name of the sum h + x
    linear: str | None = None
    """The linear that reads y; None for the last norm, which lm_head reads."""

    def masters(self) -> dict[str, Master]:
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
        """h and x [T, C] -> the residual stream, its norm [T, C], and the linear's input."""
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


_READERS = {
    "input_norm": ("qkv_proj",),
    "post_attention_norm": ("gate_up_proj", "router", "experts.gate_up_proj"),
}
"""What reads a layer's norms."""
_OUTSTANDING = 2.0


def outstanding(norm: torch.Tensor) -> torch.Tensor:
    """A norm's weight [C] -> the power of two, FP32 [C], by which each channel stands out: 1 for
    weights of up to ``_OUTSTANDING`` times the median's size, else the smallest that brings them to
    the median or below.  What moves lowers the median, so it is looked for again until nothing
    stands out: a norm that was divided by its factors has none, when it is saved and loaded again.

    ``benchmarks.outliers`` compares the flows; with 8 or 4 times, ``int8`` was further from
    ``fp32`` wherever a norm had outliers.
    """
    size, factor = norm.abs().float(), torch.ones_like(norm, dtype=torch.float32)
    while True:
        left = size / factor
        times = left / left.median().clamp(min=torch.finfo(torch.float32).tiny)
        stand_out = (times > _OUTSTANDING) & times.isfinite()
        if not stand_out.any():
            return factor
        factor = torch.where(stand_out, factor * torch.exp2(torch.log2(times).ceil()), factor)


def fold_norms(
    masters: Iterable[tuple[str, MasterValues]],
    is_folded: Callable[[str], bool],
    note: Callable[[int], None],
) -> Iterator[tuple[str, MasterValues]]:
    """The masters of a decoder in which no channel of a norm stands out, where ``is_folded`` of the
    linear that reads it, by path: INT8 has one scale a token, in which such a channel would leave
    the others few steps.  The norm's weights are divided by ``outstanding`` and the columns of what
    reads it multiplied: the same function, and in BF16 the same numbers times powers of two.
    ``note`` gets the number of channels of each norm that is changed.
    """
    factors: dict[str, torch.Tensor] = {}
    for name, values in masters:
        path = name.removesuffix(".weight")
        layer, _, own = path.rpartition(".")
        readers = [f"{layer}.{reader}" for reader in _READERS.get(own, ())]
        if any(map(is_folded, readers)):
            assert isinstance(values, torch.Tensor), "a norm is not quantised"
            # A plan's norms are shapes without numbers.
            factor = None if values.is_meta else outstanding(values)
            if factor is not None and (channels := int((factor > 1).sum())):
                note(channels)
                values = values / factor
                factors |= dict.fromkeys(readers, factor)
        elif path in factors:
            wide = values if isinstance(values, torch.Tensor) else master_of(values)
            values = wide * factors.pop(path)
        yield name, values


def about_folded(channels: Sequence[int]) -> str:
    """What to say of norms that were changed, from what ``fold_norms`` has noted."""
    return (
        f"isobit: {sum(channels)} channels of {len(channels)} norms, whose weights are more than "
        f"{_OUTSTANDING:g} times the median, are moved into the matrices behind them for INT8: "
        "the same function"
    )
