"""The specification as a back end: its functions under the names of ``isobit.kernels.backend``.

Nothing is asynchronous and the memory is the host's, so a transfer returns the tensors themselves
and a captured step is the step.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from isobit.kernels.backend import Backend, Captured, HybridOperations
from isobit.kernels.operands import DecodeBatch, KvCache, KvShape, PagedBatch
from isobit.kernels.spec import hybrid as hybrid_operations
from isobit.kernels.spec import sizes
from isobit.kernels.spec.attention import PackedAttention
from isobit.kernels.spec.experts import (
    experts,
    experts_backward,
    experts_saving,
    route,
    route_backward,
)
from isobit.kernels.spec.head import (
    draw_tokens,
    head_logits,
    head_logits_backward,
    log_softmax,
    scalar_head,
    scalar_head_backward,
    token_log_probs,
    token_log_probs_backward,
)
from isobit.kernels.spec.linear import (
    adapter_backward,
    adapter_low,
    add_adapter,
    dgrad,
    has_int8_products,
    int_mm_is_exact,
    joined_rows,
    linear,
    linear_input,
    output_gradient,
    wgrad,
)
from isobit.kernels.spec.optimiser import adamw_step, add_in_order, checksum, gradient_squares
from isobit.kernels.spec.paged_attention import PagedAttention, SpecKvCache
from isobit.kernels.spec.pointwise import (
    add_rms_norm,
    embedding,
    embedding_backward,
    rms_norm_backward,
    swiglu,
    swiglu_backward,
    swiglu_input,
    swiglu_saved,
)
from isobit.kernels.spec.qkv import qkv_backward
from isobit.kernels.spec.quantise import publish, publish_head, quantise_rows, republish
from isobit.precision.flow import PrecisionFlow
from isobit.precision.quant_tensor import QuantTensor, ScaleKind


class SpecBackend:
    """``Backend`` of a CPU."""

    name = "spec"
    device = torch.device("cpu")
    sizes = sizes
    hybrid: HybridOperations = hybrid_operations
    is_asynchronous = rounds_alone = False  # matrices are on the grid of the exact GEMM
    memory = None

    publish = staticmethod(publish)
    republish = staticmethod(republish)
    publish_head = staticmethod(publish_head)

    embedding = staticmethod(embedding)
    add_rms_norm = staticmethod(add_rms_norm)
    linear_input = staticmethod(linear_input)
    joined_rows = staticmethod(joined_rows)
    swiglu = staticmethod(swiglu)
    swiglu_input = staticmethod(swiglu_input)
    swiglu_saved = staticmethod(swiglu_saved)
    linear = staticmethod(linear)
    adapter_low = staticmethod(adapter_low)
    add_adapter = staticmethod(add_adapter)
    route = staticmethod(route)
    experts = staticmethod(experts)
    experts_saving = staticmethod(experts_saving)
    head_logits = staticmethod(head_logits)
    log_softmax = staticmethod(log_softmax)
    token_log_probs = staticmethod(token_log_probs)
    scalar_head = staticmethod(scalar_head)
    packed_attention = PackedAttention
    draw = staticmethod(draw_tokens)

    output_gradient = staticmethod(output_gradient)
    dgrad = staticmethod(dgrad)
    wgrad = staticmethod(wgrad)
    adapter_backward = staticmethod(adapter_backward)
    swiglu_backward = staticmethod(swiglu_backward)
    experts_backward = staticmethod(experts_backward)
    route_backward = staticmethod(route_backward)
    qkv_backward = staticmethod(qkv_backward)
    rms_norm_backward = staticmethod(rms_norm_backward)
    embedding_backward = staticmethod(embedding_backward)
    token_log_probs_backward = staticmethod(token_log_probs_backward)
    head_logits_backward = staticmethod(head_logits_backward)
    scalar_head_backward = staticmethod(scalar_head_backward)

    adamw_step = staticmethod(adamw_step)
    gradient_squares = staticmethod(gradient_squares)
    add_in_order = staticmethod(add_in_order)

    checksum = staticmethod(checksum)

    def kv_cache(
        self, shape: KvShape, flow: PrecisionFlow, num_pages: int, num_carries: int
    ) -> KvCache:
        return SpecKvCache(shape, flow, num_pages, num_carries)

    def paged_attention(
        self, cache: KvCache, batch: PagedBatch, positions: torch.Tensor
    ) -> PagedAttention:
        assert isinstance(cache, SpecKvCache)
        return PagedAttention(cache, batch, positions)

    def decode_attention(self, cache: KvCache, batch: DecodeBatch) -> PagedAttention:
        """Paged attention of the rows of each sequence."""
        places = batch.places
        if places is None:
            places = torch.zeros_like(batch.positions)
        first = (places == 0).nonzero()[:, 0]
        last = torch.cat([first[1:] - 1, torch.tensor([len(places) - 1])])
        counts, lengths = (last - first + 1).tolist(), batch.lengths[last].tolist()
        carries = None if batch.carries is None else batch.carries[:, first].long()
        table = batch.table[first].long()
        paged = PagedBatch(tuple(counts), tuple(lengths), table, batch.slots, carries)
        return self.paged_attention(cache, paged, batch.positions)

    def capture(
        self, step: Callable[[], tuple[torch.Tensor, ...]], beside: Captured | None = None
    ) -> "_Step":
        return _Step(step)

    def reach(self, length: int, rows: int) -> int:
        """Every step reads its own lengths, so a captured step has no reach of its own."""
        del rows
        return length

    def to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def to_host(self, tensors: Sequence[torch.Tensor]) -> "_Arrived":
        return _Arrived(tensors)

    def synchronize(self) -> None:
        """Do nothing: no work is ever pending."""

    def describe(self) -> Mapping[str, str]:
        if has_int8_products() and int_mm_is_exact():
            return {"INT8 GEMM": "torch._int_mm"}
        lacks = (
            "torch._int_mm is not exact on" if has_int8_products() else "neither VNNI nor AMX on"
        )
        return {"INT8 GEMM": f"FP32, 1,024 columns at a time, same bits: {lacks} this processor"}

    def fallbacks(self, flow: PrecisionFlow) -> Sequence[str]:
        return ()

    def quantise_rows(self, x: torch.Tensor, scales: ScaleKind) -> QuantTensor:
        return quantise_rows(x, scales)


@dataclass(frozen=True, slots=True)
class _Step:
    """A captured step: calling it again is all there is to replaying it."""

    replay: Callable[[], tuple[torch.Tensor, ...]]


@dataclass(frozen=True, slots=True)
class _Arrived:
    """Tensors whose transfer is already complete."""

    tensors: Sequence[torch.Tensor]

    def wait(self) -> Sequence[torch.Tensor]:
        return self.tensors


def make(device: torch.device) -> Backend:
    assert device.type == "cpu"
    return SpecBackend()
