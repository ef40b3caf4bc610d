"""``Backend`` of every NVIDIA GPU since Ampere; calls return before the GPU has computed."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch

from isobit.kernels.backend import Backend, Captured, HybridOperations
from isobit.kernels.operands import DecodeBatch, KvCache, KvShape, PagedBatch
from isobit.kernels.sizes import Sizes
from isobit.kernels.triton import (
    attend,
    attention,
    attention_decode,
    experts,
    head,
    linear,
    optimiser,
    pointwise,
    qkv_backward,
    quantise,
    sampling,
)
from isobit.kernels.triton import sizes as portable_sizes
from isobit.kernels.triton.hybrid import TritonHybrid
from isobit.kernels.triton.lowering import lower_for_sm_80
from isobit.kernels.triton.memory import (
    CapturedGraph,
    GpuMemory,
    HostCopies,
    synchronize,
    to_device,
)
from isobit.kernels.triton.products import PortableProducts, Products
from isobit.kernels.triton.slow import slow_here
from isobit.precision.flow import PrecisionFlow
from isobit.precision.quant_tensor import QuantTensor, ScaleKind

_ANY_LENGTH = 1 << 30  # of a sequence


class TritonBackend:
    """``Backend`` of one GPU.  Another generation's has other ``products``, and the same of all
    else.
    """

    name = "triton"
    sizes: Sizes = portable_sizes
    products: type[Products] = PortableProducts
    is_asynchronous = rounds_alone = True
    hybrid: HybridOperations = TritonHybrid()

    publish_head = staticmethod(quantise.publish_head)

    joined_rows = staticmethod(linear.joined_rows)
    swiglu = staticmethod(quantise.swiglu)
    log_softmax = staticmethod(head.log_softmax)
    scalar_head = staticmethod(head.scalar_head)
    draw = staticmethod(sampling.draw_tokens)

    qkv_backward = staticmethod(qkv_backward.qkv_backward)
    rms_norm_backward = staticmethod(pointwise.rms_norm_backward)
    embedding_backward = staticmethod(pointwise.embedding_backward)
    scalar_head_backward = staticmethod(head.scalar_head_backward)

    adamw_step = staticmethod(optimiser.adamw_step)
    gradient_squares = staticmethod(optimiser.gradient_squares)
    add_in_order = staticmethod(optimiser.add_in_order)

    checksum = staticmethod(optimiser.checksum)

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.memory = GpuMemory(device)
        products, as_bytes = self.products, self.products.as_bytes

        self.publish = partial(quantise.publish, as_bytes=as_bytes)
        self.republish = partial(quantise.republish, as_bytes=as_bytes)

        self.add_rms_norm = partial(pointwise.add_rms_norm, as_bytes=as_bytes)
        self.linear_input = partial(linear.linear_input, as_bytes=as_bytes)
        self.swiglu_input = partial(pointwise.swiglu_input, as_bytes=as_bytes)
        self.swiglu_saved = partial(pointwise.swiglu_saved, as_bytes=as_bytes)
        self.linear = partial(linear.linear, products)
        self.adapter_low = partial(linear.adapter_low, products)
        self.add_adapter = partial(linear.add_adapter, products)
        self.route = partial(experts.route, products)
        self.experts = partial(experts.experts, products)
        self.experts_saving = partial(experts.experts_saving, products)
        self.head_logits = partial(head.head_logits, products)
        self.token_log_probs = partial(head.token_log_probs, products)
        self.packed_attention = partial(attend.PackedAttention, products)

        self.output_gradient = partial(linear.output_gradient, as_bytes=as_bytes)
        self.dgrad = partial(linear.dgrad, products)
        self.wgrad = partial(linear.wgrad, products)
        self.adapter_backward = partial(linear.adapter_backward, products)
        self.swiglu_backward = partial(pointwise.swiglu_backward, as_bytes=as_bytes)
        self.experts_backward = partial(experts.experts_backward, products)
        self.route_backward = experts.route_backward
        self.token_log_probs_backward = partial(head.token_log_probs_backward, products)
        self.head_logits_backward = partial(head.head_logits_backward, products)

    def embedding(self, token_ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        return table.index_select(0, token_ids)

    def kv_cache(
        self, shape: KvShape, flow: PrecisionFlow, num_pages: int, num_carries: int
    ) -> KvCache:
        return attend.GpuKvCache(shape, flow, num_pages, self.device, num_carries)

    def paged_attention(
        self, cache: KvCache, batch: PagedBatch, positions: torch.Tensor
    ) -> attend.PagedAttention:
        assert isinstance(cache, attend.GpuKvCache)
        return attend.PagedAttention(self.products, cache, batch, positions)

    def decode_attention(self, cache: KvCache, batch: DecodeBatch) -> attend.DecodeAttention:
        assert isinstance(cache, attend.GpuKvCache)
        return attend.DecodeAttention(self.products, cache, batch)

    def capture(
        self, step: Callable[[], tuple[torch.Tensor, ...]], beside: Captured | None = None
    ) -> CapturedGraph:
        assert beside is None or isinstance(beside, CapturedGraph)
        return CapturedGraph(step, beside)

    def reach(self, length: int, rows: int) -> int:
        """Attention has 1, 2, 4, .. parts of the KV range side by side, or any number in order."""
        parts = 1 << (-(-length // attention.PART) - 1).bit_length()
        if parts > 1 and rows * parts > attention_decode.MOST_APART:
            return _ANY_LENGTH
        return attention.PART * parts

    def to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        return to_device(tensor, self.device)

    def to_host(self, tensors: Sequence[torch.Tensor]) -> HostCopies:
        return HostCopies(tensors)

    def synchronize(self) -> None:
        synchronize(self.device)

    def describe(self) -> Mapping[str, str]:
        return {"all operations": "Triton, as on every card since Ampere"}

    def fallbacks(self, flow: PrecisionFlow) -> Sequence[str]:
        return slow_here(flow, self.device)

    def quantise_rows(self, x: torch.Tensor, scales: ScaleKind) -> QuantTensor:
        made = quantise.quantise_rows(x, scales, self.products.as_bytes)
        return QuantTensor(made.values, made.scales, "1x128")


def make(device: torch.device) -> Backend:
    assert device.type == "cuda"
    lower_for_sm_80()
    return TritonBackend(device)
