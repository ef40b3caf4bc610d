"""A mixture of experts, the second half of a decoder layer in place of the MLP.

    h = h + x     b = norm(h)     x = sum over a token's k experts e of w_e MLP_e(b)

The router, a matrix [E, C], chooses each token's experts and their weights in FP32; it is never
quantised. Gate and up of all experts are one master [E 2 I, C], down another [E C, I], expert after
expert. The gradients of the router's own losses come from ``Routes``.
"""

from dataclasses import dataclass

import torch

from isobit.kernels.operands import (
    ExpertGradients,
    LinearInput,
    LinearWeight,
    RoutedExperts,
    Routing,
    observe,
)
from isobit.kernels.sizes import ExpertsShape, Sizes
from isobit.models.config import ModelConfig
from isobit.models.families import FAMILIES
from isobit.models.layers import (
    Gradient,
    Linear,
    Master,
    Norm,
    Routes,
    UnitBytes,
    Weights,
    observe_input,
)
from isobit.precision.flow import Graph, LinearShape, SiteShape
from isobit.precision.quant_tensor import DTYPES
from isobit.util.errors import ModelError


@dataclass(frozen=True, slots=True)
class SavedMixture:
    """What the backward reads."""

    h: torch.Tensor
    norm: torch.Tensor  # what router and experts read
    routing: Routing
    experts: RoutedExperts


class MixtureOfExperts:
    """The experts of one layer, with their router and norm. The methods are those of ``Mlp``."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        experts, names = config.experts, FAMILIES[config.family].experts
        if experts is None or names is None:
            raise ModelError(f"a {config.family} decoder has no experts")
        path, hidden, width = f"layers.{layer}", config.hidden_size, experts.intermediate_size
        self._layer, self._experts, self._hidden = layer, experts, hidden
        self._norm = Norm(
            f"{path}.post_attention_norm",
            hidden,
            f"model.{path}.post_attention_layernorm.weight",
            config.rms_epsilon,
            residual=f"{path}.attention_residual",
            linear=f"{path}.experts.gate_up_proj",
        )
        checkpoint = f"model.{path}.{names.block}"
        self.router = f"{path}.router"
        self._router_name = f"{checkpoint}.gate.weight"
        every = [f"experts.{index}" for index in range(experts.count)]
        gate_up = {f"{one}.{half}": width for one in every for half in (names.gate, names.up)}
        down = {f"{one}.{names.down}": hidden for one in every}
        self._gate_up = Linear(
            f"{path}.experts.gate_up_proj", LinearShape(gate_up, hidden, experts.count), checkpoint
        )
        self._down = Linear(
            f"{path}.experts.down_proj", LinearShape(down, width, experts.count), checkpoint
        )

    def sites(self) -> tuple[SiteShape, ...]:
        router = SiteShape(self.router, "router", self._layer)
        return router, self._gate_up.site(self._layer), self._down.site(self._layer)

    def masters(self) -> dict[str, Master]:
        count = self._experts.count
        router = Master((count, self._hidden), {self._router_name: count})
        return {
            **self._norm.masters(),
            f"{self.router}.weight": router,
            **self._gate_up.masters(),
            **self._down.masters(),
        }

    def forward(
        self, weights: Weights, h: torch.Tensor, x: torch.Tensor | None, routes: Routes | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        h, norm, b = self._norm.keeping(weights, h, x)
        routing = self._route(weights, norm, b, routes)
        x = weights.backend.experts(b.read, routing, *self._linears(weights))
        return h, observe(x, f"layers.{self._layer}.experts")

    def saving_forward(
        self, weights: Weights, h: torch.Tensor, x: torch.Tensor | None, routes: Routes | None
    ) -> tuple[torch.Tensor, torch.Tensor, SavedMixture]:
        h, norm, b = self._norm.keeping(weights, h, x)
        routing = self._route(weights, norm, b, routes)
        read = LinearInput(b.read, norm)
        x, saved = weights.backend.experts_saving(read, routing, *self._linears(weights))
        observe(x, f"layers.{self._layer}.experts")
        return h, x, SavedMixture(h, norm, routing, saved)

    def again(self, weights: Weights, h: torch.Tensor, x: torch.Tensor | None) -> SavedMixture:
        return self.saving_forward(weights, h, x, None)[2]

    def backward(
        self,
        weights: Weights,
        gradient: Gradient,
        saved: SavedMixture,
        d: torch.Tensor,
        routes: Routes | None,
    ) -> torch.Tensor:
        router = f"{self.router}.weight"
        gradients = ExpertGradients(
            gradient(f"{self._gate_up.path}.weight"), gradient(f"{self._down.path}.weight")
        )
        d_b, d_weights = weights.backend.experts_backward(
            d, saved.experts, saved.routing, *self._linears(weights), gradients
        )
        d_b += weights.backend.route_backward(
            d_weights,
            saved.norm,
            saved.routing,
            weights.plain[router],
            self._experts.renormalise,
            None if routes is None else routes.loss_to_learn,
            gradient(router),
        )
        return self._norm.backward(weights, gradient, d_b, saved.h, d)

    def bytes(self, sizes: Sizes, graph: Graph) -> UnitBytes:
        stream = DTYPES[graph.activations].itemsize * self._hidden
        shape, chosen = self._experts, self._experts.top_k
        sites = graph.site(self._gate_up.path), graph.site(self._down.path)
        made = sizes.experts(
            ExpertsShape(shape.count, chosen, self._hidden, shape.intermediate_size), *sites
        )
        read = sizes.read(sites[0], self._hidden)
        routing = 4 * shape.count + 8 * chosen
        losses = 16 * shape.count
        return UnitBytes(
            saved=2 * stream + routing + made.saved,
            input=stream,
            read=read,
            kept=max(made.kept, losses),
            made=stream + read + routing + max(made.made, losses),
            gradients=3 * stream + max(made.gradients, losses),
            once=made.once,
            saved_once=made.saved_once,
            made_once=made.once,
            noted=4 * chosen,
        )

    def _linears(self, weights: Weights) -> tuple[LinearWeight, LinearWeight]:
        return weights.linears[self._gate_up.path], weights.linears[self._down.path]

    def _route(
        self, weights: Weights, norm: torch.Tensor, b: LinearInput, routes: Routes | None
    ) -> Routing:
        top_k, renormalise = self._experts.top_k, self._experts.renormalise
        router = weights.plain[f"{self.router}.weight"]
        routing = weights.backend.route(norm, router, top_k, renormalise)
        observe(routing.logits, self.router, "logits")
        observe(routing.experts, self.router, "experts")
        observe(routing.weights, self.router, "weights")
        if routes is not None:
            routes.add(routing)
        observe_input(b, self._gate_up.path)
        return routing
