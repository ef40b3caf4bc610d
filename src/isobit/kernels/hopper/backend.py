"""``Backend`` of Hopper GPUs; calls return before the GPU has computed."""

from collections.abc import Callable, Mapping, Sequence

import torch

from isobit.kernels.backend import Backend, Captured
from isobit.kernels.hopper import sizes
from isobit.kernels.hopper.attend import (
    DecodeAttention,
    HopperKvCache,
    PackedAttention,
    PagedAttention,
)
from isobit.kernels.hopper.experts import (
    experts,
    experts_backward,
    experts_saving,
    route,
    route_backward,
)
from isobit.kernels.hopper.gemm import describe_back_ends, describe_fallbacks
from isobit.kernels.hopper.head import (
    head_logits,
    head_logits_backward,
    token_log_probs,
    token_log_probs_backward,
)
from isobit.kernels.hopper.linear import (
    adapter_backward,
    adapter_low,
    add_adapter,
    dgrad,
    linear,
    wgrad,
)
from isobit.kernels.hopper.memory import (
    CapturedGraph,
    HopperMemory,
    HostCopies,
    synchronize,
    to_device,
)
from isobit.kernels.hopper.optimiser import adamw_step, add_in_order, checksum, gradient_squares
from isobit.kernels.operands import DecodeBatch, KvCache, KvShape, PagedBatch
from isobit.kernels.triton.attention import PART
from isobit.kernels.triton.head import log_softmax, scalar_head, scalar_head_backward
from isobit.kernels.triton.linear import joined_rows, linear_input, output_gradient
from isobit.kernels.triton.pointwise import (
    add_rms_norm,
    embedding_backward,
    rms_norm_backward,
    swiglu_backward,
    swiglu_input,
    swiglu_saved,
)
from isobit.kernels.triton.qkv_backward import qkv_backward
from isobit.kernels.triton.quantise import publish, publish_head, quantise_rows, republish, swiglu
from isobit.kernels.triton.sampling import draw_tokens
from isobit.precision.flow import PrecisionFlow
from isobit.precision.quant_tensor import QuantTensor, ScaleKind


class HopperBackend:
    """``Backend`` of one GPU."""

    name = "hopper"
    sizes = sizes
    is_asynchronous = rounds_alone = True

    publish = staticmethod(publish)
    republish = staticmethod(republish)
    publish_head = staticmethod(publish_head)

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

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.memory = HopperMemory(device)

    def embedding(self, token_ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        return table.index_select(0, token_ids)

    def kv_cache(self, shape: KvShape, flow: PrecisionFlow, num_pages: int) -> KvCache:
        return HopperKvCache(shape, flow, num_pages, self.device)

    def paged_attention(
        self, cache: KvCache, batch: PagedBatch, positions: torch.Tensor
    ) -> PagedAttention:
        assert isinstance(cache, HopperKvCache)
        return PagedAttention(cache, batch, positions)

    def decode_attention(self, cache: KvCache, batch: DecodeBatch) -> DecodeAttention:
        assert isinstance(cache, HopperKvCache)
        return DecodeAttention(cache, batch)

    def capture(
        self, step: Callable[[], tuple[torch.Tensor, ...]], beside: Captured | None = None
    ) -> CapturedGraph:
        assert beside is None or isinstance(beside, CapturedGraph)
        return CapturedGraph(step, beside)

    def reach(self, length: int) -> int:
        """Attention is launched over 1, 2, 4, .. parts of the KV range."""
        return PART << (-(-length // PART) - 1).bit_length()

    def to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        return to_device(tensor, self.device)

    def to_host(self, tensors: Sequence[torch.Tensor]) -> HostCopies:
        return HostCopies(tensors)

    def synchronize(self) -> None:
        synchronize(self.device)

    def describe(self) -> Mapping[str, str]:
        return describe_back_ends()

    def fallbacks(self) -> Sequence[str]:
        return describe_fallbacks()

    def quantise_rows(self, x: torch.Tensor, scales: ScaleKind) -> QuantTensor:
        made = quantise_rows(x, scales)
        return QuantTensor(made.values, made.scales, "1x128")


def make(device: torch.device) -> Backend:
    assert device.type == "cuda"
    return HopperBackend(device)
