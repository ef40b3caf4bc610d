"""Arguments and results of a back end's operations: weights, operands and batches.

Only a back end looks inside a quantised operand (``isobit.kernels.spec``: ``QuantTensor``;
``isobit.kernels.hopper``: ``QuantRows``).

Shapes: T tokens laid end to end, B sequences, H query heads and G KV heads of D numbers.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol, Self, runtime_checkable

import torch

from isobit.precision.flow import PrecisionFlow, Site
from isobit.precision.quant_tensor import Format, Int8Rows, QuantisedWeight, parts_of_rows


class Quantised(Protocol):
    """E4M3 or INT8 values and the scales of their groups, laid out as a back end's products read
    them.
    """

    @property
    def values(self) -> torch.Tensor:
        """E4M3 or INT8 of two dimensions."""
        ...

    @property
    def scales(self) -> torch.Tensor:
        """FP32, one a group or, of INT8, a row."""
        ...


Gate = Literal["silu", "gelu_tanh", "clamped_silu"]
"""The function of an MLP's gate: x / (1 + exp(-x)), GELU by tanh (``Backend.swiglu``), or with x
and ``up`` clamped x / (1 + exp(-SWIGLU_ALPHA x)), which multiplies up + 1.
"""
SWIGLU_ALPHA, SWIGLU_LIMIT = 1.702, 7.0
GELU_STEEP, GELU_CUBIC = 2 * math.sqrt(2 / math.pi), 0.044715

Operand = torch.Tensor | Quantised
"""An operand of a product: quantised, or in the format between operators."""


@dataclass(frozen=True, slots=True)
class LinearWeight:
    """The weight of a linear: its published matrix [N, K] and its bias [N]."""

    site: Site
    matrix: Operand
    bias: torch.Tensor | None = None

    def rows(self, first: int, last: int) -> "LinearWeight":
        """Views of rows ``first`` .. ``last`` - 1 of matrix and bias: whole blocks of its parts."""
        matrix = self.matrix
        if isinstance(matrix, QuantisedWeight):
            matrix = matrix.rows(first, last)
        else:
            assert isinstance(matrix, torch.Tensor)
            matrix = matrix[first:last]
        site = replace(self.site, parts=parts_of_rows(self.site.parts, first, last))
        return LinearWeight(site, matrix, None if self.bias is None else self.bias[first:last])


LOGITS_CHUNK = 4096
"""Logits of a row that one program of a GPU takes, of which it leaves three numbers."""

ADAPTER_PARTS = 16
"""The most that a back end cuts an adapter's input into, with FP32 sums of each."""


@dataclass(frozen=True, slots=True)
class AdapterWeight:
    """The weight of a linear's adapter (``isobit.models.layers.Adapter``), in the format between
    operators: ``down`` [R, K], the A [r, K] of each target stacked, and ``up``, the targets' B [its
    columns, r] stacked.
    """

    down: LinearWeight
    up: LinearWeight
    columns: tuple[slice, ...]  # of the linear's output, of each target
    scale: float

    @property
    def rank(self) -> int:
        assert isinstance(self.up.matrix, torch.Tensor), "no adapter is quantised"
        return self.up.matrix.shape[1]

    def targets(self) -> Iterator[tuple[slice, slice, slice]]:
        """The columns of t, those of the output, and the rows of B in ``up``, for each target."""
        first = 0
        for index, columns in enumerate(self.columns):
            last = first + columns.stop - columns.start
            place = slice(index * self.rank, (index + 1) * self.rank)
            yield place, columns, slice(first, last)
            first = last


@dataclass(frozen=True, slots=True)
class AdapterGradients:
    """FP32 gradients that ``adapter_backward`` adds to, of ``AdapterWeight``'s matrices."""

    down: torch.Tensor
    up: torch.Tensor


@dataclass(frozen=True, slots=True)
class HeadWeight:
    """lm_head [V, C] as it is published: the forward multiplies by ``int8``, or else by ``table``,
    and the backward by ``table``.
    """

    table: torch.Tensor  # in the format between operators
    int8: Int8Rows | None = None

    def rows(self, first: int, last: int) -> "HeadWeight":
        """Rows ``first`` .. ``last`` - 1, not copied."""
        int8 = None if self.int8 is None else self.int8.rows(first, last)
        return HeadWeight(self.table[first:last], int8)

    def first(self, count: int | None) -> "HeadWeight":
        """The first ``count`` rows, by default all, not copied."""
        return self if count is None else self.rows(0, count)

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "HeadWeight":
        int8 = self.int8
        if int8 is not None:
            int8 = Int8Rows(change(int8.values), change(int8.scales))
        return HeadWeight(change(self.table), int8)

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Its tensors, the table first."""
        derived = () if self.int8 is None else (self.int8.values, self.int8.scales)
        return (self.table, *derived)


@dataclass(frozen=True, slots=True)
class LinearInput:
    """A linear's input [T, K] as FProp reads it and, with a backward, as WGrad reads it."""

    read: Operand
    saved: Operand | None = None


