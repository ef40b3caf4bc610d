"""Publishing a weight: FP32 master -> BF16 -> E4M3 in 128x128 blocks or INT8 rows, in place and in
one pass.

The bytes are those of ``isobit.kernels.spec.quantise.publish``; blocks begin anew at each part, and
a launch takes one run of them (``isobit.kernels.hopper.device_functions``).  A program holds its
block or row in registers, so a weight costs 4 bytes in and 1 byte out, and one more in where
changed bytes are counted.
"""

# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportIndexIssue=false
# pyright: reportArgumentType=false
# (Triton's types know neither launch options nor what a kernel computes with)

import torch
import triton
import triton.language as tl

from isobit.kernels.hopper.device_functions import runs
from isobit.kernels.hopper.quantise import (
    amax_bits,
    levels,
    quantise_groups,
    to_e4m3,
    warps_of_row,
    width_of_row,
)
from isobit.kernels.operands import (
    HeadWeight,
    LinearWeight,
    Operand,
)
from isobit.precision.flow import Site
from isobit.precision.quant_tensor import (
    BLOCK,
    DTYPES,
    Int8Rows,
    QuantTensor,
    ScaleKind,
    num_blocks,
)


@triton.jit
def _differing(a, b):
    """How many bytes differ, int32, counted in every fourth element: words of four, each of one
    row.

    Byte by byte, ptxas of CUDA 12.8 compares uninitialised bytes.
    """
    return tl.inline_asm_elementwise(
        "mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0; vset4.u32.u32.ne.add $0, $4, $5, $1;",
        "=&r,=&r,=&r,=&r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=4,
    )  # fmt: skip


