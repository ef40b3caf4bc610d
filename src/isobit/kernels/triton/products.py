"""The products of a back end, from which linears, lm_head, the router, experts and adapters are
made, and attention.

``Products`` says what they have in common.  ``PortableProducts`` are those of every card, by the
kernels of this folder; ``isobit.kernels.hopper.products`` are faster ones.
"""

from typing import Protocol

import torch

from isobit.kernels.triton import grouped_gemm, int8_backward
from isobit.kernels.triton.attention import PackedKeys, PagedKeys
from isobit.kernels.triton.attention_backward import attention_backward
from isobit.kernels.triton.attention_decode import decode_attention
from isobit.kernels.triton.attention_prefill import prefill_attention
from isobit.kernels.triton.dispatch import Dispatch, GroupedRows
from isobit.kernels.triton.gemm import bf16_gemm_nn, bf16_gemm_nt, fp8_gemm_nt
from isobit.kernels.triton.grouped_gemm import ExpertMatrices, grouped_gemm_nt
from isobit.kernels.triton.int8 import int8_gemm_nt
from isobit.kernels.triton.int8_backward import BalancedRows
from isobit.kernels.triton.quantise import QuantRows
from isobit.kernels.triton.wgrad import bf16_gemm_tn, fp8_gemm_tn, int8_gemm_tn
from isobit.precision.quant_tensor import Int8Parts, Int8Rows, QuantTensor, ScaleKind


class Products(Protocol):
    """A row of ``nt``, and of attention, has the same bits whatever the number of rows.  ``tn``
    adds one finished sum to each element of an FP32 gradient, with ``starts`` or a ``dispatch`` of
    each expert.
    """

    as_bytes: bool
    """Whether E4M3 is made and read by integers alone, as on cards before sm_89."""
    overlaps: bool
    """Whether the kernels of adapters begin early, as only Hopper's can; no bit depends on it."""

    @staticmethod
    def bf16_gemm_nt(
        a: torch.Tensor,
        b: torch.Tensor,
        *,
        dtype: torch.dtype = torch.bfloat16,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """[M, K], [N, K] -> [M, N] in ``dtype``, BF16 or FP32, or to ``out``."""
        ...

    @staticmethod
    def bf16_gemm_nn(
        a: torch.Tensor, b: torch.Tensor, *, dtype: torch.dtype = torch.bfloat16
    ) -> torch.Tensor:
        """[M, K], [K, N] -> [M, N]; for gradients alone."""
        ...

    @staticmethod
    def bf16_gemm_tn(
        dy: torch.Tensor,
        x: torch.Tensor,
        grad: torch.Tensor,
        scale: float = 1.0,
        *,
        starts: torch.Tensor | None = None,
    ) -> None:
        """[T, N], [T, K], times the scale, to [N, K]."""
        ...

    @staticmethod
    def fp8_gemm_nt(a: QuantRows, b: QuantTensor, scales: ScaleKind) -> torch.Tensor:
        """[M, K] in 1x128 groups, [N, K] in 128x128 blocks -> BF16 [M, N]."""
        ...

    @staticmethod
    def fp8_gemm_tn(
        dy: QuantRows, x: QuantRows, grad: torch.Tensor, *, starts: torch.Tensor | None = None
    ) -> None:
        """dY^T [N, Tp] and X^T [K, Tp] in groups of 128 tokens, to [N, K]."""
        ...

    @staticmethod
    def int8_gemm_nt(
        x: Int8Rows, weight: Int8Rows, *, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """[M, K], [N, K] -> BF16 [M, N], or to ``out``, perhaps FP32."""
        ...

    @staticmethod
    def int8_dgrad(
        dy: Int8Parts, weight: Int8Parts, dispatch: Dispatch | None = None
    ) -> torch.Tensor:
        """dY [T, ..], W^T [K, ..] or [E K, ..], of the same parts -> dX BF16 [T, K]."""
        ...

    @staticmethod
    def int8_wgrad(
        dy: BalancedRows, x: BalancedRows, grad: torch.Tensor, dispatch: Dispatch | None = None
    ) -> None:
        """dY^T [N, Tp] and X^T [K, Tp], to [N, K] or [E N, K]."""
        ...

    @staticmethod
    def grouped_gemm_nt(a: GroupedRows, b: ExpertMatrices, dispatch: Dispatch) -> torch.Tensor:
        """[rows, K] times each expert's B^T -> BF16 [rows, N], with the bits of the dense product.
        Padding rows are undefined, but zeros give zeros, and rows of no expert are zeros.
        """
        ...

    @staticmethod
    def masked_height(tokens: int, *matrices: ExpertMatrices) -> int | None:
        """Rows of each expert in the masked layout, if it is faster for so many tokens."""
        ...

    @staticmethod
    def decode_attention(
        queries: torch.Tensor,
        query_scales: torch.Tensor | None,
        pages: PagedKeys,
        table: torch.Tensor,
        lengths: torch.Tensor,
        max_length: int,
        window: int | None = None,
        sinks: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]: ...

    @staticmethod
    def prefill_attention(
        queries: torch.Tensor,
        query_scales: torch.Tensor | None,
        keys: PackedKeys,
        query_starts: torch.Tensor,
        query_counts: torch.Tensor,
        key_starts: torch.Tensor,
        lengths: torch.Tensor,
        max_count: int,
        max_length: int,
        window: int | None = None,
        sinks: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]: ...

    @staticmethod
    def attention_backward(
        queries: torch.Tensor,
        query_scales: torch.Tensor | None,
        keys: PackedKeys,
        output: torch.Tensor,
        log_sum_exp: torch.Tensor,
        d_output: torch.Tensor,
        starts: torch.Tensor,
        lengths: torch.Tensor,
        max_length: int,
        window: int | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]: ...


class PortableProducts:
    """Those of every card since Ampere."""

    as_bytes = True
    overlaps = False

    bf16_gemm_nt = staticmethod(bf16_gemm_nt)
    bf16_gemm_nn = staticmethod(bf16_gemm_nn)
    bf16_gemm_tn = staticmethod(bf16_gemm_tn)
    fp8_gemm_tn = staticmethod(fp8_gemm_tn)
    int8_gemm_nt = staticmethod(int8_gemm_nt)
    grouped_gemm_nt = staticmethod(grouped_gemm_nt)
    decode_attention = staticmethod(decode_attention)
    prefill_attention = staticmethod(prefill_attention)
    attention_backward = staticmethod(attention_backward)

    @staticmethod
    def fp8_gemm_nt(a: QuantRows, b: QuantTensor, scales: ScaleKind) -> torch.Tensor:
        del scales  # of either kind by one kernel
        return fp8_gemm_nt(a, b)

    @staticmethod
    def int8_dgrad(
        dy: Int8Parts, weight: Int8Parts, dispatch: Dispatch | None = None
    ) -> torch.Tensor:
        if dispatch is None:
            return int8_backward.dgrad(dy, weight)
        return grouped_gemm.int8_dgrad(dy, weight, dispatch)

    @staticmethod
    def int8_wgrad(
        dy: BalancedRows, x: BalancedRows, grad: torch.Tensor, dispatch: Dispatch | None = None
    ) -> None:
        if dispatch is None:
            int8_backward.wgrad(dy, x, grad)
        else:
            int8_gemm_tn(dy, x, grad, dispatch.starts)

    @staticmethod
    def masked_height(tokens: int, *matrices: ExpertMatrices) -> int | None:
        return None