@dataclass(frozen=True, slots=True)
class OutputGradient:
    """dY [T, N] of a linear, as DGrad and as WGrad read it."""

    rows: Operand
    tokens: Operand


@dataclass(frozen=True, slots=True)
class Normed:
    """A residual stream after an addition, and its RMSNorm."""

    h: torch.Tensor  # [T, C]
    norm: torch.Tensor | None  # [T, C], where it was asked for or no linear follows
    input: LinearInput | None  # the norm as the next linear reads it, if there is one


RoutedExperts = Any
"""Saved results of a layer's experts for their backward; only the back end looks inside."""


@dataclass(frozen=True, slots=True)
class ExpertGradients:
    """FP32 gradients that ``experts_backward`` adds to: [E 2 I, C] and [E C, I], and of biases
    [E 2 I] and [E C].
    """

    gate_up: torch.Tensor
    down: torch.Tensor
    gate_up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class QkvTransform:
    """The transform of Q, K and V between a layer's projection and attention.

    x = x + bias;  Q and K: RMSNorm of each head, then rotary positions.  Each result is rounded to
    the format between operators.  Before E4M3 or INT8: Q and K times a Hadamard matrix.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    cos: torch.Tensor  # FP32 [positions, D/2]
    sin: torch.Tensor
    epsilon: float
    q_norm: torch.Tensor | None  # [D], as ``k_norm``; both or none
    k_norm: torch.Tensor | None
    bias: torch.Tensor | None  # [(H + 2 G) D]
    window: int | None = None
    """A query at position p sees the keys p - window + 1 .. p; None, all up to p."""
    hadamard: bool = False  # whether attention reads 8 bits (``isobit.kernels.spec.qkv``)
    scale_bytes: torch.Tensor | None = None
    """uint8 [3]: fixed E8M0 scales of Q, K and V in E4M3; one that is 0, or None, is computed from
    each vector.
    """
    maxima: torch.Tensor | None = None
    """FP32 [3], raised to the largest magnitudes of Q and K, behind the Hadamard matrix even where
    ``hadamard`` is off, and of V; vectors that are not finite are left out.
    """
    sinks: torch.Tensor | None = None
    """[H]: a further score of each query head, whose probability goes to no value."""


@dataclass(frozen=True, slots=True)
class QkvGradients:
    """FP32 gradients that ``qkv_backward`` adds to; None where there is none to be made."""

    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    bias: torch.Tensor | None


DELTA_CHUNK = 64
"""Tokens of a chunk of a gated delta rule, and of what a sequence carries of one."""


@dataclass(frozen=True, slots=True)
class DeltaShape:
    """The heads of a gated delta rule: those of queries and keys, each read by as many value heads,
    with their sizes, and the tokens that its convolution sees.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    width: int

    @property
    def channels(self) -> int:
        """Those of the convolution: Q, K and V."""
        return 2 * self.key_heads * self.key_dim + self.values

    @property
    def values(self) -> int:
        """Numbers of all value heads."""
        return self.value_heads * self.value_dim


@dataclass(frozen=True, slots=True)
class DeltaInputs:
    """Inputs of a gated delta rule, or their gradients: x [T, channels], and a and b [T, value
    heads], of which decay and beta are made.
    """

    x: torch.Tensor
    a: torch.Tensor
    b: torch.Tensor

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "DeltaInputs":
        return DeltaInputs(change(self.x), change(self.a), change(self.b))


@dataclass(frozen=True, slots=True)
class DeltaWeights:
    """The weights of a gated delta rule: ``convolution`` [channels, width], and logarithms of rates
    and biases of steps [value heads].
    """

    shape: DeltaShape
    convolution: torch.Tensor
    a_log: torch.Tensor
    dt_bias: torch.Tensor


@dataclass(frozen=True, slots=True)
class DeltaGradients:
    """FP32 gradients of ``DeltaWeights``, which are added to."""

    convolution: torch.Tensor
    a_log: torch.Tensor
    dt_bias: torch.Tensor


