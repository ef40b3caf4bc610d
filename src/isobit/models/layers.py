"""What the units of a decoder share: published weights, masters, linears, norms, and bytes for the
memory plan.
"""

from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Literal

import torch

from isobit.kernels.backend import Backend, HybridOperations
from isobit.kernels.observing import observe
from isobit.kernels.operands import (
    ADAPTER_PARTS,
    AdapterGradients,
    AdapterWeight,
    HeadWeight,
    LinearInput,
    LinearWeight,
    Operand,
    OutputGradient,
    RopeTable,
)
from isobit.kernels.sizes import Sizes
from isobit.models.config import Lora, ModelConfig
from isobit.models.families import FAMILIES
from isobit.models.tensor_parallel import WHOLE, Cuts, TensorParallel
from isobit.precision.flow import Graph, LinearShape, SiteShape
from isobit.precision.kv_scales import KvScales
from isobit.precision.quant_tensor import DTYPES


@dataclass(slots=True)
class Weights:
    """The weights that one side of a flow reads: a LinearWeight for each linear by path, which may
    be gathered as it is asked for (``isobit.models.slices``), and the others in the activations'
    format by the names of their masters.
    """

    backend: Backend
    rope: RopeTable
    graph: Graph
    linears: MutableMapping[str, LinearWeight] = field(default_factory=dict[str, LinearWeight])
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

    @property
    def hybrid(self) -> HybridOperations:
        return self.backend.hybrid


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
    adapter: Mapping[str, int] = field(default_factory=dict)
    """The tensors in PEFT's files that are concatenated in a matrix of LoRA, which has no
    ``parts``; with their rows.
    """
    offset: float = 0.0
    """What is added to a plain tensor's published numbers, which are FP32 then: 1 for norms whose
    weights have their centre at zero.
    """

    @property
    def modules(self) -> dict[str, int]:
        """The rows of each part by its module's own name: q_proj of layers.0.self_attn.q_proj."""
        return {part.split(".")[-2]: rows for part, rows in self.parts.items()}

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
    attended: int = (
        0  # where rows are shared: what attention's forward makes for each of its tokens
    )
    attended_gradients: int = 0  # the same in its backward
    attended_saved: int = 0  # of `saved`, what is kept for each of attention's tokens, not each row


def norm_master(width: int, name: str, offset: float = 0.0) -> Master:
    """The weight [width] of an RMSNorm, which the checkpoint calls ``name``."""
    return Master((width,), {name: width}, offset=offset)


@dataclass(frozen=True, slots=True)
class Adapter:
    """LoRA on the targets among the matrices that the linear ``path`` fuses (arXiv 2106.09685):

        t = x A^T       t = t * scale       u = t B^T       y = y + u

    with the BF16 x that the linear quantises, and in the format between operators after each step:
    A and B are linears in that format, with the same products in rollout and training.  Each target
    has an A [r, K], which are stacked and multiplied at once, and a B [its columns of y, r].
    """

    path: str
    linear: LinearShape
    checkpoint_path: str
    rank: int
    scale: float
    targets: tuple[str, ...]  # of the linear's parts, in their order
    columns: tuple[slice, ...] = field(init=False)
    """The columns of the linear's output that belong to each target."""

    def __post_init__(self) -> None:
        ends = dict(zip(self.linear.parts, accumulate(self.linear.parts.values()), strict=True))
        places = {name: slice(end - self.linear.parts[name], end) for name, end in ends.items()}
        object.__setattr__(self, "columns", tuple(places[name] for name in self.targets))

    def sites(self, layer: int) -> tuple[SiteShape, SiteShape]:
        down = LinearShape(dict.fromkeys(self.targets, self.rank), self.linear.in_features)
        up = LinearShape({target: self.linear.parts[target] for target in self.targets}, self.rank)
        return (
            SiteShape(f"{self.path}.lora_A", "adapter", layer, adapter=down),
            SiteShape(f"{self.path}.lora_B", "adapter", layer, adapter=up),
        )

    def masters(self) -> dict[str, Master]:
        masters: dict[str, Master] = {}
        for site in self.sites(0):
            shape, kind = site.adapter, site.name.rpartition(".")[2]
            assert shape is not None
            names = {
                f"base_model.model.{self.checkpoint_path}.{one}.{kind}.weight": rows
                for one, rows in shape.parts.items()
            }
            size = shape.out_features, shape.in_features
            masters[f"{site.name}.weight"] = Master(size, {}, "matrix", names)
        return masters

    def add(
        self, weights: Weights, x: torch.Tensor, y: torch.Tensor, save: bool = False
    ) -> torch.Tensor | None:
        """x [T, K]; the linear's output y [T, N] is written to. -> t of all targets [T, R], which
        with ``save`` is there.
        """
        return weights.backend.add_adapter(y, x, self.weight(weights), save)

    def backward(
        self,
        weights: Weights,
        gradient: Gradient,
        dy: torch.Tensor,
        saved: "SavedInput",
        dx: torch.Tensor,
    ) -> None:
        """dY [T, N], and the linear's own dX [T, K], to which the adapter's is added; adds to the
        gradients of A and B.
        """
        assert isinstance(saved.x, torch.Tensor), "an adapter reads X in BF16"
        assert saved.low is not None, "the forward has saved"
        grads = (gradient(f"{self.path}.lora_{kind}.weight") for kind in "AB")
        weights.backend.adapter_backward(
            dy, saved.x, saved.low, dx, self.weight(weights), AdapterGradients(*grads)
        )

    def weight(self, weights: Weights) -> AdapterWeight:
        down, up = (weights.linears[f"{self.path}.lora_{kind}"] for kind in "AB")
        return AdapterWeight(down, up, self.columns, self.scale)


