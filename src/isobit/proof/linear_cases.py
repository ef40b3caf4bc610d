"""The cases of ``isobit.proof.cases`` about exact GEMMs and linears."""

import torch
from torch import Tensor

from isobit.kernels.operands import (
    LinearWeight,
    Operand,
)
from isobit.kernels.spec import linear as linear_module
from isobit.kernels.spec.quantise import (
    dequantise_int8,
    publish,
    quantise_blocks,
    quantise_int8,
    quantise_rows,
    quantise_tokens,
    snap_rows,
)
from isobit.precision.flow import Site
from isobit.precision.quant_tensor import (
    BLOCK,
    DTYPES,
    EIGHT_BITS,
    INT8_MAX,
    Format,
    Int8Rows,
    QuantTensor,
    ScaleKind,
    block_sizes,
    rotation_size,
)
from isobit.proof.cases import BF16, ROWS, Case, normal, wide

_INTEGER = 1 << 9  # every E4M3 number is a multiple of 2^-9


def e4m3_gemm(
    scales: ScaleKind = "power_of_two",
    parts: tuple[int, ...] = (2 * BLOCK,),
    columns: int = 3 * BLOCK,
) -> Case:
    """The exact GEMM over E4M3, against 64-bit integers."""
    x = wide(ROWS, columns, spread=4.0)
    b = quantise_blocks(wide(sum(parts), columns, seed=1, spread=4.0), scales, parts)

    def plain() -> Tensor:
        a = quantise_rows(x, scales)
        left, right = (q.values.double().mul(_INTEGER).long().split(BLOCK, 1) for q in (a, b))
        of_rows = b.scales.repeat_interleave(torch.tensor(block_sizes(parts)), 0)
        total = torch.zeros(ROWS, sum(parts))
        for k in range(len(left)):
            products = (left[k] @ right[k].t()).float() / _INTEGER**2
            total += products * a.scales[:, k, None] * of_rows[:, k]
        return total

    return Case(
        "the GEMM in E4M3",
        {},
        plain,
        lambda rows: linear_module.fp8_gemm_nt(quantise_rows(x[rows], scales), b),
        tolerance=0.0,
    )


def int8_gemm(columns: int = 3 * BLOCK) -> Case:
    """The exact GEMM over INT8, against 64-bit integers."""
    x = wide(ROWS, columns, spread=4.0)
    b = quantise_int8(wide(150, columns, seed=1, spread=4.0))

    def plain() -> Tensor:
        a = quantise_int8(x)
        sums = a.values.long() @ b.values.long().t()
        return sums.float() * a.scales[:, None] * b.scales

    return Case(
        "the GEMM in INT8",
        {},
        plain,
        lambda rows: linear_module.int8_gemm_nt(quantise_int8(x[rows]), b),
        tolerance=0.0,
    )


def grid_gemm(columns: int = 200, dtype: torch.dtype = BF16) -> Case:
    """The exact GEMM over numbers on the grid."""
    x, b = (wide(n, columns, seed=n, dtype=dtype, spread=4.0) for n in (ROWS, 150))
    b = snap_rows(b)
    return Case(
        "the GEMM on the grid",
        {"x": snap_rows(x), "b": b},
        lambda x, b: x @ b.t(),
        lambda rows: linear_module.grid_gemm_nt(snap_rows(x[rows]), b),
    )


def _linear_weight(
    format: Format, parts: tuple[int, ...], columns: int, scales: ScaleKind = "power_of_two"
) -> LinearWeight:
    site = linear_site(format, parts, scales)
    return LinearWeight(site, publish(site, wide(sum(parts), columns, seed=1)))


def linear_site(format: Format, parts: tuple[int, ...], scales: ScaleKind = "power_of_two") -> Site:
    backward: Format = "e4m3" if format in EIGHT_BITS else format
    return Site("case", "linear", format, scales, backward, backward, parts)


def linear(
    format: Format,
    parts: tuple[int, ...] = (200,),
    columns: int = 150,
    scales: ScaleKind = "power_of_two",
    tokens: int = ROWS,
) -> Case:
    """Quantise or snap, multiply, round, over the operands as they are quantised."""
    weight = _linear_weight(format, parts, columns, scales)
    x = wide(tokens, columns, dtype=DTYPES["fp32" if format == "fp32" else "bf16"])
    read, matrix = _as_numbers(x, weight)
    return Case(
        f"linear in {format.upper()}",
        {"x": read},
        lambda x: x @ matrix.to(x.dtype).t(),
        lambda rows: linear_module.linear(
            linear_module.linear_input(x[rows], weight.site).read, weight
        ),
        tokens,
    )


def _as_numbers(x: Tensor, weight: LinearWeight) -> tuple[Tensor, Tensor]:
    """X and W as FProp reads them, [T, K] and [N, K]."""
    matrix = weight.matrix
    if isinstance(matrix, Int8Rows):
        quantised, size = quantise_int8(x), rotation_size(x.shape[1])
        read = dequantise_int8(Int8Rows(quantised.values, quantised.scales / size))
    elif isinstance(matrix, QuantTensor):
        read = linear_module.dequantise_rows(quantise_rows(x, weight.site.scales))
    else:
        read = snap_rows(x)
    return read, linear_module.dequantised(weight)


