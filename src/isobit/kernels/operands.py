"""What passes through the seam between the layers and a back end: weights, operands and batches.

Layers hand these from one operation to the next without looking inside: how a quantised operand is
laid out is its back end's business (``isobit.kernels.spec``: ``QuantTensor``;
``isobit.kernels.hopper``: ``QuantRows``).

Shapes: T tokens laid end to end, B sequences, H query heads and G KV heads of D numbers.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from isobit.precision.flow import PrecisionFlow, Site
from isobit.precision.formats import Format
from isobit.precision.quant_tensor import QuantTensor, parts_of_rows


class Quantised(Protocol):
    """E4M3 values and the scales of their groups, laid out as a back end's products read them."""

    @property
    def values(self) -> torch.Tensor:
        """E4M3 of two dimensions."""
        ...

    @property
    def scales(self) -> torch.Tensor:
        """FP32, one a group."""
        ...


Operand = torch.Tensor | Quantised
"""Of a product: quantised, or in the format between operators."""


@dataclass(frozen=True, slots=True)
class LinearWeight:
    """What a linear reads, made once per publication: its matrix [N, K] as the back end multiplies
    with it, and its bias [N].
    """

    site: Site
    matrix: Operand
    bias: torch.Tensor | None = None

    def rows(self, first: int, last: int) -> "LinearWeight":
        """Rows ``first`` .. ``last`` - 1 of matrix and bias, not copied: whole blocks of its parts.
        What is written there stands in the whole.
        """
        matrix = self.matrix
        if isinstance(matrix, QuantTensor):
            matrix = matrix.rows(first, last)
        else:
            assert isinstance(matrix, torch.Tensor)
            matrix = matrix[first:last]
        site = replace(self.site, parts=parts_of_rows(self.site.parts, first, last))
        return LinearWeight(site, matrix, None if self.bias is None else self.bias[first:last])


@dataclass(frozen=True, slots=True)
class LinearInput:
    """A linear's input [T, K]: as FProp reads it, and as WGrad will, in a pass with a backward."""

    read: Operand
    saved: Operand | None = None


@dataclass(frozen=True, slots=True)
class OutputGradient:
    """dY [T, N] of a linear: as DGrad reads it, and as WGrad does."""

    rows: Operand
    tokens: Operand


@dataclass(frozen=True, slots=True)
class Normed:
    """A residual stream after an addition, and its RMSNorm."""

    h: torch.Tensor
    """The residual stream [T, C]."""
    norm: torch.Tensor | None
    """RMSNorm(h) [T, C], where it was asked for or no linear follows."""
    input: LinearInput | None
    """The same as the linear behind it reads it, where one does."""


@dataclass(frozen=True, slots=True)
class Routing:
    """Which experts each token goes to, by rank, and what the backward of that reads."""

    experts: torch.Tensor
    """int32 [T, k]: by falling logit; of equal logits the lower expert comes first."""
    weights: torch.Tensor
    """FP32 [T, k]: what each expert's output is multiplied with."""
    logits: torch.Tensor
    """FP32 [T, E]"""


@dataclass(frozen=True, slots=True)
class RouterLoss:
    """What the router's own losses add to its gradient.

    For each sequence, with f_e the share of its T_s k choices that fell on expert e times E, P_e
    the mean over its tokens of the softmax, and z_t = log sum_e exp(logit_te):

        balance * sum_e f_e P_e  +  z * mean over its tokens of z_t^2

    (Fedus et al., arXiv 2101.03961, section 2.2; Zoph et al., arXiv 2202.08906, section 2.2), f_e
    taken as a constant.
    """

    means: torch.Tensor
    """FP32 [S, T]: a row has 1 / T_s at the tokens of its sequence, so that a product with it is a
    sequence's mean (``isobit.kernels.router_loss``).
    """
    balance: float
    """Coefficient of a sequence's load-balancing loss, divided by the update's sequences."""
    z: float
    """Coefficient of a sequence's z-loss, likewise."""


RoutedExperts = Any
"""What the experts of a layer read and made, for their backward; only its back end looks inside."""


@dataclass(frozen=True, slots=True)
class ExpertGradients:
    """FP32 gradients that ``experts_backward`` adds to: of gate and up [E 2 I, C] and of down
    [E C, I].
    """

    gate_up: torch.Tensor
    down: torch.Tensor


@dataclass(frozen=True, slots=True)
class QkvTransform:
    """What a layer does to Q, K and V between its projection and attention.

    x = x + bias;  Q and K: RMSNorm of each head, then rotary positions.  Each result is rounded to
    the format between operators.  Before E4M3: Q and K times a Hadamard matrix.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    cos: torch.Tensor
    """FP32 [positions, D/2]"""
    sin: torch.Tensor
    epsilon: float
    q_norm: torch.Tensor | None
    """[D], as ``k_norm``; both or none."""
    k_norm: torch.Tensor | None
    bias: torch.Tensor | None
    """[(H + 2 G) D]"""
    window: int | None = None
    """Attention's: a query at position p sees the keys p - window + 1 .. p; None, all up to p."""
    hadamard: bool = False
    """Whether Q and K are what attention in E4M3 reads (``isobit.kernels.spec.hadamard``)."""


