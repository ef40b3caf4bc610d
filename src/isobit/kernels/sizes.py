"""Bytes of the operands of a back end, with its caches and workspaces: for plans of the memory that
are made before anything exists, and on machines that cannot load the kernels.

A back end has ``Sizes``, which are functions of shapes.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from isobit.kernels.operands import DELTA_CHUNK, DeltaShape, KvShape
from isobit.precision.flow import LinearShape, PrecisionFlow, Site
from isobit.precision.quant_tensor import DTYPES, Format


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Heads of a layer: H queries, G keys and values, D numbers each."""

    num_heads: int
    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True)
class WorkShape:
    """The shapes on which the workspaces of a forward and backward depend."""

    attention: AttentionShape
    linears: tuple[LinearShape, ...]
    hidden_size: int
    vocab_size: int  # 0 for a model without lm_head
    tokens: int  # of the largest micro-batch
    longest: int  # tokens of the longest sequence
    int8_head: bool = False
    attended: int = 0  # tokens of attention, where they share the rows of all else
    delta: DeltaShape | None = None


@dataclass(frozen=True, slots=True)
class ExpertsShape:
    """A layer's experts: gate and up [2 I, C] and down [C, I] of each."""

    count: int
    top_k: int
    hidden_size: int
    intermediate_size: int


@dataclass(frozen=True, slots=True)
class ExpertBytes:
    """Upper bounds of the bytes of a layer's experts: a token each, but for the last two."""

    saved: int  # what ``experts_saving`` leaves for the backward, without the input itself
    made: int  # the most that ``experts`` allocates beside its input and output
    kept: int  # the most that ``experts_saving`` allocates beside input, output and what it saves
    gradients: int  # the most that ``experts_backward`` allocates beside dy, dx and what was saved
    once: int  # what a forward or backward allocates for any number of tokens
    saved_once: int = 0  # the part of what is saved for any number of tokens: rows that pad blocks


@dataclass(frozen=True, slots=True)
class DeltaBytes:
    """Upper bounds of the bytes of a gated delta rule, a token each, but for the last two: what is
    made for any number of tokens, where that is in no workspace.
    """

    saved: int  # what the forward leaves for the backward beside its inputs
    made: int  # the most that it allocates beside its inputs, its output and what it saves
    gradients: int  # the most that its backward allocates beside the gradients of its inputs
    made_once: int = 0
    gradients_once: int = 0


class Sizes(Protocol):
    """Bytes of one back end."""

    page_tokens: int  # of a page of the KV cache
    batched_tokens: int  # of one engine forward, which keep the device busy
    logits_at_once: int  # of each of two models, where all their log-probabilities are compared

    def page_bytes(self, shape: KvShape, flow: PrecisionFlow) -> int:
        """A page over all layers that have attention, with scales.  Raises ConfigError for an
        unsupported format.
        """
        ...

    def carry_bytes(self, shape: KvShape, flow: PrecisionFlow) -> int:
        """What a sequence carries over all layers with a delta rule; 0 without any."""
        ...

    def matrix(self, site: Site, columns: int) -> int:
        """A published matrix [sum of the site's parts, columns]."""
        ...

    def head_copy(self, site: Site, rows: int, columns: int) -> int:
        """Bytes that ``publish_head`` allocates beside the table [rows, columns]."""
        ...

    def read(self, site: Site, numbers: int) -> int:
        """An input of ``numbers`` numbers as FProp reads it, beside the input itself."""
        ...

    def saved(self, site: Site, numbers: int, is_kept: bool = False) -> int:
        """The same as WGrad reads it; ``is_kept``: the input itself stays in any case."""
        ...

    def gradient(self, site: Site, numbers: int, inputs: int) -> int:
        """The gradient of an output of ``numbers`` numbers as DGrad and WGrad read it, and what
        either makes of it and of ``inputs`` numbers beside its result.
        """
        ...

    def transposed(self, site: Site, columns: int) -> int:
        """A matrix [sum of the site's parts, columns] as DGrad makes it for itself."""
        ...

    def experts(self, shape: ExpertsShape, gate_up: Site, down: Site) -> ExpertBytes: ...

    def delta(self, shape: DeltaShape) -> DeltaBytes: ...

    def encoded(self, shape: AttentionShape, format: Format) -> int:
        """Q, K and V of a token as attention reads them, and what the forward keeps."""
        ...

    def attention_gradients(self, shape: AttentionShape, format: Format) -> int:
        """Bytes that attention's backward takes for a token beside dQ, dK, dV and dO."""
        ...

    def joined_parts(self, shape: AttentionShape, sequences: int, longest: int) -> int:
        """Bytes that attention of one new token a sequence, of at most ``longest`` tokens each,
        takes beside its operands and its output.
        """
        ...

    def product_sums(self, site: Site, tokens: int) -> int:
        """Bytes that FProp of a linear takes at most beside its operands and its output."""
        ...

    def workspaces(self, shape: WorkShape) -> Mapping[str, int]:
        """Temporary memory beside what layers allocate, by name; one at a time."""
        ...


def delta_carry_bytes(shape: KvShape, flow: PrecisionFlow) -> int:
    """``Sizes.carry_bytes`` where a carry is a chunk of each delta rule: its inputs and the last
    ones in front of it, and in FP32 keys, updates, decays and the state in front of it.
    """
    rule = shape.delta
    if rule is None:
        return 0
    activation = DTYPES[flow.rollout.activations].itemsize
    head = DELTA_CHUNK * (rule.key_dim + rule.value_dim + 1) + rule.key_dim * rule.value_dim
    inputs = (DELTA_CHUNK + rule.width - 1) * rule.channels
    return len(shape.delta_layers) * (activation * inputs + 4 * rule.value_heads * head)
