"""Publishing a weight on a GPU: FP32 master -> BF16 -> E4M3 in 128x128 blocks, in place and in one
pass over the master.

The bytes are those of ``isobit.kernels.spec.quantise.quantise_blocks(master.bfloat16())``.  A
program holds its block in registers, so the master is read once: 4 bytes in and 1 byte out a
weight, at the card's bandwidth.  Where it is asked how many bytes become others, it reads the old
ones too.
"""

# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportIndexIssue=false
# pyright: reportArgumentType=false
# (Triton's types know neither launch options nor what a kernel computes with)

import torch
import triton
import triton.language as tl

from isobit.kernels.hopper.quantise import amax_bits, to_e4m3
from isobit.kernels.operands import LinearWeight, Operand
from isobit.precision.flow import Site
from isobit.precision.formats import BLOCK, DTYPES, ScaleKind
from isobit.precision.quant_tensor import QuantTensor


@triton.jit
def _differing(a, b):
    """How many bytes differ, int32, counted in every fourth element: whole words.

    Byte by byte, ptxas of CUDA 12.8 compares what was never set.
    """
    return tl.inline_asm_elementwise(
        "mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0; vset4.u32.u32.ne.add $0, $4, $5, $1;",
        "=&r,=&r,=&r,=&r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=4,
    )  # fmt: skip


@triton.jit
def _publish_kernel(MASTER, VALUES, SCALES, CHANGED, K: tl.constexpr, POWER_OF_TWO: tl.constexpr):
    """One program a block; neighbours share rows of the matrix."""
    block = tl.program_id(0)
    first_row = (block // (K // 128)).to(tl.int64) * 128
    row = first_row + tl.arange(0, 128)
    column = block % (K // 128) * 128 + tl.arange(0, 128)
    place = row[:, None] * K + column[None, :]
    if CHANGED is not None:
        before = tl.load(VALUES + place).to(tl.uint8, bitcast=True)
    x = tl.load(MASTER + place).to(tl.bfloat16).to(tl.float32)
    values, scale = to_e4m3(x, tl.max(amax_bits(x, 1)[:, None], 0, keep_dims=True), POWER_OF_TWO)
    if CHANGED is not None:
        tl.store(
            CHANGED + block,
            tl.sum(tl.sum(_differing(before, values.to(tl.uint8, bitcast=True)), 1), 0),
        )
    tl.store(VALUES + place, values)
    tl.store(SCALES + block + tl.zeros([1, 1], tl.int32), scale)


def publish_blocks(
    master: torch.Tensor,
    out: QuantTensor,
    scales: ScaleKind = "power_of_two",
    changed: torch.Tensor | None = None,
) -> None:
    """Overwrite ``out`` with the quantisation of master, FP32 [N, K], both sizes multiples of 128.

    ``changed``, int32 [N / 128, K / 128], is given how many bytes of each block are others now.
    """
    rows, columns = master.shape
    assert out.granularity == "128x128"
    assert out.values.shape == master.shape
    assert master.dtype == torch.float32
    assert all(x.is_contiguous() for x in (master, out.values, out.scales))
    grid = (rows // BLOCK * (columns // BLOCK),)
    _publish_kernel[grid](
        master.detach(),
        out.values,
        out.scales,
        changed,
        columns,
        scales == "power_of_two",
        num_warps=8,
    )


def publish(site: Site, master: torch.Tensor) -> Operand:
    """FP32 [N, K] -> 128x128 blocks of the BF16 rounding, or that rounding."""
    master = master.detach()
    if site.forward != "e4m3":
        return master.to(DTYPES[site.forward], copy=True)
    made = QuantTensor.empty_blocks(*master.shape, master.device, site.parts)
    publish_blocks(master, made, site.scales)
    return made


def republish(weight: LinearWeight, master: torch.Tensor) -> torch.Tensor:
    """Write newer values into the same tensors; -> how many numbers are others now, int64."""
    master, matrix = master.detach(), weight.matrix
    if isinstance(matrix, QuantTensor):
        changed = torch.empty(matrix.scales.shape, dtype=torch.int32, device=master.device)
        publish_blocks(master, matrix, weight.site.scales, changed)
        return changed.sum()
    assert isinstance(matrix, torch.Tensor)
    made = master.to(matrix.dtype)
    differing = (made != matrix).sum()
    matrix.copy_(made)
    return differing


def publish_head(table: torch.Tensor) -> torch.Tensor:
    """lm_head is multiplied with as it is."""
    return table
