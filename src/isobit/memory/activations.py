"""Bytes of activations, published weights and frozen models, computed from the units' own sizes
(``isobit.models.layers``). The tests run the real passes without storage and count.

Beside weights and gradients, a forward and backward of T tokens takes, with attention and MLP as
the halves of a layer,

    saved by a layer, per token:
      none              both halves
      mlp               attention, and the residual stream that the MLP reads
      full              the residual stream that attention reads
    and the sources of the digests of experts that are computed again

    passing, the largest of:
      the back end's workspaces (lm_head's logits, for example)
      layer, forward    T (3 streams + a norm as read + what the layer makes and does not save) and
                        the sums of a product that is split along K
      layer, backward   T (a stream + what is computed again + the larger of the MLP's gradients,
                        and a stream and attention's less the MLP's saved, which is freed); and what
                        the matrix ``once`` needs beyond the stream freed before it
      both              what attention makes for each of its tokens, where these share their rows
                        (``isobit.models.shared_prefix``)

A model that only scores (a reference model, a reward model, a shadow) takes the published weights
of one side (``isobit.models.frozen``), with ``offload`` in page-locked main memory. One that is not
``lasting``, the BF16 shadow that calibrates a clip (``isobit.training.calibration``), exists only
while it scores. In a checkpoint a refreshed reference has no rotary table and no second form of
lm_head, which are functions of the rest.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from math import prod

from isobit.config.training import Recompute
from isobit.kernels.sizes import AttentionShape, Sizes, WorkShape
from isobit.models.config import ModelConfig
from isobit.models.decoder import LM_HEAD, build_decoder, decoder_shape
from isobit.models.frozen import SIDE
from isobit.models.layers import Master, UnitBytes
from isobit.precision.flow import Graph, PrecisionFlow
from isobit.precision.quant_tensor import DTYPES, parts_of_rows

_OF_HEAD = ("lm_head, backward", "logits chunk")
"""The workspaces in which a back end makes lm_head's gradient."""


def saved_bytes(
    shape: ModelConfig,
    flow: PrecisionFlow,
    sizes: Sizes,
    recompute: Recompute,
    tokens: int,
    attended: int = 0,
) -> int:
    """What all layers keep for the backward of a micro-batch; ``attended`` as in
    ``passing_bytes``.
    """
    layers = _layers(shape, flow, sizes)
    padding = sum(layer.mlp.saved_once for layer in layers) if recompute == "none" else 0
    beyond = 0 if recompute == "full" else max(0, attended - tokens)
    of_rows = sum(layer.saved(recompute) for layer in layers)
    of_tokens = sum(layer.attention.attended_saved for layer in layers)
    return tokens * of_rows + beyond * of_tokens + padding


def passing_bytes(
    shape: ModelConfig,
    flow: PrecisionFlow,
    sizes: Sizes,
    recompute: Recompute,
    tokens: int,
    longest: int,
    head_sum: int = 0,
    attended: int = 0,
) -> dict[str, int]:
    """Short-lived bytes by the moment; ``head_sum`` is for lm_head's gradient, and ``attended`` the
    tokens of attention where they share their rows, or 0. Moments do not overlap.
    """
    layers = _layers(shape, flow, sizes)
    workspaces = sizes.workspaces(_work(shape, flow, tokens, longest, attended))
    return {
        **{name: size + head_sum * (name in _OF_HEAD) for name, size in workspaces.items()},
        "a layer, forward": max(
            layer.forward(recompute, tokens, attended) + layer.made_once for layer in layers
        )
        + _product_sums(flow.training, sizes, tokens),
        "a layer, backward": max(
            layer.backward(recompute, tokens, attended) + layer.once(recompute, tokens)
            for layer in layers
        ),
    }


def scoring_bytes(
    shape: ModelConfig,
    flow: PrecisionFlow,
    sizes: Sizes,
    tokens: int,
    longest: int,
    attended: int = 0,
) -> int:
    """The peak beside the weights of a forward without a backward, in a layer or in lm_head."""
    workspaces = sizes.workspaces(_work(shape, flow, tokens, longest, attended))
    of_training = ("forward", "backward")
    head = (size for moment, size in workspaces.items() if not moment.endswith(of_training))
    layers = _layers(shape, flow, sizes)
    layer = max(
        tokens * layer.scoring + attended * layer.attention.attended + layer.made_once
        for layer in layers
    )
    layer += _product_sums(flow.training, sizes, tokens)
    return max(layer + tokens * sum(layer.mlp.noted for layer in layers), *head)


def _product_sums(graph: Graph, sizes: Sizes, tokens: int) -> int:
    """Bytes of the sums of the linear that takes most."""
    linears = (site for site in graph.sites if site.kind == "linear")
    return max(sizes.product_sums(site, tokens) for site in linears)


