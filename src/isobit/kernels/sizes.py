"""What operands, caches and workspaces of a back end take, in bytes: for plans of the memory, made
before anything exists and on machines that cannot load the kernels.

    read(n)      an input of n numbers as FProp reads it, beside the input itself
    saved(n)     the same as WGrad will read it
    gradient(n)  an output's gradient as DGrad and WGrad read it, beside the gradient itself
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from isobit.kernels.operands import KvShape
from isobit.precision.flow import LinearShape, PrecisionFlow, Site
from isobit.precision.quant_tensor import Format


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Heads of a layer: H queries, G keys and values, D numbers each."""

    num_heads: int
    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True)
class WorkShape:
    """What the workspaces of a forward and backward depend on."""

    attention: AttentionShape
    linears: tuple[LinearShape, ...]
    hidden_size: int
    vocab_size: int
    """0 for a model without lm_head."""
    tokens: int
    """Of the largest micro-batch."""
    longest: int
    """Tokens of the longest sequence."""


@dataclass(frozen=True, slots=True)
class ExpertsShape:
    """A layer's experts: gate and up [2 I, C] and down [C, I] of each."""

    count: int
    top_k: int
    hidden_size: int
    intermediate_size: int


@dataclass(frozen=True, slots=True)
class ExpertBytes:
    """Bytes of the experts of a layer, upper bounds: a token each, but for the last two."""

    saved: int
    """What ``experts_saving`` leaves for the backward, without the input itself."""
    made: int
    """What ``experts`` makes at most beside its input and output."""
    kept: int
    """What ``experts_saving`` makes at most beside input, output and what it saves."""
    gradients: int
    """What ``experts_backward`` makes at most beside dy, dx and what was saved."""
    once: int
    """What a forward or backward makes for itself, whatever the tokens."""
    saved_once: int = 0
    """Of what is saved, whatever the tokens: rows that fill blocks."""


class Sizes(Protocol):
    """Bytes by back end."""

    @property
    def page_tokens(self) -> int:
        """Tokens of a page of the KV cache."""
        ...

    @property
    def batched_tokens(self) -> int:
        """Tokens of one forward of the engine that keep the device busy."""
        ...

    def page_bytes(self, shape: KvShape, flow: PrecisionFlow) -> int:
        """A page over all layers, scales included.  Raises ConfigError for a format of the flow
        that attention does not take.
        """
        ...

    def matrix(self, site: Site, columns: int) -> int:
        """A published matrix [sum of the site's parts, columns]."""
        ...

    def head_copy(self, numbers: int, itemsize: int) -> int:
        """What ``publish_head`` makes beside the table."""
        ...

    def read(self, site: Site, numbers: int) -> int:
        """See above."""
        ...

    def saved(self, site: Site, numbers: int, is_kept: bool = False) -> int:
        """See above; ``is_kept``: the input itself stays in any case."""
        ...

    def gradient(self, site: Site, numbers: int) -> int:
        """See above."""
        ...

    def transposed(self, site: Site, columns: int) -> int:
        """A matrix [sum of the site's parts, columns] as DGrad makes it for itself."""
        ...

    def experts(self, shape: ExpertsShape, gate_up: Site, down: Site) -> ExpertBytes:
        """The experts of a layer."""
        ...

    def encoded(self, shape: AttentionShape, format: Format) -> int:
        """Q, K and V of a token as attention reads them, and what the forward leaves beside its
        output.
        """
        ...

    def attention_gradients(self, shape: AttentionShape) -> int:
        """What attention's backward takes for a token beside dQ, dK, dV and dO."""
        ...

    def workspaces(self, shape: WorkShape) -> Mapping[str, int]:
        """What is there for a while, by the moment, beside what layers make; one by one."""
        ...