@dataclass(frozen=True, slots=True)
class SavedInput:
    """Tensors of its forward that the backward of a linear reads."""

    x: Operand | None = None  # its input [T, K] as WGrad reads it
    low: torch.Tensor | None = None  # t of its adapter, [T, R]


@dataclass(frozen=True, slots=True)
class Linear:
    """The linear ``path``, "layers.N.NAME", with its three products.

        FProp  Y = X W^T       DGrad  dX = dY W       WGrad  dW += dY^T X

    A bias is a master of the linear, but the reader of Y adds it (``QkvTransform``), unless it
    ``adds_bias`` itself.  With ``lora`` the matrix is frozen: it has no gradient, and an adapter
    where it has a target.
    """

    path: str
    shape: LinearShape
    checkpoint_path: str  # the checkpoint's module that contains its matrices
    has_bias: bool = False
    lora: Lora | None = None
    adds_bias: bool = False
    adapter: Adapter | None = field(init=False, default=None)
    """The linear's adapter; None where no matrix is a target."""

    def __post_init__(self) -> None:
        lora, adapter = self.lora, None
        if lora is not None:
            targets = tuple(name for name in self.shape.parts if name in lora.targets)
            if targets:
                path = self.checkpoint_path
                adapter = Adapter(self.path, self.shape, path, lora.rank, lora.scale, targets)
        object.__setattr__(self, "adapter", adapter)

    def saves(self, save: bool) -> bool:
        """Whether its input is wanted as WGrad reads it, which with LoRA is BF16: by a backward
        (``save``), and always by an adapter.
        """
        return self.adapter is not None or (save and self.lora is None)

    def sites(self, layer: int) -> tuple[SiteShape, ...]:
        own, adapter = SiteShape(self.path, "linear", layer, self.shape), self.adapter
        return (own, *(() if adapter is None else adapter.sites(layer)))

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
        } | ({} if self.adapter is None else self.adapter.masters())

    def forward(self, weights: Weights, x: LinearInput) -> torch.Tensor:
        """[T, K] -> [T, N]; with an adapter ``x.saved`` is there, as ``saves`` says."""
        return self._forward(weights, x, save=False)[0]

    def saving_forward(self, weights: Weights, x: LinearInput) -> tuple[torch.Tensor, SavedInput]:
        """The same bits, and what the backward reads."""
        y, low = self._forward(weights, x, save=True)
        return y, SavedInput(x.saved, low)

    def _forward(
        self, weights: Weights, x: LinearInput, save: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        observe_input(x, self.path)
        y, low = weights.backend.linear(x.read, weights.linears[self.path]), None
        if self.adapter is not None:
            assert isinstance(x.saved, torch.Tensor), "an adapter reads its input in BF16"
            low = self.adapter.add(weights, x.saved, observe(y, self.path, "base"), save)
        bias = weights.linears[self.path].bias
        if bias is not None and self.adds_bias:
            y.add_(bias)  # in FP32, rounded once
        return observe(y, self.path), low

    def saved(self, weights: Weights, x: Operand | None) -> SavedInput:
        """The tensors that ``saving_forward`` saves, from the input as WGrad reads it, without the
        product.
        """
        if self.adapter is None:
            return SavedInput(x)
        assert isinstance(x, torch.Tensor), "an adapter reads its input in BF16"
        return SavedInput(x, weights.backend.adapter_low(x, self.adapter.weight(weights)))

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
        saved: SavedInput,
    ) -> torch.Tensor:
        """dY [T, N], plain or as DGrad and WGrad read it -> dX [T, K]; adds to W's gradient, or to
        those of the adapter.
        """
        if isinstance(dy, torch.Tensor):
            if self.has_bias and self.adds_bias and self.lora is None:
                gradient(f"{self.path}.bias").add_(dy.float().sum(0))
            dy = weights.backend.output_gradient(dy, weights.linears[self.path].site)
        if self.lora is None:
            assert saved.x is not None, "the forward has saved"
            site = weights.linears[self.path].site
            weights.backend.wgrad(dy.tokens, saved.x, gradient(f"{self.path}.weight"), site)
        dx = weights.backend.dgrad(dy.rows, weights.linears[self.path])
        if self.adapter is not None:
            assert isinstance(dy.tokens, torch.Tensor), "an adapter reads dY in BF16"
            self.adapter.backward(weights, gradient, dy.tokens, saved, dx)
        return dx

    def saved_bytes(self, sizes: Sizes, graph: Graph, is_kept: bool = False) -> int:
        """Bytes a token of its input [K] and of t that are saved for a backward; ``is_kept``: the
        input itself stays.
        """
        if not self.saves(save=True):
            return 0
        low = 0 if self.adapter is None else self.adapter.rank * len(self.adapter.targets)
        return self._kept_bytes(sizes, graph, is_kept) + DTYPES[graph.activations].itemsize * low

    def read_bytes(self, sizes: Sizes, graph: Graph) -> int:
        """Bytes a token of its input [K], as it reads it in a forward without a backward, beside
        the input itself.
        """
        read = sizes.read(graph.site(self.path), self.shape.in_features)
        return read + (self._kept_bytes(sizes, graph) if self.saves(save=False) and read else 0)

    def adapter_bytes(self, graph: Graph, backward: bool = False) -> int:
        """Bytes that its adapter makes for a token: t of all targets, and its FP32 sums over up to
        ``ADAPTER_PARTS`` parts of the input; in the backward the gradient of t.
        """
        if (adapter := self.adapter) is None:
            return 0
        low = adapter.rank * len(adapter.targets)
        low_bytes = DTYPES[graph.activations].itemsize * low
        return low_bytes if backward else low_bytes + 4 * ADAPTER_PARTS * low

    def _kept_bytes(self, sizes: Sizes, graph: Graph, is_kept: bool = False) -> int:
        return sizes.saved(graph.site(self.path), self.shape.in_features, is_kept)