@triton.jit
def _publish_kernel(
    MASTER, VALUES, SCALES, CHANGED, K: tl.constexpr, ROWS: tl.constexpr, POWER_OF_TWO: tl.constexpr
):
    """One program a block; ROWS is the number of rows where a block is short, else None."""
    blocks: tl.constexpr = (K + 127) // 128
    block = tl.program_id(0)
    first_row = (block // blocks).to(tl.int64) * 128
    row = first_row + tl.arange(0, 128)
    column = block % blocks * 128 + tl.arange(0, 128)
    place = row[:, None] * K + column[None, :]
    inside = None
    if ROWS is not None:
        inside = (row < ROWS)[:, None] & (column < K)[None, :]
    other = None if inside is None else 0.0
    if CHANGED is not None:
        before = tl.load(VALUES + place, inside, other).to(tl.uint8, bitcast=True)
    x = tl.load(MASTER + place, inside, other).to(tl.bfloat16).to(tl.float32)
    values, scale = to_e4m3(x, tl.max(amax_bits(x, 1)[:, None], 0, keep_dims=True), POWER_OF_TWO)
    if CHANGED is not None:
        differing = _differing(before, values.to(tl.uint8, bitcast=True))
        if inside is not None:  # bytes beyond the matrix are NaN in a block that is not finite
            differing = tl.where(inside, differing, 0)
        tl.store(CHANGED + block, tl.sum(tl.sum(differing, 1), 0))
    tl.store(VALUES + place, values, inside)
    tl.store(SCALES + block + tl.zeros([1, 1], tl.int32), scale)


def publish_blocks(
    master: torch.Tensor,
    out: QuantTensor,
    scales: ScaleKind = "power_of_two",
    changed: torch.Tensor | None = None,
) -> None:
    """Overwrite ``out`` with the quantisation of master, FP32 [N, K], of its parts.

    ``changed``, int32 like ``out.scales``, receives how many bytes of each block have changed.
    """
    rows, columns = master.shape
    assert out.granularity == "128x128"
    assert out.values.shape == master.shape
    assert master.dtype == torch.float32
    assert all(x.is_contiguous() for x in (master, out.values, out.scales))
    master, blocks = master.detach(), num_blocks(columns)
    for run in runs(out.parts or (rows,)):
        is_whole = not run.size % BLOCK and not columns % BLOCK
        _publish_kernel[(run.blocks * blocks,)](
            master[run.first :], out.values[run.first :], out.scales[run.first_block :],
            None if changed is None else changed[run.first_block :], columns,
            None if is_whole else run.size, scales == "power_of_two", num_warps=8,
        )  # fmt: skip


@triton.jit
def _publish_rows_kernel(
    MASTER, VALUES, SCALES, CHANGED, K: tl.constexpr, WIDTH: tl.constexpr, LEVELS: tl.constexpr
):
    """One program a row of K numbers, padded to WIDTH."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDTH)
    inside = column < K
    place = row * K + column
    if CHANGED is not None:
        before = tl.load(VALUES + place, mask=inside, other=0).to(tl.int32)
    x = tl.load(MASTER + place, mask=inside, other=0.0).to(tl.bfloat16).to(tl.float32)
    values, scale = quantise_groups(x, WIDTH // 128, False, LEVELS)
    if CHANGED is not None:
        differing = (before != values.to(tl.int32)) & inside
        tl.store(CHANGED + row, tl.sum(differing.to(tl.int32), 0))
    tl.store(VALUES + place, values, mask=inside)
    divided = tl.where(scale == scale, scale * (1.0 / (1 << LEVELS)), scale)  # NaN keeps its bits
    tl.store(SCALES + row + tl.arange(0, 1), divided)


def publish_rows(master: torch.Tensor, out: Int8Rows, changed: torch.Tensor | None = None) -> None:
    """Overwrite ``out`` with the quantisation of master, FP32 or BF16 [N, K].

    ``changed``, int32 [N], receives how many values of each row have changed.
    """
    rows, columns = master.shape
    assert out.values.shape == master.shape
    assert all(x.is_contiguous() for x in (master, out.values, out.scales))
    width = width_of_row(columns)
    _publish_rows_kernel[(rows,)](
        master.detach(), out.values, out.scales, changed, columns, width, levels(columns),
        num_warps=warps_of_row(width), enable_fp_fusion=False,
    )  # fmt: skip


def publish(site: Site, master: torch.Tensor) -> Operand:
    """FP32 [N, K] -> 128x128 blocks or INT8 rows of the BF16 rounding, or that rounding."""
    master = master.detach()
    if site.forward == "int8":
        rows = Int8Rows.empty(*master.shape, master.device)
        publish_rows(master, rows)
        return rows
    if site.forward != "e4m3":
        return master.to(DTYPES[site.forward], copy=True)
    made = QuantTensor.empty_blocks(*master.shape, master.device, site.parts)
    publish_blocks(master, made, site.scales)
    return made


def republish(weight: LinearWeight, master: torch.Tensor) -> torch.Tensor:
    """Write newer values into the same tensors; -> how many numbers have changed, int64."""
    master, matrix = master.detach(), weight.matrix
    if isinstance(matrix, Int8Rows):
        changed = torch.empty(len(master), dtype=torch.int32, device=master.device)
        publish_rows(master, matrix, changed)
        return changed.sum()
    if isinstance(matrix, QuantTensor):
        changed = torch.empty(matrix.scales.shape, dtype=torch.int32, device=master.device)
        publish_blocks(master, matrix, weight.site.scales, changed)
        return changed.sum()
    assert isinstance(matrix, torch.Tensor)
    made = master.to(matrix.dtype)
    differing = (made != matrix).sum()
    matrix.copy_(made)
    return differing


def publish_head(site: Site, table: torch.Tensor, held: HeadWeight | None = None) -> HeadWeight:
    """lm_head is used as it is, and its INT8 rows where the site is in INT8."""
    if site.forward != "int8":
        return HeadWeight(table)
    rows = None if held is None else held.int8
    if rows is None:
        rows = Int8Rows.empty(*table.shape, table.device)
    publish_rows(table, rows)
    return HeadWeight(table, rows)
