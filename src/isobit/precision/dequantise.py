"""What the bytes of a quantised weight stand for: value = byte * scale of its block."""

import torch

from isobit.precision.quant_tensor import QuantTensor, block_sizes


def dequantise(matrix: QuantTensor) -> torch.Tensor:
    """A weight in 128x128 blocks -> FP32 [R, C].  A product of E4M3 and an FP32 scale is rounded
    once; with a power of two it is exact, and a BF16.
    """
    assert matrix.granularity == "128x128", matrix.granularity
    rows, columns = matrix.values.shape
    scales = matrix.scales
    for dim, parts in enumerate((matrix.parts or (rows,), (columns,))):
        sizes = torch.tensor(block_sizes(parts), device=scales.device)
        scales = scales.repeat_interleave(sizes, dim)
    return matrix.values.float().mul_(scales)