def observe_input(x: LinearInput, path: str) -> None:
    """Pass the input of the linear ``path``, as FProp reads it, to the observer."""
    if isinstance(x.read, torch.Tensor):
        observe(x.read, path, "input")
    else:
        observe(x.read.values, path, "input", scales=x.read.scales)


@dataclass(frozen=True, slots=True)
class Norm:
    """RMSNorm: h = h + x, y = RMSNorm(h), in the format of y's reader."""

    path: str
    width: int
    checkpoint_name: str
    epsilon: float
    residual: str  # the observer's name of the sum h + x
    linear: str | None = None
    """The linear that reads y; None for the last norm, which lm_head reads, and for one behind a
    unit.
    """
    is_frozen: bool = False
    scale: float = 1.0
    """The factor of the last norm's output."""
    offset: float = 0.0
    """What is added to its weights."""

    def masters(self) -> dict[str, Master]:
        return {f"{self.path}.weight": norm_master(self.width, self.checkpoint_name, self.offset)}

    def forward(
        self, weights: Weights, h: torch.Tensor, x: torch.Tensor | None, save: bool
    ) -> tuple[torch.Tensor, LinearInput]:
        """h and x [T, C] -> the residual stream, and its norm as the linear reads it."""
        h, _, read = self._forward(weights, h, x, save)
        assert read is not None
        return h, read

    def keeping(
        self, weights: Weights, h: torch.Tensor, x: torch.Tensor | None, save: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor, LinearInput]:
        """h and x [T, C] -> the residual stream, its norm [T, C], and the linear's input."""
        h, norm, read = self._forward(weights, h, x, save, keep=True)
        assert norm is not None
        assert read is not None
        return h, norm, read

    def final(
        self, weights: Weights, h: torch.Tensor, x: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """h and x [T, C] -> the residual stream, and its norm [T, C]."""
        h, norm, _ = self._forward(weights, h, x, save=False)
        assert norm is not None
        return h, norm if self.scale == 1 else norm.mul_(self.scale)

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
        result = weights.backend.add_rms_norm(h, x, weight, self.epsilon, site, save, keep)
        if x is not None:
            observe(result.h, self.residual)
        if result.norm is not None:
            observe(result.norm, self.path)
        return result.h, result.norm, result.input

    def backward(
        self,
        weights: Weights,
        gradient: Gradient,
        dy: torch.Tensor,
        h: torch.Tensor,
        d_residual: torch.Tensor | None,
    ) -> torch.Tensor:
        """d_residual + the gradient through the norm, whose input is h, [T, C]."""
        name = f"{self.path}.weight"
        weight, dy = weights.plain[name], dy if self.scale == 1 else dy * self.scale
        grad = None if self.is_frozen else gradient(name)
        return weights.backend.rms_norm_backward(dy, h, weight, self.epsilon, d_residual, grad)


@dataclass(frozen=True, slots=True)
class UnitNorms:
    """The norms of attention or an MLP, in front of it, behind it, or on both sides:

    h = h + x      y = front(h)      x = behind(unit(y))

    Without one in front the unit reads h itself.
    """

    residual: str  # the observer's name of the sum h + x
    linear: str  # that reads y
    front: Norm | None
    behind: Norm | None

    @classmethod
    def of(
        cls, config: ModelConfig, unit: Literal["attention", "mlp"], layer: int, linear: str
    ) -> "UnitNorms":
        path, traits, is_mlp = f"layers.{layer}", FAMILIES[config.family], unit == "mlp"
        residual = f"{path}.attention_residual" if is_mlp else f"layers.{layer - 1}.mlp_residual"

        def norm(name: str, checkpoint_name: str, reader: str | None) -> Norm:
            return Norm(
                f"{path}.{name}",
                config.hidden_size,
                f"model.{path}.{checkpoint_name}_layernorm.weight",
                config.stream_epsilon,
                residual,
                reader,
                config.lora is not None,
                offset=traits.norm_offset,
            )

        front = behind = None
        if traits.norms != "behind":
            in_front_of_mlp = "pre_feedforward" if traits.norms == "both" else "post_attention"
            names = ("post_attention_norm", in_front_of_mlp) if is_mlp else ("input_norm", "input")
            front = norm(*names, linear)
        if traits.norms != "in front":
            names = ("mlp", "post_feedforward") if is_mlp else ("attention", "post_attention")
            behind = norm(f"{names[0]}_output_norm", names[1], None)
        return cls(residual, linear, front, behind)

    def masters(self) -> dict[str, Master]:
        return {
            name: master
            for norm in (self.front, self.behind)
            if norm is not None
            for name, master in norm.masters().items()
        }

    def forward(
        self, weights: Weights, h: torch.Tensor, x: torch.Tensor | None, save: bool
    ) -> tuple[torch.Tensor, LinearInput]:
        """h and x [T, C] -> the residual stream, and y as the linear reads it."""
        if self.front is not None:
            return self.front.forward(weights, h, x, save)
        h = h if x is None else observe(h + x, self.residual)
        return h, weights.backend.linear_input(h, weights.linears[self.linear].site, save)

    def output(self, weights: Weights, x: torch.Tensor) -> torch.Tensor:
        """A unit's output [T, C] -> what it adds to the residual stream."""
        return x if self.behind is None else self.behind.final(weights, x, None)[1]

    def saved(
        self, h: torch.Tensor, x: torch.Tensor
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """The residual stream and a unit's output, each where the backward of a norm reads it."""
        return None if self.front is None else h, None if self.behind is None else x

    def backward(
        self,
        weights: Weights,
        gradient: Gradient,
        dy: torch.Tensor,
        h: torch.Tensor | None,
        d_residual: torch.Tensor,
    ) -> torch.Tensor:
        """d_residual + the gradient of y, through the norm in front, whose input is h: [T, C]."""
        if self.front is None:
            return d_residual + dy
        assert h is not None, "the forward has saved"
        return self.front.backward(weights, gradient, dy, h, d_residual)

    def output_backward(
        self, weights: Weights, gradient: Gradient, d: torch.Tensor, x: torch.Tensor | None
    ) -> torch.Tensor:
        """The gradient of ``output`` -> that of its input x, [T, C]."""
        if self.behind is None:
            return d
        assert x is not None, "the forward has saved"
        return self.behind.backward(weights, gradient, d, x, None)

    @property
    def saved_streams(self) -> int:
        """The tensors of the residual stream's size that ``saved`` keeps."""
        return (self.front is not None) + (self.behind is not None)
