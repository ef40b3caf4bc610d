"""The exact GEMM of the CPU: every 128-long block product has one right answer.

Products of two E4M3 numbers, and sums of 128 of them, are exact in FP64; so are those of numbers on
the grid of ``isobit.kernels.spec.grid``.  A block product is therefore the same in any order,
batch, tile, library or thread count.  It is rounded once to FP32 and scaled, and blocks are added
in FP32 in ascending order of K:

    Y[m, n] = sum over blocks k of  FP32(sum_j A[m, kj] B[n, kj]) * scale_a[m, k]
                                                                  * scale_b[block of n, k]

Shapes: A [M, K], B [N, K] (K-major, as FP8 tensor cores want it), Y [M, N] FP32.
"""

import torch

from isobit.kernels.spec.e4m3 import SHIFT, shifted_e4m3
from isobit.precision.formats import BLOCK
from isobit.precision.quant_tensor import QuantTensor


def fp8_gemm_nt(a: QuantTensor, b: QuantTensor) -> torch.Tensor:
    """A in 1x128 groups, B in 128x128 blocks -> A B^T in FP32."""
    assert (a.granularity, b.granularity) == ("1x128", "128x128"), (a.granularity, b.granularity)
    left, right = shifted_e4m3(a.values).double(), shifted_e4m3(b.values).double()
    b_scales = b.row_scales().mul_(SHIFT * SHIFT).t().contiguous()
    total: torch.Tensor | None = None
    for k in range(a.scales.shape[1]):
        block = _block_product(left, right, k)
        block.mul_(a.scales[:, k, None])
        block.mul_(b_scales[k])
        total = block if total is None else total.add_(block)
    assert total is not None
    return total


def grid_gemm_nt(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """A [M, K] and B [N, K], BF16 or FP32 and snapped to the grid by rows (``snap_rows``) -> A B^T
    in FP32.
    """
    left, right = a.double(), b.double()
    total = _block_product(left, right, 0)
    for k in range(1, -(-a.shape[1] // BLOCK)):
        total.add_(_block_product(left, right, k))
    return total


def _block_product(left: torch.Tensor, right: torch.Tensor, k: int) -> torch.Tensor:
    block = slice(k * BLOCK, (k + 1) * BLOCK)
    return torch.mm(left[:, block], right[:, block].t()).float()
