"""The shared expert of a mixture: an MLP for every token, beside those that tokens are routed to.

    y = routed + sigmoid(g . b) x
    x = down_proj(silu(gate) * up),   (gate, up) = gate_up_proj(b)

b is the norm that the router reads. gate_up_proj and down_proj are linears in the flow's format,
and x is rounded to the format between operators. g is one row [1, C], which like the router is
never quantised: its product has FP32 sums and is not rounded; an adapter of g adds what it makes
of b, rounded as of any linear. The sigmoid, its product with x and the sum are in FP32, and y is
rounded once. Each row is computed for itself.
"""

from dataclasses import dataclass

import torch

from isobit.config.lora import SHARED_GATE
from isobit.kernels.observing import observe
from isobit.kernels.operands import ADAPTER_PARTS, Gate
from isobit.kernels.sizes import Sizes
from isobit.models.config import ModelConfig
from isobit.models.families import FAMILIES
from isobit.models.layers import Adapter, Gradient, Linear, Master, SavedInput, Weights
from isobit.precision.flow import Graph, LinearShape, SiteShape
from isobit.precision.quant_tensor import DTYPES


@dataclass(frozen=True, slots=True)
class SavedSharedExpert:
    """Tensors that the backward reads. Inputs of linears are in the format of WGrad's operand."""

    normed: SavedInput  # of gate and up
    gate_up: torch.Tensor
    activation: SavedInput  # of down
    made: torch.Tensor  # what down makes
    gate: torch.Tensor  # FP32 [T], in front of its sigmoid
    low: torch.Tensor | None  # t of the gate's adapter


@dataclass(frozen=True, slots=True)
class SharedBytes:
    """Bytes a token, but for ``once``."""

    saved: int  # what the backward reads
    kept: int  # what the forward makes beside it
    made: int  # what the forward makes if nothing is saved
    gradients: int  # what the backward makes
    once: int  # in total: the largest matrix that the backward makes


NO_SHARED = SharedBytes(0, 0, 0, 0, 0)


