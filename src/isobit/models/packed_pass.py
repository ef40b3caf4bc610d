"""A forward over packed sequences and its backward: gradients straight into the masters.

    forward, a layer    what its backward reads is saved
    backward            the same in reverse.  With d the gradient of the residual stream behind an
                        operation, each linear has dX = dY W and adds dY^T X to its master's
                        gradient; each norm gives d + (gradient through the norm)

Nothing is computed twice for the loss, and the forward's bits are those of ``Decoder``.  Gradients
between operators are in the format between operators; those of the masters are FP32 and added up
one addition an element and micro-batch (``isobit.parallel.gradient_sum``), which is told when a
group of masters (``Decoder.backward_groups``) is finished.  Everything has one fixed order.

``recompute`` trades saved memory for operations that are done once more, to the same bits, on the
way back: ``mlp`` leaves out what is behind the second norm, half of all, and computes it again from
the residual stream; ``full`` keeps the residual stream alone and computes the layer again.  What
will be computed again is made at first as rollout makes it, without WGrad's copies.
"""

from typing import Any

import torch

from isobit.config.training import Recompute
from isobit.models.decoder import Layer
from isobit.models.layers.attention import SavedAttention
from isobit.models.policy import Policy
from isobit.models.routes import Routes

Saved = torch.Tensor | tuple[SavedAttention, Any]
"""Of a layer: what its halves save, or the residual stream in the place of what is computed again.
"""


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
    ) -> None:
        """token_ids and positions int64 [T], on the policy's device.  Routing is noted in
        ``routes``, whose loss adds to the router's gradient.
        """
        self._policy, self._decoder = policy, policy.decoder
        self._weights = policy.weights("training")
        self._token_ids, self._positions, self._recompute = token_ids, positions, recompute
        self._routes = routes
        graph = policy.flow.training
        self._attend = policy.backend.packed_attention(graph, lengths, positions)
        self._saved: list[Saved] = []
        self._last_h: torch.Tensor | None = None

    @torch.no_grad()
    def forward(self) -> torch.Tensor:
        """Hidden states [T, C], final norm applied."""
        h, x = self._decoder.embedding.forward(self._weights, self._token_ids), None
        for layer in self._decoder.layers:
            h, x = self._layer(layer, h, x)
        self._last_h, hidden = self._decoder.norm.final(self._weights, h, x)
        return hidden

    def backward(self, d_hidden: torch.Tensor) -> None:
        """Add the gradients of everything but lm_head to the masters' ``grad``; the pass is used
        up.
        """
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
        """The layer, saved as far as it is not computed again."""
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
        """The gradient of the residual stream behind a layer -> before it."""
        weights, gradient = self._weights, self._policy.gradient
        attention, mlp = self._take(layer)
        d = layer.mlp.backward(weights, gradient, mlp, d, self._routes)
        del mlp  # else it would stand beside the gradients of attention
        attend, positions = self._attend, self._positions
        return layer.attention.backward(weights, gradient, attend, positions, attention, d)

    def _take(self, layer: Layer) -> tuple[SavedAttention, Any]:
        """What the backward of a layer reads, computed again where it was not saved."""
        saved, weights = self._saved.pop(), self._weights
        if isinstance(saved, torch.Tensor):
            h, x, attention = layer.attention.saving_forward(weights, saved, None, self._attend)
            return attention, layer.mlp.again(weights, h, x)
        attention, mlp = saved
        if isinstance(mlp, torch.Tensor):
            mlp = layer.mlp.again(weights, mlp, None)
        return attention, mlp
