"""The MLP, the second half of a decoder layer.

h = h + x     b = norm(h)     x = down_proj(silu(gate) * up),   (gate, up) = gate_up_proj(b)
"""

from dataclasses import dataclass

import torch

from isobit.kernels.operands import Operand, is_observed, observe
from isobit.kernels.sizes import Sizes
from isobit.models.config import ModelConfig
from isobit.models.layers import Gradient, Linear, Master, Norm, Routes, UnitBytes, Weights
from isobit.precision.flow import Graph, LinearShape, SiteShape
from isobit.precision.quant_tensor import DTYPES


@dataclass(frozen=True, slots=True)
class SavedMlp:
    """What the backward reads. Inputs of linears are in the format of WGrad's operand."""

    h: torch.Tensor
    normed: Operand | None  # the input of gate and up
    gate_up: torch.Tensor
    activation: Operand | None  # the input of down


class Mlp:
    """The MLP of one layer. ``MixtureOfExperts`` has the same methods."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        path, hidden, width = f"layers.{layer}", config.hidden_size, config.intermediate_size
        self._path, self._layer, self._hidden = path, layer, hidden
        self._norm = Norm(
            f"{path}.post_attention_norm",
            hidden,
            f"model.{path}.post_attention_layernorm.weight",
            config.rms_epsilon,
            residual=f"{path}.attention_residual",
            linear=f"{path}.gate_up_proj",
        )
        checkpoint = f"model.{path}.mlp"
        gate_up = LinearShape({"gate_proj": width, "up_proj": width}, hidden)
        self._gate_up = Linear(f"{path}.gate_up_proj", gate_up, checkpoint)
        down = LinearShape({"down_proj": hidden}, width)
        self._down = Linear(f"{path}.down_proj", down, checkpoint)

    def sites(self) -> tuple[SiteShape, ...]:
        return self._gate_up.site(self._layer), self._down.site(self._layer)

    def masters(self) -> dict[str, Master]:
        return {**self._norm.masters(), **self._gate_up.masters(), **self._down.masters()}

    def forward(
        self, weights: Weights, h: torch.Tensor, x: torch.Tensor | None, routes: Routes | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """h and x [T, C] -> the residual stream, and what is to be added to it. ``routes`` is for
        experts.
        """
        h, b = self._norm.forward(weights, h, x, save=False)
        gate_up = self._gate_up.forward(weights, b)
        self._observe(weights, gate_up)
        site, split = weights.linears[self._down.path].site, weights.tensor_parallel
        if split.cuts_groups(site, split.width):
            mine = weights.backend.swiglu(gate_up)
            activation = self._down.input(weights, mine, False, split.width)
        else:
            activation = weights.backend.swiglu_input(gate_up, site)
        return h, self._down.joined(weights, activation, split.width)

    def saving_forward(
        self, weights: Weights, h: torch.Tensor, x: torch.Tensor | None, routes: Routes | None
    ) -> tuple[torch.Tensor, torch.Tensor, SavedMlp]:
        """The same bits, and what the backward reads."""
        h, b = self._norm.forward(weights, h, x, save=True)
        gate_up = self._gate_up.forward(weights, b)
        self._observe(weights, gate_up)
        site = weights.linears[self._down.path].site
        activation = weights.backend.swiglu_input(gate_up, site, save=True)
        x = self._down.forward(weights, activation)
        return h, x, SavedMlp(h, b.saved, gate_up, activation.saved)

    def again(self, weights: Weights, h: torch.Tensor, x: torch.Tensor | None) -> SavedMlp:
        """What ``saving_forward`` saves, from the residual stream h + x; without down_proj."""
        h, b = self._norm.forward(weights, h, x, save=True)
        gate_up = self._gate_up.forward(weights, b)
        site = weights.linears[self._down.path].site
        return SavedMlp(h, b.saved, gate_up, weights.backend.swiglu_saved(gate_up, site))

    def backward(
        self,
        weights: Weights,
        gradient: Gradient,
        saved: SavedMlp,
        d: torch.Tensor,
        routes: Routes | None,
    ) -> torch.Tensor:
        """The gradient of the residual stream after this unit [T, C] -> before it."""
        d_activation = self._down.backward(weights, gradient, d, saved.activation)
        site = weights.linears[self._gate_up.path].site
        d_gate_up = weights.backend.swiglu_backward(d_activation, saved.gate_up, site)
        d_b = self._gate_up.backward(weights, gradient, d_gate_up, saved.normed)
        return self._norm.backward(weights, gradient, d_b, saved.h, d)

    def bytes(self, sizes: Sizes, graph: Graph) -> UnitBytes:
        a = DTYPES[graph.activations].itemsize
        stream, width = a * self._hidden, self._down.shape.in_features
        gate_up_site, down_site = graph.site(self._gate_up.path), graph.site(self._down.path)
        gate_up, read = 2 * a * width, sizes.read(gate_up_site, self._hidden)
        activation = sizes.read(down_site, width)
        saved = sizes.saved(gate_up_site, self._hidden) + sizes.saved(down_site, width)
        return UnitBytes(
            saved=stream + gate_up + saved,
            input=stream,
            read=read,
            kept=activation,
            made=(read or stream) + gate_up + (activation or a * width),
            gradients=a * width + sizes.gradient(gate_up_site, 2 * width) + 2 * stream,
            once=max(
                sizes.transposed(site, linear.shape.in_features)
                for site, linear in ((gate_up_site, self._gate_up), (down_site, self._down))
            ),
        )

    def _observe(self, weights: Weights, gate_up: torch.Tensor) -> None:
        """Show the activation, which normally exists only as down_proj reads it."""
        if is_observed():
            observe(weights.backend.swiglu(gate_up), self._path, "activation")