@dataclass(frozen=True, slots=True)
class QkvGradients:
    """FP32 gradients that ``qkv_backward`` adds to; None where a model has no such master."""

    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    bias: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class PagedBatch:
    """The ragged batch of one engine forward: T new tokens laid end to end in the order of B
    sequences.  All of it is on the host.
    """

    counts: tuple[int, ...]
    """New tokens of each sequence, at least 1."""
    lengths: tuple[int, ...]
    """Tokens of each sequence in the cache after this forward."""
    block_table: torch.Tensor
    """int64 [B, most pages]; beyond a sequence's pages it may hold any page."""
    slots: torch.Tensor
    """int64 [T], where each new token's K and V go: page * tokens of a page + offset."""


@dataclass(frozen=True, slots=True)
class DecodeBatch:
    """One new token for each of B sequences, everything on the device."""

    positions: torch.Tensor
    """int64 [B]: the place of the new token in its sequence."""
    slots: torch.Tensor
    """int64 [B]: where its K and V go."""
    table: torch.Tensor
    """int32 [B, pages]"""
    lengths: torch.Tensor
    """int32 [B]: tokens in the cache, the new one included."""
    max_length: int
    """No length is greater, now or when a captured step is replayed."""


@dataclass(frozen=True, slots=True)
class Draws:
    """What the next tokens of N samples are drawn with; all on the host or where logits are."""

    rows: torch.Tensor
    """int32 [N]: the row of the logits of each sample; every row is used."""
    temperatures: torch.Tensor
    """FP32 [N]; 0 is greedy, its log-probability taken at temperature 1."""
    keys: torch.Tensor
    """int64 [N], with ``positions`` what noise is keyed by."""
    positions: torch.Tensor
    """int64 [N]"""
    filters: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
    """top-k int64, top-p FP64 and min-p FP64 [N] (0, 1 and 0 are off); None where none is on."""

    def map(self, move: Callable[[torch.Tensor], torch.Tensor]) -> "Draws":
        """The same with every tensor moved."""
        filters = self.filters
        if filters is not None:
            filters = move(filters[0]), move(filters[1]), move(filters[2])
        return Draws(
            move(self.rows),
            move(self.temperatures),
            move(self.keys),
            move(self.positions),
            filters,
        )


@dataclass(frozen=True, slots=True)
class Drawn:
    """A token int64 [N] for each sample, its log-probability FP32 [N] over the full vocabulary, and
    that under the truncated distribution where filters were given.

    Logits that are not finite give a log-probability that is not.
    """

    tokens: torch.Tensor
    log_probs: torch.Tensor
    truncated: torch.Tensor | None = None


class Heads(Protocol):
    """Encoded vectors, one a token and head: values [..., D] and uint8 E8M0 scale bytes [...]."""

    @property
    def values(self) -> torch.Tensor:
        """In the format's dtype."""
        ...

    @property
    def bytes(self) -> torch.Tensor:
        """uint8: value * 2^(byte - 127) is what it stands for."""
        ...


class KvShape(Protocol):
    """What a KV cache needs of a model's configuration."""

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        ...

    @property
    def num_kv_heads(self) -> int:
        """KV heads of a layer."""
        ...

    @property
    def head_dim(self) -> int:
        """Numbers of a head."""
        ...


def kv_formats(shape: KvShape, flow: PrecisionFlow) -> tuple[Format, ...]:
    """The format of each layer's pages."""
    return tuple(flow.rollout.attention_format(layer) for layer in range(shape.num_layers))


class KvCache(Protocol):
    """Pages of K and V for all layers; which page belongs to whom is the scheduler's business."""

    @property
    def num_pages(self) -> int:
        """All of them."""
        ...

    @property
    def page_tokens(self) -> int:
        """Tokens of a page: a KV tile of the back end's attention."""
        ...

    def copy_pages(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy the K and V of pages, in all layers, ``sources[i]`` to ``targets[i]``; all targets
        differ, and none is a source.
        """
        ...

    def clear(self) -> None:
        """Zeros everywhere, in place, also where numbers were not finite."""
        ...


class Attend(Protocol):
    """Attention of one layer in the rollout: the rows of Q, K and V together, [T, (H + 2 G) D], as
    the projection gives them -> [T, H D].
    """

    def __call__(self, layer: int, qkv: torch.Tensor, transform: QkvTransform) -> torch.Tensor:
        """Attend in one layer."""
        ...


Attended = Any
"""What attention of a layer read and made, for its backward; only its back end looks inside."""


class AttendWithBackward(Attend, Protocol):
    """Attention of the training forward, causal within each sequence of a packed batch."""

    def attend(
        self, layer: int, qkv: torch.Tensor, transform: QkvTransform
    ) -> tuple[torch.Tensor, Attended]:
        """[T, H D], and what the backward needs."""
        ...

    def backward(
        self, attended: Attended, d_output: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The gradient of [T, H D] -> dq [T, H, D], dk and dv [T, G, D]; straight through the
        quantisers.
        """
        ...