@dataclass(frozen=True, slots=True)
class PagedBatch:
    """One engine forward, on the host: T new tokens end to end in the order of B sequences."""

    counts: tuple[int, ...]  # new tokens of each sequence, at least 1
    lengths: tuple[int, ...]  # tokens of each sequence in the cache after this forward
    block_table: torch.Tensor  # int64 [B, most pages]; any page beyond a sequence's own
    slots: torch.Tensor
    """int64 [T], where each new token's K and V go: page * tokens of a page + offset."""
    carries: torch.Tensor | None = None
    """int64 [2, B], for delta rules: the carry that each sequence reads, that of the chunk of its
    last token in the cache, or -1 where it begins; and the one that it writes, that of the chunk of
    its last new token, which nobody else reads. Where they are one, all new rows are of its chunk.
    """


@dataclass(frozen=True, slots=True)
class DecodeBatch:
    """One new token for each of B sequences, on the device; or of several of one (``places``)."""

    positions: torch.Tensor  # int64 [B], of the new token in its sequence
    slots: torch.Tensor  # int64 [B]: where its K and V go
    table: torch.Tensor  # int32 [B, pages]
    lengths: torch.Tensor  # int32 [B]: tokens in the cache, the new one included
    max_length: int  # a bound of the lengths, now and when a captured step is replayed
    carries: torch.Tensor | None = None
    """int32 [2, B], for delta rules: those of ``PagedBatch``; a sequence at position 0 may go on
    from one all the same, where nobody reads what comes of it.
    """
    places: torch.Tensor | None = None
    """int64 [B]: how many rows stand before this one that are of the same sequence, one token after
    the other, which to attention are sequences of their own; None where none has more than one.
    """


@dataclass(frozen=True, slots=True)
class Draws:
    """Parameters for drawing the next tokens of N samples, on the host or where logits are."""

    rows: torch.Tensor  # int32 [N]: the row of the logits of each sample; every row is used
    temperatures: torch.Tensor  # FP32 [N]; 0 is greedy, its log-probability taken at temperature 1
    keys: torch.Tensor  # int64 [N]; with ``positions`` the key of the noise
    positions: torch.Tensor  # int64 [N]
    filters: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
    """top-k int64, top-p FP64 and min-p FP64 [N] (0, 1 and 0 are off); None where none is on."""

    def map(self, move: Callable[[torch.Tensor], torch.Tensor]) -> "Draws":
        """The same with every tensor moved."""
        filters = self.filters
        if filters is not None:
            filters = move(filters[0]), move(filters[1]), move(filters[2])
        return Draws(
            move(self.rows), move(self.temperatures), move(self.keys), move(self.positions), filters
        )


@dataclass(frozen=True, slots=True)
class Drawn:
    """A token int64 [N] for each sample, its log-probability FP32 [N] over the full vocabulary, and
    that under the truncated distribution where filters were given.  Logits that are not finite give
    a log-probability that is not.
    """

    tokens: torch.Tensor
    log_probs: torch.Tensor
    truncated: torch.Tensor | None = None


class Heads(Protocol):
    """Encoded vectors, one a token and head."""

    @property
    def values(self) -> torch.Tensor:
        """[..., D] in the format's dtype."""
        ...

    @property
    def scales(self) -> torch.Tensor:
        """The factors of the values, [...]: uint8 E8M0 for 2^(byte - 127), or FP32."""
        ...


class KvShape(Protocol):
    """The part of a model's configuration that a KV cache needs."""

    @property
    def num_layers(self) -> int: ...

    @property
    def num_kv_heads(self) -> int: ...

    @property
    def head_dim(self) -> int: ...

    @property
    def delta(self) -> DeltaShape | None:
        """The delta rule of ``delta_layers``."""
        ...

    @property
    def delta_layers(self) -> tuple[int, ...]:
        """Layers with a gated delta rule in place of attention."""
        ...


def kv_formats(shape: KvShape, flow: PrecisionFlow) -> dict[int, Format]:
    """The format of the pages of each layer that has attention."""
    layers = [layer for layer in range(shape.num_layers) if layer not in shape.delta_layers]
    return {layer: flow.rollout.attention_format(layer) for layer in layers}