def dgrad(
    format: Format,
    parts: tuple[int, ...] = (200,),
    columns: int = 150,
    scales: ScaleKind = "power_of_two",
    tokens: int = ROWS,
) -> Case:
    """DGrad, over the operands as they are quantised."""
    weight = _linear_weight(format, parts, columns, scales)
    dtype = DTYPES["fp32" if format == "fp32" else "bf16"]
    dy = normal(tokens, sum(parts), seed=2, dtype=dtype)
    matrix = linear_module.dequantised(linear_module.in_e4m3(weight))

    def gradients() -> dict[str, Tensor]:
        made = linear_module.output_gradient(dy, weight.site).rows
        return {"x": linear_module.dgrad(made, weight)}

    quantised = quantise_rows(dy, scales, parts) if weight.site.dgrad == "e4m3" else None
    return Case(
        f"linear in {format.upper()}",
        {"x": torch.zeros(tokens, columns, dtype=dtype)},
        lambda x: x @ matrix.to(x.dtype).t(),
        gradients=gradients,
        dy=dy if quantised is None else linear_module.dequantise_rows(quantised),
    )


def wgrad(
    format: Format,
    parts: tuple[int, ...] = (200,),
    columns: int = 150,
    scales: ScaleKind = "power_of_two",
    tokens: int = ROWS,
) -> Case:
    """WGrad, over the operands as they are quantised."""
    site = linear_site(format, parts, scales)
    dtype = DTYPES["fp32" if format == "fp32" else "bf16"]
    x, dy = wide(tokens, columns, dtype=dtype), normal(tokens, sum(parts), seed=2, dtype=dtype)

    def as_read(x: Tensor) -> Tensor:
        read: Operand = quantise_tokens(x, scales) if site.wgrad == "e4m3" else x
        return linear_module.dequantise_tokens(read)

    def gradients() -> dict[str, Tensor]:
        grad = torch.zeros(sum(parts), columns)
        made = linear_module.output_gradient(dy, site).tokens
        linear_module.wgrad(made, linear_module.input_saved(x, site), grad, site)
        return {"weight": grad}

    read = as_read(x)
    return Case(
        f"linear in {format.upper()}",
        {"weight": torch.zeros(sum(parts), columns)},
        lambda weight: read.to(weight.dtype) @ weight.t(),
        gradients=gradients,
        dy=as_read(dy),
    )


def int8_site(parts: tuple[int, ...]) -> Site:
    """A linear whose three products are in INT8."""
    return Site("case", "linear", "int8", dgrad="int8", wgrad="int8", parts=parts)


def dgrad_in_int8(
    parts: tuple[int, ...] = (256, 72), columns: int = 160, tokens: int = ROWS
) -> Case:
    """DGrad, over dY and W^T as INT8 behind a Hadamard matrix over the rows of each part."""
    site = int8_site(parts)
    weight = LinearWeight(site, publish(site, wide(sum(parts), columns, seed=1)))
    dy = wide(tokens, sum(parts), seed=2, dtype=BF16)
    assert isinstance(weight.matrix, Int8Rows)
    by_column = dequantise_int8(weight.matrix).t()

    def as_read(x: Tensor) -> Tensor:
        made = [quantise_int8(part) for part in x.split(parts, 1)]
        sizes = [rotation_size(part) for part in parts]
        scaled = [Int8Rows(q.values, q.scales / n) for q, n in zip(made, sizes, strict=True)]
        return torch.cat([dequantise_int8(part) for part in scaled], 1)

    def gradients() -> dict[str, Tensor]:
        made = linear_module.output_gradient(dy, site).rows
        return {"x": linear_module.dgrad(made, weight)}

    read = as_read(by_column)
    return Case(
        "linear in INT8",
        {"x": torch.zeros(tokens, columns, dtype=BF16)},
        lambda x: x @ read.to(x.dtype),
        gradients=gradients,
        dy=as_read(dy),
    )


def wgrad_in_int8(
    parts: tuple[int, ...] = (256, 72), columns: int = 160, tokens: int = ROWS
) -> Case:
    """WGrad to the bit.  Balancing turns tokens of sizes between 2^-60 and 2^60 into the integers
    that they were made of, which INT8 holds; of two tokens a side is zero, and the other large.
    """
    size = torch.exp2(torch.arange(tokens) * 37 % 121 - 60.0)[:, None]
    x, dy = _integers(tokens, columns, 1) / size, _integers(tokens, sum(parts), 2) * size
    x[-1], dy[-1], x[0], dy[0] = 0.0, 3e38, 3e38, 0.0
    x, dy, site = x.to(BF16), dy.to(BF16), int8_site(parts)

    def gradients() -> dict[str, Tensor]:
        grad = torch.zeros(sum(parts), columns)
        made = linear_module.output_gradient(dy, site).tokens
        linear_module.wgrad(made, linear_module.input_saved(x, site), grad, site)
        return {"weight": grad}

    return Case(
        "linear in INT8",
        {"weight": torch.zeros(sum(parts), columns)},
        lambda weight: x.to(weight.dtype) @ weight.t(),
        gradients=gradients,
        dy=dy,
        gradient_tolerance=2.0**-40,  # sums of so few products are exact in FP32
    )


def _integers(rows: int, columns: int, seed: int) -> Tensor:
    """FP32 integers in -127 .. 127, whose largest is 127 in every row and in every column."""
    generator = torch.Generator().manual_seed(seed)
    made = torch.randint(-127, 128, (rows, columns), generator=generator).float()
    made[:, 3 % columns] = made[rows // 2] = INT8_MAX
    return made
