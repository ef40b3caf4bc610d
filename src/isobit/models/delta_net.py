"""The gated delta net, the first half of most layers of a hybrid decoder.

    h = h + x     a = norm(h)     x, z = in_proj(a)     a, b = gates(a)
    o = delta_rule(x, a, b)       x = out_proj(norm(o) silu(z))

``isobit.kernels.spec.delta_rule`` has the rule. Its inputs are those that ``in_proj``, a linear in
the flow's format, and ``gates``, in the format between operators, give; its state is FP32.

Masters have their rows in the order of the family's checkpoints: q, k, v, z and b, a of all heads,
or with ``Traits.joins_heads`` q, k, v, z and b, a of each key head. Products are the same; only
their columns are put in order.
"""

from dataclasses import dataclass
from typing import Any

import torch

from isobit.kernels.observing import observe
from isobit.kernels.operands import (
    Attend,
    AttendWithBackward,
    DeltaGradients,
    DeltaInputs,
    DeltaRule,
    DeltaRuleWithBackward,
    DeltaWeights,
)
from isobit.kernels.sizes import Sizes
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
    norm_master,
)
from isobit.precision.flow import Graph, LinearShape, SiteShape
from isobit.precision.quant_tensor import DTYPES
from isobit.util.errors import ModelError


@dataclass(frozen=True, slots=True)
class SavedDeltaNet:
    """Tensors that the backward reads. Inputs of linears are in the format of WGrad's operand."""

    h: torch.Tensor | None
    made: torch.Tensor | None
    normed: SavedInput  # of in_proj
    plain: SavedInput  # of gates
    rule: Any
    output: torch.Tensor  # of the rule
    z: torch.Tensor
    out: SavedInput  # of out_proj


