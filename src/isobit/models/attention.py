"""Attention, the first half of a decoder layer.

    h = h + x     a = norm(h)     q, k, v = qkv_proj(a)     x = o_proj(attend(q, k, v))

``QkvTransform`` describes what is between the projection and attention: bias, norms of Q and K,
rotary positions and formats. The caller's ``Attend`` finds the keys of each query, in the pages of
the KV cache or in packed sequences.
"""

from dataclasses import dataclass

import torch

from isobit.kernels.observing import observe
from isobit.kernels.operands import Attend, Attended, AttendWithBackward, QkvGradients, QkvTransform
from isobit.kernels.sizes import AttentionShape, Sizes
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
from isobit.precision.quant_tensor import DTYPES, EIGHT_BITS


@dataclass(frozen=True, slots=True)
class SavedAttention:
    """Tensors that the backward reads. Inputs of linears are in the format of WGrad's operand."""

    h: torch.Tensor | None  # the residual stream, where a norm in front reads it
    made: torch.Tensor | None  # the unit's output, where a norm behind reads it
    normed: SavedInput  # of qkv_proj
    qkv: torch.Tensor  # in front of norms over all heads
    attended: Attended
    out: SavedInput  # of o_proj
    gate: torch.Tensor | None = None  # of the output


class Attention:
    def __init__(self, config: ModelConfig, layer: int) -> None:
        path, hidden = f"layers.{layer}", config.hidden_size
        queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self._layer, self._config = layer, config
        self._orders = dict[torch.device, torch.Tensor]()
        self._shape = AttentionShape(config.num_heads, config.num_kv_heads, config.head_dim)
        self._norms = UnitNorms.of(config, "attention", layer, f"{path}.qkv_proj")
        checkpoint = f"model.{path}.self_attn"
        # a query and its gate stand beside each other
        rows = 2 * queries if config.has_output_gate else queries
        self._qkv = Linear(
            f"{path}.qkv_proj",
            LinearShape(
                {"qkv_proj": queries + 2 * keys}
                if config.is_fused
                else {"q_proj": rows, "k_proj": keys, "v_proj": keys},
                hidden,
            ),
            checkpoint,
            has_bias=config.qkv_bias,
            lora=config.lora,
        )
        out = LinearShape({"o_proj": hidden}, queries)
        self._out = Linear(
            f"{path}.o_proj", out, checkpoint, config.has_biases, config.lora, adds_bias=True
        )
        dim, offset = config.head_dim, FAMILIES[config.family].norm_offset
        sizes = (queries, keys) if config.wide_qk_norm else (dim, dim) if config.qk_norm else ()
        self._head_norms = {
            f"{path}.{name}.weight": norm_master(size, f"{checkpoint}.{name}.weight", offset)
            for name, size in zip(("q_norm", "k_norm"), sizes, strict=False)
        }
        heads, name = config.num_heads, f"{checkpoint}.sinks"
        sinks = {f"{path}.sinks": Master((heads,), {name: heads})}
        self._sinks = sinks if config.has_sinks else {}

    def sites(self) -> tuple[SiteShape, ...]:
        path, layer = f"layers.{self._layer}", self._layer
        return (
            *self._qkv.sites(layer),
            SiteShape(f"{path}.kv_cache", "kv_cache", layer),
            SiteShape(f"{path}.attention", "attention", layer),
            *self._out.sites(layer),
        )

    def masters(self) -> dict[str, Master]:
        return {
            **self._norms.masters(),
            **self._qkv.masters(),
            **self._head_norms,
            **self._sinks,
            **self._out.masters(),
        }

    def forward(
        self, weights: Weights, h: torch.Tensor, x: torch.Tensor | None, attend: Attend
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """h and x [T, C] -> the residual stream, and what is to be added to it."""
        h, a = self._norms.forward(weights, h, x, self._qkv.saves(save=False))
        qkv, gate = self._gate_apart(self._qkv.forward(weights, a))
        qkv = self._normed(weights, self._paired(qkv))
        out = attend(self._layer, qkv, self._transform(weights))
        out = self._gated(weights, observe(out, "layers", self._layer, "attention"), gate)
        split = weights.tensor_parallel
        made = self._out.input(weights, out, self._out.saves(save=False), split.queries)
        return h, self._norms.output(weights, self._out.joined(weights, made, split.queries))

    def saving_forward(
        self, weights: Weights, h: torch.Tensor, x: torch.Tensor | None, attend: AttendWithBackward
    ) -> tuple[torch.Tensor, torch.Tensor, SavedAttention]:
        """The same bits, and what the backward reads."""
        h, a = self._norms.forward(weights, h, x, self._qkv.saves(save=True))
        qkv, normed = self._qkv.saving_forward(weights, a)
        qkv, gate = self._gate_apart(qkv)
        qkv = self._paired(qkv)
        seen = self._normed(weights, qkv)
        out, attended = attend.attend(self._layer, seen, self._transform(weights))
        out = self._gated(weights, observe(out, "layers", self._layer, "attention"), gate)
        made = self._out.input(weights, out, self._out.saves(save=True))
        out, saved = self._out.saving_forward(weights, made)
        kept = SavedAttention(*self._norms.saved(h, out), normed, qkv, attended, saved, gate)
        return h, self._norms.output(weights, out), kept

    def backward(
        self,
        weights: Weights,
        gradient: Gradient,
        attend: AttendWithBackward,
        positions: torch.Tensor,
        saved: SavedAttention,
        d: torch.Tensor,
    ) -> torch.Tensor:
        """The gradient of the residual stream after this unit [T, C] -> before it."""
        d_out = self._norms.output_backward(weights, gradient, d, saved.made)
        d_out = self._out.backward(weights, gradient, d_out, saved.out)
        d_gate = None
        if saved.gate is not None:
            out = saved.attended.output.reshape(d_out.shape)
            d_out, d_gate = weights.hybrid.sigmoid_gate_backward(d_out, out, saved.gate)
        norms = self._gradients(gradient)
        # no name holds dQ, dK and dV: they are gone when the projection's backward begins
        learns_sinks = self._config.has_sinks and self._config.lora is None
        sinks = gradient(f"layers.{self._layer}.sinks") if learns_sinks else None
        d_qkv = weights.backend.qkv_backward(
            *attend.backward(saved.attended, d_out, sinks),
            saved.qkv,
            self._transform(weights),
            positions,
            norms,
        )
        self._add_reordered(gradient, norms)
        d_qkv = self._normed_backward(weights, gradient, d_qkv, saved.qkv)
        d_qkv = self._gate_beside(self._paired(d_qkv, back=True), d_gate)
        d_a = self._qkv.backward(weights, gradient, d_qkv, saved.normed)
        return self._norms.backward(weights, gradient, d_a, saved.h, d)

    def _normed(self, weights: Weights, qkv: torch.Tensor) -> torch.Tensor:
        """RMSNorms over all heads of Q and of K, [T, (H + 2 G) D], where a family has them: they
        are made before a kernel takes heads apart.
        """
        if not self._config.wide_qk_norm:
            return qkv
        norm, (*parts, v) = weights.backend.add_rms_norm, self._heads(qkv)
        for place, (name, epsilon) in enumerate(self._wide_norms()):
            made = norm(parts[place], None, weights.plain[name], epsilon, None).norm
            assert made is not None
            parts[place] = observe(made, name.removesuffix(".weight"))
        return torch.cat([*parts, v], 1)

    def _normed_backward(
        self, weights: Weights, gradient: Gradient, d_qkv: torch.Tensor, qkv: torch.Tensor
    ) -> torch.Tensor:
        """The gradient of ``_normed``'s output -> that of its input, which is ``qkv``."""
        if not self._config.wide_qk_norm:
            return d_qkv
        (*parts, dv), read = self._heads(d_qkv), self._heads(qkv)
        for place, (name, epsilon) in enumerate(self._wide_norms()):
            grad = None if self._config.lora is not None else gradient(name)
            parts[place] = weights.backend.rms_norm_backward(
                parts[place], read[place], weights.plain[name], epsilon, None, grad
            )
        return torch.cat([*parts, dv], 1)

    def _heads(self, qkv: torch.Tensor) -> list[torch.Tensor]:
        """[T, (H + 2 G) D] -> Q [T, H D], K and V [T, G D], contiguous."""
        shape = self._shape
        counts = shape.num_heads, shape.num_kv_heads, shape.num_kv_heads
        split = qkv.split([count * shape.head_dim for count in counts], 1)
        return [part.contiguous() for part in split]

    def _wide_norms(self) -> list[tuple[str, float]]:
        """Names of their weights, and epsilons."""
        return [(name, self._config.rms_epsilon) for name in self._head_norms]

    def _paired(self, qkv: torch.Tensor, back: bool = False) -> torch.Tensor:
        """Put the elements that positions turn, if they are the first of a head only, where the
        rotation of whole heads finds its pairs: (a1 a2 b1 b2) -> (a1 b1 a2 b2), with the halves
        a1, a2 of what is turned, in Q and in K, so that q . k stays. In place, [T, (H + 2 G) D]; or
        ``back``.
        """
        dim, turned = self._config.head_dim, self._config.rotary_size // 2
        if 2 * turned == dim:
            return qkv
        rotated = qkv.shape[1] * (self._shape.num_heads + self._shape.num_kv_heads)
        rotated //= self._shape.num_heads + 2 * self._shape.num_kv_heads
        heads = qkv[:, :rotated].unflatten(1, (-1, dim))
        middle, other = heads[..., turned : turned + dim // 2], dim // 2 - turned
        middle.copy_(middle.roll(-other if back else other, -1))
        return qkv

    def _gate_apart(self, qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """What the projection makes -> Q, K and V [T, (H + 2 G) D], and the gate [T, H D] that
        stands beside Q, if there is one.
        """
        if not self._config.has_output_gate:
            return qkv, None
        width = self._shape.num_heads * self._shape.head_dim
        heads = qkv[:, : 2 * width].unflatten(1, (self._shape.num_heads, 2, -1))
        q, gate = (heads[:, :, place].flatten(1) for place in (0, 1))
        return torch.cat([q, qkv[:, 2 * width :]], 1), gate

    def _gate_beside(self, d_qkv: torch.Tensor, d_gate: torch.Tensor | None) -> torch.Tensor:
        """The gradients of ``_gate_apart``'s results -> that of its argument."""
        if d_gate is None:
            return d_qkv
        width, heads = d_gate.shape[1], (self._shape.num_heads, -1)
        both = [part.unflatten(1, heads) for part in (d_qkv[:, :width], d_gate)]
        return torch.cat([torch.stack(both, 2).flatten(1), d_qkv[:, width:]], 1)

    def _gated(
        self, weights: Weights, out: torch.Tensor, gate: torch.Tensor | None
    ) -> torch.Tensor:
        return out if gate is None else weights.hybrid.sigmoid_gate(out, gate)

    @property
    def _is_reordered(self) -> bool:
        """Whether ``_paired`` changes heads that have norms."""
        return self._config.rotary_size != self._config.head_dim and self._config.qk_norm

    def _order(self, device: torch.device) -> torch.Tensor | None:
        """The elements of a head as ``_paired`` puts them, int64 [D]; None where it moves none.  It
        is sent once, since a step that is being captured sends nothing.
        """
        dim, turned = self._config.head_dim, self._config.rotary_size // 2
        if not self._is_reordered:
            return None
        if device not in self._orders:
            order = torch.arange(dim)
            middle = order[turned : turned + dim // 2]
            middle.copy_(middle.roll(dim // 2 - turned))
            self._orders[device] = order.to(device)
        return self._orders[device]

    def _head_norm(self, weights: Weights, name: str) -> torch.Tensor | None:
        """The weight of ``q_norm`` or ``k_norm`` [D] for heads that ``_paired`` has changed."""
        if not self._config.qk_norm:
            return None
        weight = weights.plain[f"layers.{self._layer}.{name}.weight"]
        order = self._order(weight.device)
        return weight if order is None else weight.index_select(0, order)

    def _add_reordered(self, gradient: Gradient, made: QkvGradients) -> None:
        """Add gradients of the weights of changed heads to those of the masters."""
        if not self._is_reordered:
            return
        for name, grad in (("q_norm", made.q_norm), ("k_norm", made.k_norm)):
            order = None if grad is None else self._order(grad.device)
            if grad is not None and order is not None:
                master = gradient(f"layers.{self._layer}.{name}.weight")
                master[order] += grad

    def bytes(self, sizes: Sizes, graph: Graph) -> UnitBytes:
        config = self._config
        shape = self._shape
        layer = self._layer
        a = DTYPES[graph.activations].itemsize
        stream, attended = a * config.hidden_size, a * shape.num_heads * shape.head_dim
        gate = attended if config.has_output_gate else 0
        qkv = a * self._qkv.shape.out_features
        qkv_site, out_site = graph.site(self._qkv.path), graph.site(self._out.path)
        format = graph.attention_format(layer)
        encoded = sizes.encoded(shape, format) + attended
        keys = a * shape.num_kv_heads * shape.head_dim
        streams, is_behind = self._norms.saved_streams * stream, self._norms.behind is not None
        saved = streams + self._qkv.saved_bytes(sizes, graph) + qkv + encoded
        read = self._qkv.read_bytes(sizes, graph)
        moved = qkv // 2 if config.rotary_size < config.head_dim else 0
        moved = 2 * qkv if config.wide_qk_norm or gate else moved
        linears = self._qkv, self._out
        adapter = max(linear.adapter_bytes(graph) for linear in linears)
        adapter_gradients = max(linear.adapter_bytes(graph, backward=True) for linear in linears)
        return UnitBytes(
            saved=saved + self._out.saved_bytes(sizes, graph, is_kept=True),
            input=stream,
            read=read,
            kept=adapter + (max(stream, qkv) if is_behind else 0),
            made=(read or stream) + max(encoded, moved) + adapter,
            gradients=adapter_gradients
            + (2 * stream if is_behind else stream)
            + max(
                2 * attended + sizes.attention_gradients(shape, format) + 2 * keys,
                attended + sizes.gradient(qkv_site, sum(qkv_site.parts), config.hidden_size),
            ),
            once=max(
                sizes.transposed(site, linear.shape.in_features)
                for site, linear in ((qkv_site, self._qkv), (out_site, self._out))
            ),
            # of long sequences a part of the output and of its sums in FP32 at a time
            attended=qkv + encoded + 4 * shape.num_heads * (shape.head_dim + 2),
            # what the forward has saved; dO and dQ; dK and dV, and their sums in FP32
            attended_gradients=encoded
            + 2 * attended
            + sizes.attention_gradients(shape, format)
            + 2 * keys
            + 12 * shape.num_kv_heads * shape.head_dim,
        )

    def _transform(self, weights: Weights) -> QkvTransform:
        config = self._config
        plain = weights.plain
        path = f"layers.{self._layer}"
        scale_bytes, maxima = self._tensor_scales(weights)
        rope = weights.rope
        if self._layer in config.other_rope_layers:
            assert rope.other is not None
            rope = rope.other
        return QkvTransform(
            config.num_heads // weights.tensor_parallel.size,
            config.num_kv_heads // weights.tensor_parallel.size,
            config.head_dim,
            rope.cos,
            rope.sin,
            config.rms_epsilon,
            self._head_norm(weights, "q_norm"),
            self._head_norm(weights, "k_norm"),
            weights.linears[self._qkv.path].bias,
            config.window(self._layer),
            weights.graph.attention_format(self._layer) in EIGHT_BITS,
            scale_bytes,
            maxima,
            plain[f"{path}.sinks"] if config.has_sinks else None,
        )

    def _tensor_scales(self, weights: Weights) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """The layer's scales of Q, K and V, and the maxima to raise, where the flow has them."""
        scales = weights.kv_scales
        maxima = weights.kv_maxima
        layer = self._layer
        if scales is None or layer not in scales.layers:
            return None, None
        has_own = weights.graph.has_tensor_scales(layer)
        return scales.bytes[layer] if has_own else None, None if maxima is None else maxima[layer]

    def _gradients(self, gradient: Gradient) -> QkvGradients:
        path, config = f"layers.{self._layer}", self._config
        q_norm, k_norm = (f"{path}.{name}.weight" for name in ("q_norm", "k_norm"))
        if config.lora is not None:
            return QkvGradients(None, None, None)
        norms = [gradient(name) for name in (q_norm, k_norm)] if config.qk_norm else [None, None]
        if self._is_reordered:  # added by ``_add_reordered``
            norms = [torch.zeros_like(one) for one in norms if one is not None]
        return QkvGradients(
            *norms,
            gradient(f"{path}.qkv_proj.bias") if config.qkv_bias else None,
        )
