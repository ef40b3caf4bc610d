"""Passes over packed sequences: hidden states, and the backward from their gradient.

With d the gradient of the residual stream after an operation, each linear computes dX = dY W and
adds dY^T X to its master's gradient; each norm gives d + (gradient through the norm). Gradients
between operators have the activations' format; those of masters are FP32, summed in a fixed order
with one addition per element and micro-batch (``isobit.parallel.gradient_sum``), which is told when
a group of masters (``Decoder.backward_groups``) is complete.

``recompute`` saves memory by computing activations again in the backward, to the same bits: ``mlp``
leaves out everything after the second norm, about half of all; ``full`` keeps only the residual
stream of each layer. What will be computed again is first computed as in rollout, without WGrad's
copies.
"""

from dataclasses import replace
from typing import Any

import torch

from isobit.config.training import Recompute
from isobit.models.decoder import Layer, Scorable
from isobit.models.mlp import Routes
from isobit.models.policy import Policy
from isobit.models.shared_prefix import SharedAttention, SharedRows
from isobit.precision.quant_tensor import Side
from isobit.records.batch import PackedBatch

Saved = torch.Tensor | tuple[Any, Any]
"""The tensors that the halves of a layer save, or the residual stream, to compute them again."""


class PackedPass:
    """One forward over packed sequences of the training side, and its backward."""

    def __init__(
        self,
        policy: Policy,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        lengths: tuple[int, ...],
        recompute: Recompute,
        routes: Routes | None = None,
        shared: SharedRows | None = None,
    ) -> None:
        """token_ids, positions: int64 [T], on the device. ``routes`` adds its loss to the router's
        gradient. With ``shared`` the hidden states and their gradient are of rows.
        """
        self._policy, self._decoder = policy, policy.decoder
        self._weights = policy.weights("training")
        if policy.kv_scales is not None and policy.kv_scales.calibration == "trainer":
            self._weights = replace(self._weights, kv_maxima=policy.kv_scales.learnt)
        self._token_ids = token_ids if shared is None else shared.first(token_ids)
        self._positions = positions if shared is None else shared.first(positions)
        self._recompute = recompute
        self._routes = routes
        attend = policy.backend.packed_attention(policy.flow.training, lengths, positions)
        self._attend = attend if shared is None else SharedAttention(attend, shared)
        self._saved: list[Saved] = []
        self._last_h: torch.Tensor | None = None

    @torch.no_grad()
    def forward(self) -> torch.Tensor:
        """Hidden states [T, C], after the final norm."""
        h, x = self._decoder.embedding.forward(self._weights, self._token_ids), None
        for layer in self._decoder.layers:
            h, x = self._layer(layer, h, x)
        self._last_h, hidden = self._decoder.norm.final(self._weights, h, x)
        return hidden

    def backward(self, d_hidden: torch.Tensor) -> None:
        """Add the gradients of everything but lm_head to the masters' ``grad``; once per pass."""
        assert self._last_h is not None, "the forward comes first"
        weights, gradient = self._weights, self._policy.gradient
        with torch.no_grad():  # a decorator would hold d_hidden until the end
            norm = self._decoder.norm
            d = norm.backward(weights, gradient, d_hidden.contiguous(), self._last_h, None)
            self._last_h = None
            del d_hidden
            gradient.done(0)
            for done, layer in enumerate(reversed(self._decoder.layers), start=1):
                d = self._layer_backward(layer, d)
                gradient.done(done)
            self._decoder.embedding.backward(weights, gradient, d, self._token_ids)
            gradient.done(len(self._decoder.layers) + 1)

    def _layer(
        self, layer: Layer, h: torch.Tensor, x: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run a layer, saving what the backward reads unless it is to be computed again."""
        weights = self._weights
        if self._recompute == "full":
            h, x = layer.attention.forward(weights, h, x, self._attend)
            self._saved.append(h)
            return layer.mlp.forward(weights, h, x, self._routes)
        h, x, attention = layer.attention.saving_forward(weights, h, x, self._attend)
        if self._recompute == "mlp":
            h, x = layer.mlp.forward(weights, h, x, self._routes)
            self._saved.append((attention, h))
            return h, x
        h, x, mlp = layer.mlp.saving_forward(weights, h, x, self._routes)
        self._saved.append((attention, mlp))
        return h, x

    def _layer_backward(self, layer: Layer, d: torch.Tensor) -> torch.Tensor:
        """The gradient of the residual stream after a layer -> before it."""
        weights, gradient = self._weights, self._policy.gradient
        attention, mlp = self._take(layer)
        d = layer.mlp.backward(weights, gradient, mlp, d, self._routes)
        del mlp  # else it would be held beside the gradients of attention
        attend, positions = self._attend, self._positions
        return layer.attention.backward(weights, gradient, attend, positions, attention, d)

    def _take(self, layer: Layer) -> tuple[Any, Any]:
        """The tensors that the backward of a layer reads, computed again if they were not saved."""
        saved, weights = self._saved.pop(), self._weights
        if isinstance(saved, torch.Tensor):
            h, x, attention = layer.attention.saving_forward(weights, saved, None, self._attend)
            return attention, layer.mlp.again(weights, h, x)
        attention, mlp = saved
        if isinstance(mlp, torch.Tensor):
            mlp = layer.mlp.again(weights, mlp, None)
        return attention, mlp


@torch.no_grad()
def target_states(
    model: Scorable, batch: PackedBatch, routes: Routes | None = None, side: Side = "training"
) -> tuple[torch.Tensor, torch.Tensor]:
    """The hidden states that predict the N targets of a batch, [N, C] after the final norm, in the
    formats of a side, and their rows, int64 [N], on the device. Routing goes to ``routes``.
    """
    to_device = model.backend.to_device
    positions, rows = to_device(batch.positions), to_device(batch.rows)
    attend = model.backend.packed_attention(model.flow.graph(side), batch.lengths, positions)
    token_ids = to_device(batch.token_ids)
    if batch.row_of is not None:
        shared = SharedRows.of(batch, to_device)
        attend, token_ids = SharedAttention(attend, shared), shared.first(token_ids)
        rows = shared.predicting
    hidden = model.decoder.hidden_states(model.weights(side), token_ids, attend, routes)
    return hidden.index_select(0, rows), rows