class DeltaNet:
    """The methods are those of ``Attention``."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        shape, path, hidden = config.delta, f"layers.{layer}", config.hidden_size
        if shape is None:
            raise ModelError(f"a {config.family} decoder has no delta rule")
        self._layer, self._shape, self._epsilon = layer, shape, config.rms_epsilon
        self._is_frozen = config.lora is not None
        self._norms = UnitNorms.of(config, "attention", layer, f"{path}.in_proj")
        assert self._norms.front is not None, "a delta net has a norm in front of it"
        self._front = self._norms.front
        checkpoint = f"model.{path}.linear_attn"
        heads = shape.value_heads
        rows = {"in_proj_qkv": shape.channels, "in_proj_z": shape.values}
        gates = {"in_proj_b": heads, "in_proj_a": heads}
        self._joins = FAMILIES[config.family].joins_heads
        if self._joins:
            rows = {"in_proj_qkvz": sum(rows.values())}
            gates = {"in_proj_ba": sum(gates.values())}
        self._in, self._gates, self._out = (
            Linear(f"{path}.{name}", linear, checkpoint, lora=config.lora)
            for name, linear in (
                ("in_proj", LinearShape(rows, hidden)),
                ("gates", LinearShape(gates, hidden, is_plain=True)),
                ("out_proj", LinearShape({"out_proj": hidden}, shape.values)),
            )
        )
        names = "convolution", "a_log", "dt_bias", "rule_norm.weight"
        self._names = {name.partition(".")[0]: f"{path}.{name}" for name in names}
        self._own = {
            self._names["convolution"]: Master(
                (shape.channels, 1, shape.width), {f"{checkpoint}.conv1d.weight": shape.channels}
            ),
            self._names["a_log"]: Master((heads,), {f"{checkpoint}.A_log": heads}),
            self._names["dt_bias"]: Master((heads,), {f"{checkpoint}.dt_bias": heads}),
            self._names["rule_norm"]: norm_master(shape.value_dim, f"{checkpoint}.norm.weight"),
        }

    def sites(self) -> tuple[SiteShape, ...]:
        layer = self._layer
        return (
            *self._in.sites(layer),
            *self._gates.sites(layer),
            SiteShape(f"layers.{layer}.delta_rule", "delta", layer),
            *self._out.sites(layer),
        )

    def masters(self) -> dict[str, Master]:
        linears = [linear.masters() for linear in (self._in, self._gates)]
        return {
            **self._norms.masters(),
            **{name: one for masters in linears for name, one in masters.items()},
            **self._own,
            **self._out.masters(),
        }

    def forward(
        self, weights: Weights, h: torch.Tensor, x: torch.Tensor | None, attend: Attend
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """h and x [T, C] -> the residual stream, and what is to be added to it."""
        assert isinstance(attend, DeltaRule)
        h, norm, read = self._front.keeping(weights, h, x, self._in.saves(save=False))
        x, z = self._split(self._in.forward(weights, read))
        gates = self._gates.input(weights, norm, self._gates.saves(save=False))
        inputs = self._inputs(x, self._gates.forward(weights, gates))
        o = attend.delta_rule(self._layer, inputs, self._weights(weights))
        y = self._gated(weights, observe(o, "layers", self._layer, "delta_rule"), z)
        return h, self._out.forward(weights, self._out.input(weights, y, self._out.saves(False)))

    def saving_forward(
        self, weights: Weights, h: torch.Tensor, x: torch.Tensor | None, attend: AttendWithBackward
    ) -> tuple[torch.Tensor, torch.Tensor, SavedDeltaNet]:
        """The same bits, and what the backward reads."""
        assert isinstance(attend, DeltaRuleWithBackward)
        h, norm, read = self._front.keeping(weights, h, x, self._in.saves(save=True))
        made, normed = self._in.saving_forward(weights, read)
        x, z = self._split(made)
        gates = self._gates.input(weights, norm, self._gates.saves(save=True))
        made, plain = self._gates.saving_forward(weights, gates)
        o, rule = attend.delta_rule_saving(self._inputs(x, made), self._weights(weights))
        y = self._gated(weights, observe(o, "layers", self._layer, "delta_rule"), z)
        made = self._out.input(weights, y, self._out.saves(save=True))
        out, saved = self._out.saving_forward(weights, made)
        kept = SavedDeltaNet(*self._norms.saved(h, out), normed, plain, rule, o, z, saved)
        return h, out, kept

    def backward(
        self,
        weights: Weights,
        gradient: Gradient,
        attend: AttendWithBackward,
        positions: torch.Tensor,
        saved: SavedDeltaNet,
        d: torch.Tensor,
    ) -> torch.Tensor:
        """The gradient of the residual stream after this unit [T, C] -> before it."""
        del positions  # the rule has none
        assert isinstance(attend, DeltaRuleWithBackward)
        d_y = self._out.backward(weights, gradient, d, saved.out)
        name = self._names["rule_norm"]
        d_o, d_z = weights.hybrid.gated_norm_backward(
            d_y,
            saved.output,
            saved.z,
            weights.plain[name],
            self._epsilon,
            None if self._is_frozen else gradient(name),
        )
        rule = self._weights(weights)
        made = attend.delta_rule_backward(saved.rule, d_o, rule, self._gradients(gradient, rule))
        d_in, d_gates = self._joined(made.x, d_z), self._joined_gates(made)
        d_a = self._in.backward(weights, gradient, d_in, saved.normed)
        d_a = d_a + self._gates.backward(weights, gradient, d_gates, saved.plain)
        return self._norms.backward(weights, gradient, d_a, saved.h, d)

    def bytes(self, sizes: Sizes, graph: Graph) -> UnitBytes:
        shape, a = self._shape, DTYPES[graph.activations].itemsize
        stream = a * self._front.width
        linears = self._in, self._gates, self._out
        sites = [graph.site(linear.path) for linear in linears]
        values, gates = a * shape.values, 2 * a * shape.value_heads
        inputs, projected = a * shape.channels + gates, a * (shape.channels + shape.values)
        rule = sizes.delta(shape)
        read = self._in.read_bytes(sizes, graph)
        adapter = max(linear.adapter_bytes(graph) for linear in linears)
        adapter_gradients = max(linear.adapter_bytes(graph, backward=True) for linear in linears)
        saved = sum(linear.saved_bytes(sizes, graph) for linear in linears)
        return UnitBytes(
            saved=saved + self._norms.saved_streams * stream + inputs + rule.saved + 2 * values,
            input=stream,
            read=read + stream,
            kept=projected + rule.made + adapter,
            made=read
            + stream
            + projected
            + gates
            + max(rule.made + rule.saved, values)
            + values
            + adapter,
            gradients=adapter_gradients
            + 2 * stream
            + 2 * values
            + max(
                rule.gradients + inputs,
                projected + sizes.gradient(sites[0], sum(sites[0].parts), self._front.width),
            ),
            once=max(
                rule.gradients_once,
                *(
                    sizes.transposed(site, linear.shape.in_features)
                    for site, linear in zip(sites, linears, strict=True)
                ),
            ),
            made_once=rule.made_once,
            attended=inputs + rule.made + rule.saved + values,
            attended_gradients=2 * inputs + rule.gradients + 2 * values,
            attended_saved=rule.saved,
        )

    def _split(self, made: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if self._joins:
            q, k, v, z = self._of_heads(made).split(self._each, 2)
            return torch.cat([one.flatten(1) for one in (q, k, v)], 1), z.flatten(1).contiguous()
        x, z = made.split([self._shape.channels, self._shape.values], 1)
        return x.contiguous(), z.contiguous()

    def _inputs(self, x: torch.Tensor, gates: torch.Tensor) -> DeltaInputs:
        if self._joins:
            b, a = (one.flatten(1) for one in self._of_heads(gates).chunk(2, 2))
        else:
            b, a = gates.chunk(2, 1)
        return DeltaInputs(x, a.contiguous(), b.contiguous())

    def _joined(self, d_x: torch.Tensor, d_z: torch.Tensor) -> torch.Tensor:
        """The gradients of ``_split``'s results -> that of its argument."""
        if not self._joins:
            return torch.cat([d_x, d_z], 1)
        shape = self._shape
        keys = shape.key_heads * shape.key_dim
        parts = *d_x.split([keys, keys, shape.values], 1), d_z
        return torch.cat([self._of_heads(one) for one in parts], 2).flatten(1)

    def _joined_gates(self, made: DeltaInputs) -> torch.Tensor:
        if not self._joins:
            return torch.cat([made.b, made.a], 1)
        return torch.cat([self._of_heads(one) for one in (made.b, made.a)], 2).flatten(1)

    def _of_heads(self, x: torch.Tensor) -> torch.Tensor:
        """[T, N] -> [T, key heads, N / key heads]."""
        return x.unflatten(1, (self._shape.key_heads, -1))

    @property
    def _each(self) -> list[int]:
        """Columns of q, k, v and z of a key head, in the order in which a checkpoint joins them."""
        shape = self._shape
        values = shape.values // shape.key_heads
        return [shape.key_dim, shape.key_dim, values, values]

    def _gated(self, weights: Weights, o: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        norm = weights.plain[self._names["rule_norm"]]
        return weights.hybrid.gated_norm(o, z, norm, self._epsilon)

    def _weights(self, weights: Weights) -> DeltaWeights:
        convolution, a_log, dt_bias = (
            weights.plain[self._names[name]] for name in ("convolution", "a_log", "dt_bias")
        )
        return DeltaWeights(self._shape, convolution[:, 0], a_log, dt_bias)

    def _gradients(self, gradient: Gradient, rule: DeltaWeights) -> DeltaGradients:
        """The masters' gradients; with LoRA zeros, which are dropped afterwards."""
        if self._is_frozen:
            held = rule.convolution, rule.a_log, rule.dt_bias
            return DeltaGradients(*(torch.zeros_like(x, dtype=torch.float32) for x in held))
        convolution, a_log, dt_bias = (
            gradient(self._names[name]) for name in ("convolution", "a_log", "dt_bias")
        )
        return DeltaGradients(convolution[:, 0], a_log, dt_bias)
