"""Publishing: from an FP32 master to what a linear and lm_head multiply with.

e4m3         128x128 blocks of the BF16 rounding
bf16, fp32   rows on the grid of ``isobit.kernels.spec.grid``, of the BF16 rounding or the master
lm_head      rows on the grid
"""

import torch

from isobit.kernels.operands import LinearWeight, Operand
from isobit.kernels.spec.grid import snap_rows
from isobit.kernels.spec.quantise import quantise_blocks
from isobit.precision.flow import Site
from isobit.precision.quant_tensor import QuantTensor

_NUMBERS_AT_A_TIME = 1 << 18


def publish(site: Site, master: torch.Tensor) -> Operand:
    """FP32 [N, K] -> the matrix that ``linear`` multiplies with."""
    master = master.detach()
    source = master if site.forward == "fp32" else master.bfloat16()
    if site.forward != "e4m3":
        return _snapped(source)
    return quantise_blocks(source, site.scales, site.parts)


def republish(weight: LinearWeight, master: torch.Tensor) -> torch.Tensor:
    """Write newer values into the same tensors; -> how many numbers are others now, int64."""
    made = publish(weight.site, master)
    if isinstance(made, QuantTensor):
        assert isinstance(weight.matrix, QuantTensor)
        changed = (_bytes(made) != _bytes(weight.matrix)).sum()
        weight.matrix.copy_(made)
        return changed
    assert isinstance(made, torch.Tensor)
    assert isinstance(weight.matrix, torch.Tensor)
    changed = (made != weight.matrix).sum()
    weight.matrix.copy_(made)
    return changed


def publish_head(table: torch.Tensor) -> torch.Tensor:
    """lm_head [V, C] on the grid of the exact GEMM."""
    return _snapped(table)


def _snapped(matrix: torch.Tensor) -> torch.Tensor:
    """``snap_rows`` of some rows at a time: its FP64 temporaries of an lm_head would be larger than
    the rest of a model.
    """
    rows = max(1, _NUMBERS_AT_A_TIME // matrix.shape[1])
    made = torch.empty_like(matrix)
    for begin in range(0, len(matrix), rows):
        made[begin : begin + rows] = snap_rows(matrix[begin : begin + rows])
    return made


def _bytes(matrix: QuantTensor) -> torch.Tensor:
    return matrix.values.view(torch.uint8)