def _work(
    shape: ModelConfig, flow: PrecisionFlow, tokens: int, longest: int, attended: int = 0
) -> WorkShape:
    return WorkShape(
        AttentionShape(shape.num_heads, shape.num_kv_heads, shape.head_dim),
        decoder_shape(shape).linears,
        shape.hidden_size,
        0 if shape.score_head else shape.num_drawn,
        tokens,
        longest,
        flow.training.site(LM_HEAD).forward == "int8",
        attended,
        shape.delta,
    )


@dataclass(frozen=True, slots=True)
class _Layer:
    """Bytes per token of one layer."""

    attention: UnitBytes
    mlp: UnitBytes

    def once(self, recompute: Recompute, tokens: int) -> int:
        """What the backward makes independently of the tokens."""
        halves = self.attention, self.mlp
        matrices = max(0, max(half.once for half in halves) - tokens * self.mlp.input)
        beside = [half.once for half in halves if half.made_once]
        padding = 0 if recompute == "none" else self.mlp.saved_once
        return max([matrices, *beside]) + padding

    @property
    def made_once(self) -> int:
        """What a forward makes independently of the tokens."""
        return max(self.attention.made_once, self.mlp.made_once)

    @property
    def scoring(self) -> int:
        """Everything in a forward without a backward."""
        # each half has what came into it, what it adds to and what it adds
        streams = 3 * self.mlp.input
        return streams + max(streams, self.attention.made) + self.mlp.made

    def saved(self, recompute: Recompute) -> int:
        if recompute == "full":
            return self.attention.input + self.mlp.noted
        mlp = self.mlp.input + self.mlp.noted if recompute == "mlp" else self.mlp.saved
        return self.attention.saved + mlp

    def forward(self, recompute: Recompute, tokens: int, attended: int = 0) -> int:
        """Bytes of a forward, beside what it saves; ``attended`` as in ``passing_bytes``."""
        # before the layer, or what was added to it; what attention adds; what the MLP adds
        streams = 3 * self.mlp.input
        sharing = tokens * (streams + self.attention.made) + attended * self.attention.attended
        if recompute == "none":
            mlp = max(self.attention.read, self.mlp.read) + self.mlp.kept
            made = max(self.attention.read + self.attention.kept, mlp)
        else:
            made = self.mlp.made + (self.attention.made if recompute == "full" else 0)
        return max(tokens * (streams + made), sharing if attended else 0)

    def backward(self, recompute: Recompute, tokens: int, attended: int = 0) -> int:
        """Bytes of a backward, likewise."""
        again = self.saved("none") - self.saved(recompute)
        stream = self.mlp.input
        # the MLP is done where attention's turn comes, and its gradient of the stream is there too
        attention = tokens * (stream + self.attention.gradients - self.mlp.saved)
        attention += attended * self.attention.attended_gradients
        return tokens * (stream + again) + max(tokens * self.mlp.gradients, attention)


@cache
def _layers(shape: ModelConfig, flow: PrecisionFlow, sizes: Sizes) -> tuple[_Layer, ...]:
    return tuple(
        _Layer(layer.attention.bytes(sizes, flow.training), layer.mlp.bytes(sizes, flow.training))
        for layer in build_decoder(shape).layers
    )


@cache
def published_bytes(shape: ModelConfig, flow: PrecisionFlow, sizes: Sizes) -> int:
    """What both sides read, shared matrices counted once, and the rotary tables."""
    rope = 4 * shape.max_positions * shape.head_dim * (2 if shape.other_rope_layers else 1)
    head = 0
    if not shape.score_head:
        sites = {graph.site(LM_HEAD) for graph in (flow.rollout, flow.training)}
        head = sum(sizes.head_copy(one, shape.vocab_size, shape.hidden_size) for one in sites)
    return rope + head + master_bytes(shape, flow, sizes)