class SharedExpert:
    def __init__(self, config: ModelConfig, layer: int, block: str, width: int) -> None:
        """``block``: the checkpoint's module with the experts; ``width``: the intermediate size."""
        path, hidden = f"layers.{layer}.shared_expert", config.hidden_size
        self._path, self._layer, self._hidden, self._width = path, layer, hidden, width
        self._gate: Gate = FAMILIES[config.family].gate
        self._is_frozen = config.lora is not None
        self._gate_name = f"{path}_gate.weight"
        self._gate_master = Master((1, hidden), {f"{block}.{SHARED_GATE}.weight": 1})
        self._gate_adapter, lora = None, config.lora
        if lora is not None and SHARED_GATE in lora.targets:
            row = LinearShape({SHARED_GATE: 1}, hidden)
            self._gate_adapter = Adapter(
                f"{path}_gate", row, block, lora.rank, lora.scale, (SHARED_GATE,)
            )
        self._gate_up, self._down = (
            Linear(f"{path}.{name}", shape, f"{block}.shared_expert", lora=config.lora)
            for name, shape in (
                ("gate_up_proj", LinearShape({"gate_proj": width, "up_proj": width}, hidden)),
                ("down_proj", LinearShape({"down_proj": hidden}, width)),
            )
        )

    def sites(self) -> tuple[SiteShape, ...]:
        gate = () if self._gate_adapter is None else self._gate_adapter.sites(self._layer)
        return *gate, *self._gate_up.sites(self._layer), *self._down.sites(self._layer)

    def masters(self) -> dict[str, Master]:
        gate = {self._gate_name: self._gate_master}
        gate |= {} if self._gate_adapter is None else self._gate_adapter.masters()
        return {**gate, **self._gate_up.masters(), **self._down.masters()}

    def forward(self, weights: Weights, b: torch.Tensor, routed: torch.Tensor) -> torch.Tensor:
        """The norm and what the routed experts make -> y, [T, C] each."""
        read = self._gate_up.input(weights, b, self._gate_up.saves(save=False))
        gate_up = self._gate_up.forward(weights, read)
        site, save = weights.linears[self._down.path].site, self._down.saves(save=False)
        activation = weights.backend.swiglu_input(gate_up, site, save, self._gate)
        made = self._down.forward(weights, activation)
        return self._added(weights, routed, made, self._gate_of(weights, b)[0])

    def saving_forward(
        self, weights: Weights, b: torch.Tensor, routed: torch.Tensor
    ) -> tuple[torch.Tensor, SavedSharedExpert]:
        """The same bits, and what the backward reads."""
        read = self._gate_up.input(weights, b, self._gate_up.saves(save=True))
        gate_up, normed = self._gate_up.saving_forward(weights, read)
        site, save = weights.linears[self._down.path].site, self._down.saves(save=True)
        read = weights.backend.swiglu_input(gate_up, site, save, self._gate)
        made, activation = self._down.saving_forward(weights, read)
        gate, low = self._gate_of(weights, b, save=True)
        saved = SavedSharedExpert(normed, gate_up, activation, made, gate, low)
        return self._added(weights, routed, made, gate), saved

    def backward(
        self,
        weights: Weights,
        gradient: Gradient,
        saved: SavedSharedExpert,
        b: torch.Tensor,
        dy: torch.Tensor,
    ) -> torch.Tensor:
        """The gradient of y [T, C] -> that of the norm b, without what goes through the routed
        experts, whose output's gradient is that of y.
        """
        d_made, d_gate = weights.hybrid.add_shared_backward(dy, saved.made, saved.gate)
        d_activation = self._down.backward(weights, gradient, d_made, saved.activation)
        site = weights.linears[self._gate_up.path].site
        d_gate_up = weights.backend.swiglu_backward(d_activation, saved.gate_up, site, self._gate)
        row = weights.plain[self._gate_name][0]
        # with LoRA the row's own is made and goes nowhere
        grad = torch.zeros_like(row, dtype=torch.float32)
        if not self._is_frozen:
            grad = gradient(self._gate_name)[0]
        d_b = self._gate_up.backward(weights, gradient, d_gate_up, saved.normed)
        of_gate = weights.backend.scalar_head_backward(b, row, d_gate, grad)
        if self._gate_adapter is not None:
            d_row, read = d_gate[:, None].to(b.dtype), SavedInput(b, saved.low)
            self._gate_adapter.backward(weights, gradient, d_row, read, of_gate)
        return d_b + of_gate

    def bytes(self, sizes: Sizes, graph: Graph) -> SharedBytes:
        a = DTYPES[graph.activations].itemsize
        stream, width = a * self._hidden, a * self._width
        sites = graph.site(self._gate_up.path), graph.site(self._down.path)
        read = self._gate_up.read_bytes(sizes, graph) + 4
        activation = self._down.read_bytes(sizes, graph) or width
        linears = self._gate_up, self._down
        low, d_low = (
            max(linear.adapter_bytes(graph, backward) for linear in linears)
            for backward in (False, True)
        )
        rank = 0 if self._gate_adapter is None else self._gate_adapter.rank
        low = max(low, a * (rank + 1) + 4 * ADAPTER_PARTS * rank)
        saved = self._gate_up.saved_bytes(sizes, graph, is_kept=True)  # the norm itself stays
        saved += self._down.saved_bytes(sizes, graph) + 2 * width + stream + 4 + a * rank
        # the sum in FP32 is of two numbers, and a third is their rounding
        summed = 12 * self._hidden + stream
        return SharedBytes(
            saved=saved,
            kept=max(read + activation + low, summed),
            made=2 * stream + max(read + 2 * width + activation + low, summed),
            gradients=2 * stream
            + d_low
            + max(
                width + sizes.gradient(sites[0], 2 * self._width, self._hidden) + 2 * width,
                sizes.gradient(sites[1], self._hidden, self._width) + width,
                12 * self._hidden,
            ),
            once=max(
                sizes.transposed(site, linear.shape.in_features)
                for site, linear in zip(sites, linears, strict=True)
            ),
        )

    def _gate_of(
        self, weights: Weights, b: torch.Tensor, save: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """FP32 [T] in front of the sigmoid, and t of its adapter, which with ``save`` is there."""
        gate, low = weights.backend.scalar_head(b, weights.plain[self._gate_name][0]), None
        if self._gate_adapter is not None:
            added = b.new_zeros(len(b), 1)
            low = self._gate_adapter.add(weights, b, added, save)
            gate = gate + added[:, 0].float()
        return observe(gate, f"{self._path}_gate"), low

    def _added(
        self, weights: Weights, routed: torch.Tensor, made: torch.Tensor, gate: torch.Tensor
    ) -> torch.Tensor:
        return observe(weights.hybrid.add_shared(routed, made, gate), self._path, "sum")