class KvCache(Protocol):
    """Pages of K and V for all layers that have attention, and carries for those with a delta rule,
    which the scheduler assigns to sequences.
    """

    @property
    def num_pages(self) -> int: ...

    @property
    def page_tokens(self) -> int:
        """Tokens of a page: a KV tile of the back end's attention."""
        ...

    def copy_pages(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy ``sources[i]`` to ``targets[i]`` in all layers; targets differ, none is a source."""
        ...

    def copy_carries(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """The same of carries."""
        ...

    def clear_pages(self, pages: Sequence[int]) -> None:
        """Write zeros into pages of all layers, in place."""
        ...

    def clear(self) -> None:
        """Write zeros everywhere, in place."""
        ...


class Attend(Protocol):
    """Attention of one layer in the rollout."""

    def __call__(self, layer: int, qkv: torch.Tensor, transform: QkvTransform) -> torch.Tensor:
        """Q, K and V as the projection gives them, [T, (H + 2 G) D] -> [T, H D]."""
        ...


class Attended(Protocol):
    """What attention of a layer leaves for its backward; only its back end looks further inside."""

    @property
    def output(self) -> torch.Tensor:
        """[T, H, D]"""
        ...

    def rows(self, index: torch.Tensor) -> Self:
        """The same of the tokens ``index``, int64."""
        ...


class AttendWithBackward(Attend, Protocol):
    """Attention of the training forward, causal within each sequence of a packed batch."""

    def attend(
        self, layer: int, qkv: torch.Tensor, transform: QkvTransform
    ) -> tuple[torch.Tensor, Attended]:
        """[T, H D], and what the backward reads."""
        ...

    def backward(
        self, attended: Any, d_output: torch.Tensor, sinks: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The gradient of [T, H D] -> dq [T, H, D], dk and dv [T, G, D], straight through.
        ``sinks``, FP32 [H], is the gradient of the sinks, which is added to.
        """
        ...


@runtime_checkable
class DeltaRule(Protocol):
    """The gated delta rule of one layer in the rollout, with a state for each sequence."""

    def delta_rule(self, layer: int, inputs: DeltaInputs, weights: DeltaWeights) -> torch.Tensor:
        """-> [T, values]"""
        ...


@runtime_checkable
class DeltaRuleWithBackward(DeltaRule, Protocol):
    """The same in the training forward, from the start of each sequence."""

    def delta_rule_saving(
        self, inputs: DeltaInputs, weights: DeltaWeights
    ) -> tuple[torch.Tensor, Any]:
        """[T, values], and what the backward reads: a dataclass whose field ``inputs`` they are."""
        ...

    def delta_rule_backward(
        self, saved: Any, d_output: torch.Tensor, weights: DeltaWeights, gradients: DeltaGradients
    ) -> DeltaInputs:
        """The gradient of [T, values] -> those of the inputs, in the same dtype."""
        ...


_ROWS = 1 << 16  # positions whose FP64 angles are in memory at a time


@dataclass(frozen=True, slots=True)
class RopeTable:
    """cos and sin, FP32 [positions, D/2]; with YaRN both times its attention factor.

    Angles, cos and sin are computed in FP64 and rounded to FP32 once, since the bits of `pow` in
    FP32 depend on the place in the tensor.
    """

    cos: torch.Tensor
    sin: torch.Tensor
    other: "RopeTable | None" = None
    """The table of layers without rotary positions, of ones and zeros, or with a theta of their own
    and no scaling, where a decoder has any.
    """

    @classmethod
    def build(
        cls,
        inverse_frequencies: torch.Tensor,
        positions: int,
        attention_scaling: torch.Tensor | float = 1.0,
    ) -> "RopeTable":
        """Make the table from FP64 inverse frequencies [D/2] and the factors of cos and sin."""
        cos, sin = torch.empty(2, positions, len(inverse_frequencies), dtype=torch.float32).unbind()
        for first in range(0, positions, _ROWS):
            places = torch.arange(first, min(first + _ROWS, positions), dtype=torch.float64)
            angles = places[:, None] * inverse_frequencies[None, :]
            cos[first : first + _ROWS] = angles.cos().mul_(attention_scaling)
            sin[first : first + _ROWS] = angles.sin().mul_(attention_scaling)
        return cls(cos, sin)

    def with_unturned(self) -> "RopeTable":
        """The same, for a decoder with layers without rotary positions."""
        other = RopeTable(torch.ones_like(self.cos), torch.zeros_like(self.sin))
        return RopeTable(self.cos, self.sin, other)

    def tensors(self) -> list[torch.Tensor]:
        return [self.cos, self.sin] + ([] if self.other is None else self.other.tensors())

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> "RopeTable":
        other = None if self.other is None else self.other.map(function)
        return RopeTable(function(self.cos), function(self.sin), other)

    def to(self, device: torch.device) -> "RopeTable":
        return self.map(lambda x: x.to(device))

    def rows(self, positions: torch.Tensor) -> "RopeTable":
        """The rows of positions int64 [T], shaped [T, 1, D/2] to broadcast over heads."""
        cos, sin = (x.index_select(0, positions)[:, None] for x in (self.cos, self.sin))
        return RopeTable(cos, sin)

    def backward(self) -> "RopeTable":
        """The table of the transposed rotation."""
        return RopeTable(self.cos, -self.sin)
