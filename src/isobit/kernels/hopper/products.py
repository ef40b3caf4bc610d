"""The products of Hopper (``isobit.kernels.triton.products``): DeepGEMM's where it is installed,
cuBLAS's for gradients in BF16, and kernels of this folder.
"""

from isobit.kernels.hopper import int8_backward
from isobit.kernels.hopper.attention import decode_attention, prefill_attention
from isobit.kernels.hopper.attention_backward import attention_backward
from isobit.kernels.hopper.gemm import bf16_gemm_nn, bf16_gemm_nt, fp8_gemm_nt
from isobit.kernels.hopper.grouped_gemm import grouped_gemm_nt, masked_height
from isobit.kernels.hopper.int8 import int8_gemm_nt
from isobit.kernels.hopper.wgrad import bf16_gemm_tn, fp8_gemm_tn


class HopperProducts:
    """Those of a Hopper GPU."""

    as_bytes = False
    overlaps = True

    bf16_gemm_nt = staticmethod(bf16_gemm_nt)
    bf16_gemm_nn = staticmethod(bf16_gemm_nn)
    bf16_gemm_tn = staticmethod(bf16_gemm_tn)
    fp8_gemm_nt = staticmethod(fp8_gemm_nt)
    fp8_gemm_tn = staticmethod(fp8_gemm_tn)
    int8_gemm_nt = staticmethod(int8_gemm_nt)
    int8_dgrad = staticmethod(int8_backward.dgrad)
    int8_wgrad = staticmethod(int8_backward.wgrad)
    grouped_gemm_nt = staticmethod(grouped_gemm_nt)
    masked_height = staticmethod(masked_height)
    decode_attention = staticmethod(decode_attention)
    prefill_attention = staticmethod(prefill_attention)
    attention_backward = staticmethod(attention_backward)