@cache
def shared_bytes(
    shape: ModelConfig, flow: PrecisionFlow, sizes: Sizes, rollout_tp: int
) -> tuple[int, int, int]:
    """What each of ``rollout_tp`` processes that share an engine holds: what it publishes of
    ``published_bytes``, in shares of equal size; the matrices of a layer that it gathers; and its
    part of lm_head.
    """
    whole = published_bytes(shape, flow, sizes)
    if rollout_tp == 1:
        return whole, 0, 0
    layers: dict[str, int] = {}
    for name, master in build_decoder(shape).masters().items():
        if master.kind == "matrix":
            path = name.rpartition(".")[0]
            sites = {flow.rollout.site(path), flow.training.site(path)}
            size = sum(sizes.matrix(site, master.shape[1]) for site in sites)
            layer = path.rpartition(".")[0]
            layers[layer] = layers.get(layer, 0) + size
    matrices, graph = sum(layers.values()), flow.rollout
    head = DTYPES[graph.activations].itemsize * shape.vocab_size * shape.hidden_size
    head += sizes.head_copy(graph.site(LM_HEAD), shape.vocab_size, shape.hidden_size)
    own = whole - matrices + -(-matrices // rollout_tp)
    return own, max(layers.values()), -(-head // rollout_tp)


@cache
def master_bytes(shape: ModelConfig, flow: PrecisionFlow, sizes: Sizes) -> int:
    """What is published of each master, in every form that a side reads."""
    return sum(
        _row_bytes(name, master, 0, master.shape[0], flow, sizes)
        for name, master in build_decoder(shape).masters().items()
    )


@cache
def kept_bytes(
    shape: ModelConfig, flow: PrecisionFlow, sizes: Sizes, processes: int
) -> tuple[int, ...]:
    """What each of so many trainers keeps for rollouters that come back: the published rows of the
    masters that learn which it passes on (``isobit.models.kept_weights``).
    """
    decoder, totals = build_decoder(shape), [0] * processes
    masters = decoder.trained()
    for name, cuts in decoder.ownership(processes).cuts.items():
        for rank, (first, last) in enumerate(pairwise(cuts)):
            totals[rank] += _row_bytes(name, masters[name], first, last, flow, sizes)
    return tuple(totals)


def _row_bytes(
    name: str, master: Master, first: int, last: int, flow: PrecisionFlow, sizes: Sizes
) -> int:
    """What is published of rows ``first`` to ``last`` of a master, of a matrix whole blocks."""
    if master.kind == "matrix":
        path = name.rpartition(".")[0]
        sites = {flow.rollout.site(path), flow.training.site(path)}
        parts = (replace(site, parts=parts_of_rows(site.parts, first, last)) for site in sites)
        return sum(sizes.matrix(part, master.shape[1]) for part in parts)
    width = DTYPES[flow.training.activations].itemsize
    return (4 if master.offset else width) * (last - first) * prod(master.shape[1:])


_BYTES_A_PAIR = 36
"""Bytes of a token of the vocabulary in a comparison of two models: logits, log-probabilities and
terms in FP32, and terms in FP64 and as integers.
"""


@dataclass(frozen=True, slots=True)
class FrozenModel:
    """A model that only scores, as a plan describes it."""

    name: str
    shape: ModelConfig
    flow: PrecisionFlow
    table: str  # the recipe's table with its `model` and `offload`
    offload: bool = False
    lasting: bool = True  # whether it exists while it does not score
    shared: bool = False  # whether its weights are the policy's own: the base of adapters
    teaches: bool = False  # whether its whole distributions are compared with the policy's

    @property
    def grades(self) -> bool:
        """Whether it is a reward model, which ranks that sample use."""
        return self.table.startswith("reward")

    @property
    def stays(self) -> bool:
        """Whether it is on the device while it does not score."""
        return self.lasting and not self.offload

    def weight_bytes(self, sizes: Sizes) -> int:
        if self.shared:
            return 0
        return published_bytes(self.shape, self.flow.one_sided(SIDE), sizes)

    def checkpoint_bytes(self, sizes: Sizes) -> int:
        """Bytes of its tensors in a checkpoint."""
        return master_bytes(self.shape, self.flow.one_sided(SIDE), sizes)

    def scoring_bytes(self, sizes: Sizes, tokens: int, longest: int, attended: int = 0) -> int:
        """The peak beside its weights for ``tokens`` tokens at once."""
        return scoring_bytes(self.shape, self.flow, sizes, tokens, longest, attended)

    def comparing_bytes(self, sizes: Sizes, tokens: int) -> int:
        """What is taken beside the policy's forward and backward of ``tokens`` tokens: its hidden
        states, and two models' logits of a part of them, in all forms.
        """
        if not self.teaches:
            return 0
        width = DTYPES[self.flow.training.activations].itemsize
        rows = min(tokens, max(1, sizes.logits_at_once // self.shape.num_drawn))
        hidden = 2 * width * self.shape.hidden_size * tokens
        return hidden + _BYTES_A_PAIR * self.shape.num_drawn * rows

    def with_offload(self) -> "FrozenModel":
        """The same model in main memory between its turns, but for a teacher, which stays on the
        device.
        """
        return replace(self, offload=self.lasting and self.table != "teacher")


def page_locked(size: int) -> int:
    """What torch allocates for a page-locked buffer: the next power of two."""
    return 1 << (size - 1).bit_length() if size else 0


def page_locked_bytes(models: Sequence[FrozenModel], sizes: Sizes) -> dict[str, int]:
    """Bytes of main memory by name, of offloaded models."""
    total: dict[str, int] = {}
    for model in models:
        if model.offload:
            size = page_locked(model.weight_bytes(sizes))
            total[model.name] = total.get(model.name, 0) + size
    return total


def added_up(models: Sequence[FrozenModel], sizes: Sizes) -> dict[str, int]:
    """Bytes of the weights by name."""
    total: dict[str, int] = {}
    for model in models:
        total[model.name] = total.get(model.name, 0) + model.weight_bytes(sizes)
    return total
