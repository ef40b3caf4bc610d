"""What the bytes of a quantised weight stand for: value = byte * scale of its block."""

import torch

from isobit.precision.quant_tensor import QuantTensor, block_numbers


def dequantise(matrix: QuantTensor) -> torch.Tensor:
    """A weight in 128x128 blocks -> FP32 [R, C].  A product of E4M3 and an FP32 scale is rounded
    once; with a power of two it is exact, and a BF16.
    """
    columns = block_numbers((matrix.values.shape[1],), matrix.scales.device)
    return matrix.values.float().mul_(matrix.row_scales().index_select(1, columns))
