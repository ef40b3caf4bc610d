"""Run in Triton's interpreter by test_interpreted.py: DGrad and WGrad in INT8 have the operands and
the bits of the specification's.
"""

import torch
from triton.runtime import interpreter

from isobit.kernels.hopper.products import HopperProducts
from isobit.kernels.operands import LinearWeight
from isobit.kernels.spec import int8_backward as specification
from isobit.kernels.spec import linear as linear_specification
from isobit.kernels.triton import int8_backward as operands
from isobit.kernels.triton.linear import output_gradient, wgrad
from isobit.kernels.triton.products import Products
from isobit.kernels.triton.quantise import publish
from isobit.precision.flow import Site
from isobit.precision.quant_tensor import Int8Parts, Int8Rows, block_sizes
from tests.kernels.comparison import bits
from tests.kernels.int8_backward import assert_same_parts, check_experts, gradients
from tests.kernels.triton.interpreted_qkv import convert


def in_whole_blocks(weight: Int8Parts) -> Int8Parts:
    """Zeros behind each part's last block."""
    blocks = weight.values.split(block_sizes(weight.parts), 1)
    padded = [torch.nn.functional.pad(block, (0, 128 - block.shape[1])) for block in blocks]
    return Int8Parts(torch.cat(padded, 1), weight.scales, weight.parts)


def check(
    parts: tuple[int, ...],
    columns: int,
    tokens: int,
    spoilt: float | None = None,
    products: type[Products] = HopperProducts,
) -> None:
    """Of the linears of such products."""
    site = Site("qkv_proj", "linear", "int8", dgrad="int8", wgrad="int8", parts=parts)
    master = torch.randn(sum(parts), columns) * torch.exp(2 * torch.randn(sum(parts), 1))
    dy, x = gradients(tokens, sum(parts)), gradients(tokens, columns)
    x[0] = 0.0
    if spoilt is not None:
        master[1, 0] = dy[1, 2] = x[2, 0] = spoilt
        dy[0, 1] = spoilt  # beside an x of zeros
    matrix = publish(site, master)
    assert isinstance(matrix, Int8Rows)
    weight = LinearWeight(site, matrix)
    made = output_gradient(dy, site)
    exact = linear_specification.output_gradient(dy, site)
    assert isinstance(made.rows, Int8Parts)
    assert isinstance(exact.rows, Int8Parts)
    assert_same_parts(made.rows, exact.rows)
    assert isinstance(made.tokens, operands.Unbalanced)
    assert torch.equal(made.tokens.scales.amax(0), operands.row_amax(dy)[0])
    for ours, theirs in zip(
        operands.balanced_rows(made.tokens, x), specification.balanced_rows(dy, x), strict=True
    ):
        assert torch.equal(bits(ours.scales), bits(theirs.scales))
        assert torch.equal(ours.values[:, :tokens], theirs.values)
        assert not ours.values[:, tokens:].any()
    d_x = products.int8_dgrad(made.rows, turned(matrix, parts))
    torch.testing.assert_close(
        d_x, linear_specification.dgrad(exact.rows, weight), rtol=0, atol=0, equal_nan=True
    )
    grad = torch.randn(sum(parts), columns)
    theirs = grad.clone()
    wgrad(products, made.tokens, x, grad, site)
    linear_specification.wgrad(dy, x, theirs, site)
    torch.testing.assert_close(grad, theirs, rtol=0, atol=0, equal_nan=True)


def turned(matrix: Int8Rows, parts: tuple[int, ...], experts: int = 1) -> Int8Parts:
    """In place of the kernel of Gluon, which is not interpreted."""
    rows = sum(parts)
    made = [
        in_whole_blocks(
            specification.transposed_parts(matrix.rows(rows * i, rows * (i + 1)), parts)
        )
        for i in range(experts)
    ]
    values = torch.cat([one.values for one in made])
    return Int8Parts(values, torch.cat([one.scales for one in made], 1), parts)


def main() -> None:
    interpreter._convert_float = convert
    torch.manual_seed(0)
    check((128, 40, 24), 80, 5)
    check((96,), 40, 140)
    check((256, 128), 150, 130)
    for spoilt in (torch.nan, torch.inf):
        check((40, 24), 80, 5, spoilt)
    operands.transposed_parts = turned
    check_experts((40, 24), 80, 150, torch.device("cpu"))
