"""Random operands of the linears on the card, and the comparison of what its quantisers make with
the specification's bytes.
"""

import torch

from isobit.kernels.spec import quantise as specification
from isobit.kernels.triton.device_functions import padded_size
from isobit.kernels.triton.quantise import QuantRows
from isobit.precision.quant_tensor import BLOCK, QuantTensor, ScaleKind, block_sizes
from tests.gpu.kernels import publish_blocks
from tests.kernels.comparison import bits

KINDS: list[ScaleKind] = ["power_of_two", "fp32"]
TENSOR_CORE = 2e-3  # of a norm: FP8 tensor cores keep 14 bits within a group
BF16_ROUNDING = 3e-3  # 1.7e-3, and the above
MATRICES = [
    ((576, 192, 192), 576),  # SmolLM2-135M's q, k and v
    ((960, 320, 320), 960),  # and those of 360M
    ((576,), 1536),
    ((1040, 1040), 576),
    ((256, 128, 72), 80),  # one grid until the last part
    ((8, 136, 256, 40), 1040),
    ((128,), 256),
    ((384,), 2048),  # half a program's rows are outside
    ((896,), 384),
    ((1536,), 1024),
]
"""Rows of the parts, and columns; never square, since a square hides a transposed operand."""


def bf16(rows: int, columns: int) -> torch.Tensor:
    """Numbers of different magnitudes."""
    spread = torch.exp(torch.randn(rows, columns, device="cuda"))
    return (torch.randn(rows, columns, device="cuda") * spread).bfloat16()


def wild(rows: int, columns: int) -> torch.Tensor:
    """BF16 on the host: magnitudes over many orders, zeros of both signs, tiny and subnormal
    numbers, alone and as whole rows, an infinity, and a NaN at the very edge.
    """
    x = (torch.randn(rows, columns) * torch.exp(6 * torch.randn(rows, columns))).bfloat16()
    x[:, 0], x[:, 1], x[:, 2], x[:, 3] = 0.0, -0.0, 1e-12, 1e-38
    if rows > 8:
        x[3], x[4, ::2], x[7, :BLOCK] = 0.0, -0.0, 1e-12
        x[8] = torch.randn(columns) * 1e-38
    x[rows // 2, 5], x[rows - 1, columns - 1] = torch.inf, torch.nan
    return x


def every_bf16() -> list[torch.Tensor]:
    """All 65,536 BF16 numbers in random groups of 128, on the host: with NaN and infinities, with
    zeros in their place, and those below 1 alone.
    """
    numbers = torch.randperm(65536, generator=torch.Generator().manual_seed(0)).to(torch.int32)
    x = numbers.to(torch.uint16).view(torch.bfloat16).view(512, 128)
    finite = torch.where(x.isfinite(), x, torch.zeros_like(x))
    return [x, finite, torch.where(finite.abs() < 1, finite, torch.zeros_like(x))]


def random_master(rows: int, columns: int) -> torch.Tensor:
    """FP32, with rows of different magnitudes."""
    sizes = torch.exp(2 * torch.randn(rows, 1, device="cuda"))
    return torch.randn(rows, columns, device="cuda") * sizes


def published(
    parts: tuple[int, ...], columns: int, kind: ScaleKind = "power_of_two"
) -> tuple[QuantTensor, torch.Tensor]:
    """A weight in E4M3, and its master."""
    master = random_master(sum(parts), columns)
    weight = QuantTensor.empty_blocks(sum(parts), columns, master.device, parts)
    publish_blocks(master, weight, kind)
    return weight, master


def assert_rows(ours: QuantRows, x: torch.Tensor, kind: ScaleKind) -> None:
    """The specification's bytes of x in row groups."""
    expected = specification.quantise_rows(x.cpu(), kind)
    assert torch.equal(bits(ours.values), bits(expected.values))
    assert torch.equal(bits(ours.scales), bits(expected.scales))


def assert_tokens(ours: QuantRows, x: torch.Tensor, kind: ScaleKind) -> None:
    """The specification's bytes of x in token groups, transposed, with zeros beyond the batch, in
    the layout that the GEMMs read.
    """
    tokens, columns = x.shape
    expected = specification.quantise_tokens(x.cpu(), kind)
    padded = -(-tokens // BLOCK) * BLOCK
    assert ours.values.shape == (columns, padded) and ours.values.is_contiguous()
    assert ours.scales.shape == (columns, padded // BLOCK)
    assert ours.scales.stride() == (1, -(-columns // 4) * 4)
    values = bits(ours.values)
    assert torch.equal(values[:, :tokens], bits(expected.values.t()))
    assert torch.equal(bits(ours.scales), bits(expected.scales.t()))
    assert not values[expected.scales[-1].isfinite(), tokens:].any()


def assert_gradient(
    ours: QuantRows, dy: torch.Tensor, parts: tuple[int, ...], kind: ScaleKind
) -> None:
    """The specification's bytes of dy in row groups, each part in whole blocks with zeros
    behind.
    """
    expected = specification.quantise_rows(dy.cpu(), kind, parts)
    assert torch.equal(bits(ours.scales), bits(expected.scales))
    values, blocks = bits(ours.values), bits(expected.values).split(block_sizes(parts), 1)
    assert values.shape == (dy.shape[0], padded_size(parts))
    assert_whole_blocks(values, blocks, expected.scales.isfinite())


def assert_whole_blocks(
    values: torch.Tensor, blocks: tuple[torch.Tensor, ...], finite: torch.Tensor
) -> None:
    """Each of ``blocks`` stands in 128 columns of ``values``, with zeros behind it in the rows that
    are ``finite`` [rows, blocks].
    """
    for i, (block, whole) in enumerate(zip(blocks, values.split(BLOCK, 1), strict=True)):
        assert torch.equal(whole[:, : block.shape[1]], block)
        assert not whole[finite[:, i], block.shape[1] :].any()


def fp64(x: QuantRows) -> torch.Tensor:
    """The numbers that a GEMM reads, whose last group may be short."""
    scales = x.scales.double().repeat_interleave(BLOCK, 1)
    return x.values.double() * scales[:, : x.values.shape[1]]
