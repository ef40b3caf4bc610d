"""The second half of a decoder layer: the MLP, or a mixture of experts in its place.

    h = h + x     b = norm(h)     x = down_proj(silu(gate) * up),   (gate, up) = gate_up_proj(b)
                                  x = sum over a token's k experts e of w_e MLP_e(b)

To the sum an expert of all tokens may be added (``isobit.models.shared_expert``).
Another function may stand for silu (``Traits.gate``), norms behind the MLP (``UnitNorms``); and
the router and the experts may have biases.

The router, a matrix [E, C], chooses each token's experts and their weights in FP32; it is never
quantised. Gate and up of all experts are one master [E 2 I, C], down another [E C, I], expert after
expert. The gradients of the router's own losses come from ``Routes``.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch

from isobit.kernels.observing import is_observed, observe
from isobit.kernels.operands import ExpertGradients, Gate, LinearInput, LinearWeight, RoutedExperts
from isobit.kernels.routing import RouterLoss, Routing, expert_load, router_losses
from isobit.kernels.sizes import ExpertsShape, Sizes
from isobit.models.config import ModelConfig
from isobit.models.families import FAMILIES
from isobit.models.layers import (
    Gradient,
    Linear,
    Master,
    SavedInput,
    UnitBytes,
    UnitNorms,
    Weights,
    observe_input,
)
from isobit.models.shared_expert import NO_SHARED, SavedSharedExpert, SharedExpert
from isobit.precision.flow import Graph, LinearShape, SiteShape
from isobit.precision.quant_tensor import DTYPES
from isobit.records.batch import RouterScores
from isobit.util.errors import ModelError

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


@dataclass(frozen=True, slots=True)
class SavedMlp:
    """Tensors that the backward reads. Inputs of linears are in the format of WGrad's operand."""

    h: torch.Tensor | None  # the residual stream, where a norm in front reads it
    made: torch.Tensor | None  # the unit's output, where a norm behind reads it
    normed: SavedInput  # of gate and up
    gate_up: torch.Tensor
    activation: SavedInput  # of down


