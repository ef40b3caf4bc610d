"""The kernels of the back end that these tests are run with (``pytest --back-end``), of which the
quantisers make E4M3 as its products read it.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch

from isobit.kernels.backend import backend_of
from isobit.kernels.hopper import gemm, int8, wgrad
from isobit.kernels.hopper import grouped_gemm as hopper_experts
from isobit.kernels.hopper.gemm import BackEnd, why_not_deep_gemm
from isobit.kernels.triton import (
    experts,
    linear,
    pointwise,
    qkv,
    quantise,
    token_groups,
    transpose,
)
from isobit.kernels.triton import int8 as portable_int8
from isobit.kernels.triton.backend import TritonBackend


def _made() -> TritonBackend:
    backend = backend_of(torch.device("cuda", torch.cuda.current_device()))
    assert isinstance(backend, TritonBackend)
    return backend


GPU = _made()
PRODUCTS = GPU.products
IS_HOPPER = GPU.name == "hopper"
DEEP_GEMM_AND_TRITON: list[Literal["deep_gemm", "triton"]] = (
    ["deep_gemm", "triton"] if IS_HOPPER and not why_not_deep_gemm() else ["triton"]
)
BACK_ENDS: list[BackEnd] = [*DEEP_GEMM_AND_TRITON, *(["scaled_mm"] if IS_HOPPER else [])]
"""Libraries and kernels that multiply E4M3."""


def _bound(function: Callable[..., Any]) -> Callable[..., Any]:
    return partial(function, as_bytes=PRODUCTS.as_bytes)


quantise_rows = _bound(quantise.quantise_rows)
quantise_gradient = _bound(quantise.quantise_gradient)
rms_norm_quantise = _bound(quantise.rms_norm_quantise)
swiglu_quantise = _bound(quantise.swiglu_quantise)
publish_blocks = _bound(quantise.publish_blocks)
publish, republish = _bound(quantise.publish), _bound(quantise.republish)
quantise_tokens = _bound(token_groups.quantise_tokens)
quantise_both = _bound(token_groups.quantise_both)
gradient_both = _bound(token_groups.gradient_both)
swiglu_tokens, swiglu_both = map(_bound, (token_groups.swiglu_tokens, token_groups.swiglu_both))
transposed_weight = _bound(transpose.transposed_weight)
transpose_experts = _bound(transpose.transpose_experts)
add_rms_norm = _bound(pointwise.add_rms_norm)
swiglu_input, swiglu_backward = map(_bound, (pointwise.swiglu_input, pointwise.swiglu_backward))
swiglu_rows = _bound(experts.swiglu_rows)
swiglu_backward_quantise = _bound(pointwise.swiglu_backward_quantise)
encode_packed, encode_paged = _bound(qkv.encode_packed), _bound(qkv.encode_paged)
gather_pages = _bound(qkv.gather_pages)
linear_input, output_gradient = _bound(linear.linear_input), _bound(linear.output_gradient)

INT8: Any = int8 if IS_HOPPER else portable_int8
cut_up, int8_gemm_nt = INT8.cut_up, INT8.int8_gemm_nt
bf16_gemm_nn = PRODUCTS.bf16_gemm_nn
bf16_gemm_tn = PRODUCTS.bf16_gemm_tn
decode_attention = PRODUCTS.decode_attention
prefill_attention = PRODUCTS.prefill_attention
attention_backward = PRODUCTS.attention_backward


def fp8_gemm_nt(a: Any, b: Any, kind: Any, library: BackEnd | None = None) -> torch.Tensor:
    if IS_HOPPER:
        return gemm.fp8_gemm_nt(a, b, kind, library)
    return PRODUCTS.fp8_gemm_nt(a, b, kind)


def bf16_gemm_nt(
    a: torch.Tensor,
    b: torch.Tensor,
    dtype: torch.dtype = torch.bfloat16,
    library: BackEnd | None = None,
) -> torch.Tensor:
    if IS_HOPPER:
        return gemm.bf16_gemm_nt(a, b, dtype, library)
    return PRODUCTS.bf16_gemm_nt(a, b, dtype=dtype)


def fp8_gemm_tn(dy: Any, x: Any, grad: torch.Tensor, library: BackEnd | None = None) -> None:
    if IS_HOPPER:
        wgrad.fp8_gemm_tn(dy, x, grad, library)
    else:
        PRODUCTS.fp8_gemm_tn(dy, x, grad)


def grouped_gemm_nt(a: Any, b: Any, dispatch: Any, library: BackEnd | None = None) -> torch.Tensor:
    if IS_HOPPER:
        return hopper_experts.grouped_gemm_nt(a, b, dispatch, library)
    return PRODUCTS.grouped_gemm_nt(a, b, dispatch)