class Mlp:
    """The MLP of one layer. ``MixtureOfExperts`` has the same methods."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        path = f"layers.{layer}"
        hidden = config.hidden_size
        width = config.intermediate_size
        self._path = path
        self._layer = layer
        self._hidden = hidden
        self._gate: Gate = FAMILIES[config.family].gate
        self._norms = UnitNorms.of(config, "mlp", layer, f"{path}.gate_up_proj")
        checkpoint = f"model.{path}.mlp"
        halves = {"gate_proj": width, "up_proj": width}
        gate_up = LinearShape({"gate_up_proj": 2 * width} if config.is_fused else halves, hidden)
        self._gate_up = Linear(f"{path}.gate_up_proj", gate_up, checkpoint, lora=config.lora)
        down = LinearShape({"down_proj": hidden}, width)
        self._down = Linear(f"{path}.down_proj", down, checkpoint, lora=config.lora)

    def sites(self) -> tuple[SiteShape, ...]:
        return *self._gate_up.sites(self._layer), *self._down.sites(self._layer)

    def masters(self) -> dict[str, Master]:
        return {**self._norms.masters(), **self._gate_up.masters(), **self._down.masters()}

    def forward(
        self, weights: Weights, h: torch.Tensor, x: torch.Tensor | None, routes: Routes | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """h and x [T, C] -> the residual stream, and what is to be added to it. ``routes`` is for
        experts.
        """
        h, b = self._norms.forward(weights, h, x, self._gate_up.saves(save=False))
        gate_up = self._gate_up.forward(weights, b)
        self._observe(weights, gate_up)
        site, split = weights.linears[self._down.path].site, weights.tensor_parallel
        if split.cuts_groups(site, split.width):
            mine = weights.backend.swiglu(gate_up, self._gate)
            activation = self._down.input(weights, mine, False, split.width)
        else:
            save = self._down.saves(save=False)
            activation = weights.backend.swiglu_input(gate_up, site, save, self._gate)
        return h, self._norms.output(weights, self._down.joined(weights, activation, split.width))

    def saving_forward(
        self, weights: Weights, h: torch.Tensor, x: torch.Tensor | None, routes: Routes | None
    ) -> tuple[torch.Tensor, torch.Tensor, SavedMlp]:
        """The same bits, and what the backward reads."""
        h, b = self._norms.forward(weights, h, x, self._gate_up.saves(save=True))
        gate_up, normed = self._gate_up.saving_forward(weights, b)
        self._observe(weights, gate_up)
        site, save = weights.linears[self._down.path].site, self._down.saves(save=True)
        activation = weights.backend.swiglu_input(gate_up, site, save, self._gate)
        out, saved = self._down.saving_forward(weights, activation)
        kept = SavedMlp(*self._norms.saved(h, out), normed, gate_up, saved)
        return h, self._norms.output(weights, out), kept

    def again(self, weights: Weights, h: torch.Tensor, x: torch.Tensor | None) -> SavedMlp:
        """Compute again what ``saving_forward`` saves, from the residual stream h + x, without
        down_proj unless the norm is behind it.
        """
        if self._norms.behind is not None:
            return self.saving_forward(weights, h, x, None)[2]
        h, b = self._norms.forward(weights, h, x, self._gate_up.saves(save=True))
        gate_up, normed = self._gate_up.saving_forward(weights, b)
        site, saved = weights.linears[self._down.path].site, None
        if self._down.saves(save=True):
            saved = weights.backend.swiglu_saved(gate_up, site, self._gate)
        return SavedMlp(h, None, normed, gate_up, self._down.saved(weights, saved))

    def backward(
        self,
        weights: Weights,
        gradient: Gradient,
        saved: SavedMlp,
        d: torch.Tensor,
        routes: Routes | None,
    ) -> torch.Tensor:
        """The gradient of the residual stream after this unit [T, C] -> before it."""
        d_out = self._norms.output_backward(weights, gradient, d, saved.made)
        d_activation = self._down.backward(weights, gradient, d_out, saved.activation)
        site = weights.linears[self._gate_up.path].site
        gate_up, gate = saved.gate_up, self._gate
        d_gate_up = weights.backend.swiglu_backward(d_activation, gate_up, site, gate)
        d_b = self._gate_up.backward(weights, gradient, d_gate_up, saved.normed)
        return self._norms.backward(weights, gradient, d_b, saved.h, d)

    def bytes(self, sizes: Sizes, graph: Graph) -> UnitBytes:
        a = DTYPES[graph.activations].itemsize
        stream, width = a * self._hidden, self._down.shape.in_features
        gate_up_site, down_site = graph.site(self._gate_up.path), graph.site(self._down.path)
        gate_up, read = 2 * a * width, self._gate_up.read_bytes(sizes, graph)
        activation, down_adapter = (
            self._down.read_bytes(sizes, graph),
            self._down.adapter_bytes(graph),
        )
        saved = self._gate_up.saved_bytes(sizes, graph) + self._down.saved_bytes(sizes, graph)
        is_behind = self._norms.behind is not None
        return UnitBytes(
            saved=self._norms.saved_streams * stream + gate_up + saved,
            input=stream,
            read=read,
            kept=max(self._gate_up.adapter_bytes(graph), activation + down_adapter)
            + (stream if is_behind else 0),
            made=(read or stream)
            + gate_up
            + (activation or a * width)
            + down_adapter
            + (stream if is_behind else 0),
            gradients=self._gate_up.adapter_bytes(graph, backward=True)
            + a * width
            + sizes.gradient(gate_up_site, 2 * width, self._hidden)
            + (3 if is_behind else 2) * stream,
            once=max(
                sizes.transposed(site, linear.shape.in_features)
                for site, linear in ((gate_up_site, self._gate_up), (down_site, self._down))
            ),
        )

    def _observe(self, weights: Weights, gate_up: torch.Tensor) -> None:
        """Show the activation, which normally exists only as down_proj reads it."""
        if is_observed():
            observe(weights.backend.swiglu(gate_up, self._gate), self._path, "activation")


@dataclass(frozen=True, slots=True)
class SavedMixture:
    """Tensors that the backward reads."""

    h: torch.Tensor
    norm: torch.Tensor  # what router and experts read
    routing: Routing
    experts: RoutedExperts
    shared: SavedSharedExpert | None  # of an expert of all tokens, if there is one


class MixtureOfExperts:
    """The experts of one layer, with their router and norm. The methods are those of ``Mlp``."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        experts, names = config.experts, FAMILIES[config.family].experts
        if experts is None or names is None:
            raise ModelError(f"a {config.family} decoder has no experts")
        path = f"layers.{layer}"
        hidden = config.hidden_size
        width = experts.intermediate_size
        self._layer = layer
        self._experts = experts
        self._hidden = hidden
        norms = UnitNorms.of(config, "mlp", layer, f"{path}.experts.gate_up_proj")
        assert norms.front is not None, "experts have a norm in front of them"
        self._norm = norms.front
        checkpoint = f"model.{path}.{names.block}"
        self.router = f"{path}.router"
        self._router_name = f"{checkpoint}.{names.router}"
        self._gate: Gate = FAMILIES[config.family].gate
        self._has_biases, self._is_frozen = config.has_biases, config.lora is not None
        every = [f"experts.{index}" for index in range(experts.count)]
        gate_up = {f"{one}.{half}": width for one in every for half in (names.gate, names.up)}
        down = {f"{one}.{names.down}": hidden for one in every}
        self._gate_up, self._down = (
            Linear(f"{path}.experts.{name}", shape, checkpoint, self._has_biases)
            for name, shape in (
                ("gate_up_proj", LinearShape(gate_up, hidden, experts.count)),
                ("down_proj", LinearShape(down, width, experts.count)),
            )
        )
        size = experts.shared_size
        self._shared = None if size is None else SharedExpert(config, layer, checkpoint, size)

    def sites(self) -> tuple[SiteShape, ...]:
        router = SiteShape(self.router, "router", self._layer)
        shared = () if self._shared is None else self._shared.sites()
        return router, *self._gate_up.sites(self._layer), *self._down.sites(self._layer), *shared

    def masters(self) -> dict[str, Master]:
        count = self._experts.count
        router = {
            f"{self.router}.{kind}": Master(shape, {f"{self._router_name}.{kind}": count})
            for kind, shape in (("weight", (count, self._hidden)), ("bias", (count,)))
            if kind == "weight" or self._has_biases
        }
        return {
            **self._norm.masters(),
            **router,
            **self._gate_up.masters(),
            **self._down.masters(),
            **({} if self._shared is None else self._shared.masters()),
        }

    def forward(
        self, weights: Weights, h: torch.Tensor, x: torch.Tensor | None, routes: Routes | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        h, norm, b = self._norm.keeping(weights, h, x)
        routing = self._route(weights, norm, b, routes)
        x = weights.backend.experts(b.read, routing, *self._linears(weights), self._gate)
        x = observe(x, f"layers.{self._layer}.experts")
        return h, x if self._shared is None else self._shared.forward(weights, norm, x)

    def saving_forward(
        self, weights: Weights, h: torch.Tensor, x: torch.Tensor | None, routes: Routes | None
    ) -> tuple[torch.Tensor, torch.Tensor, SavedMixture]:
        h, norm, b = self._norm.keeping(weights, h, x)
        routing = self._route(weights, norm, b, routes)
        read = LinearInput(b.read, norm)
        linears = self._linears(weights)
        x, saved = weights.backend.experts_saving(read, routing, *linears, self._gate)
        x, shared = observe(x, f"layers.{self._layer}.experts"), None
        if self._shared is not None:
            x, shared = self._shared.saving_forward(weights, norm, x)
        return h, x, SavedMixture(h, norm, routing, saved, shared)

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
        router, paths = f"{self.router}.weight", (self._gate_up.path, self._down.path)
        gradients = None
        if not self._is_frozen:
            kinds = ("weight", "bias") if self._has_biases else ("weight",)
            gradients = ExpertGradients(*(gradient(f"{p}.{kind}") for kind in kinds for p in paths))
        has_bias = self._has_biases and not self._is_frozen
        d_b, d_weights = weights.backend.experts_backward(
            d, saved.experts, saved.routing, *self._linears(weights), gradients, self._gate
        )
        d_b += weights.backend.route_backward(
            d_weights,
            saved.norm,
            saved.routing,
            weights.plain[router],
            self._experts.renormalise,
            None if routes is None else routes.loss_to_learn,
            None if self._is_frozen else gradient(router),
            gradient(f"{self.router}.bias") if has_bias else None,
        )
        if self._shared is not None and saved.shared is not None:
            d_b += self._shared.backward(weights, gradient, saved.shared, saved.norm, d)
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
        shared = NO_SHARED if self._shared is None else self._shared.bytes(sizes, graph)
        return UnitBytes(
            saved=2 * stream + routing + made.saved + shared.saved,
            input=stream,
            read=read,
            kept=max(made.kept, losses, shared.kept),
            made=stream + read + routing + max(made.made, losses, shared.made),
            gradients=3 * stream + max(made.gradients, losses, shared.gradients),
            once=max(made.once, shared.once),
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
        bias = weights.plain[f"{self.router}.bias"] if self._has_biases else None
        routing = weights.backend.route(norm, router, top_k, renormalise, bias)
        observe(routing.logits, self.router, "logits")
        observe(routing.experts, self.router, "experts")
        observe(routing.weights, self.router, "weights")
        if routes is not None:
            routes.add(routing)
        observe_input(b, self._gate_up.path)
        return routing
