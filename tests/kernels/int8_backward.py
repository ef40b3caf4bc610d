"""What the tests of DGrad and WGrad in INT8 share, in Triton's interpreter and on a card."""

from dataclasses import replace

import torch

from isobit.kernels.hopper.products import HopperProducts
from isobit.kernels.operands import LinearWeight
from isobit.kernels.spec import linear as specification
from isobit.kernels.spec.experts import one_expert
from isobit.kernels.triton import int8_backward as operands
from isobit.kernels.triton.dispatch import gather, make_dispatch
from isobit.kernels.triton.linear import output_gradient, wgrad
from isobit.kernels.triton.quantise import publish
from isobit.precision.flow import Site
from isobit.precision.quant_tensor import Int8Parts, Int8Rows, block_sizes
from tests.kernels.comparison import bits


def gradients(tokens: int, columns: int) -> torch.Tensor:
    """BF16 rows of sizes that differ by powers of ten, one of them zero."""
    x = torch.randn(tokens, columns) * torch.exp(4 * torch.randn(tokens, 1))
    x[tokens // 2] = 0.0
    return x.bfloat16()


def of_host(matrix: Int8Rows) -> Int8Rows:
    return Int8Rows(matrix.values.cpu(), matrix.scales.cpu())


def assert_same_parts(ours: Int8Parts, theirs: Int8Parts) -> None:
    """The same, but for zeros behind short blocks."""
    assert torch.equal(bits(ours.scales), bits(theirs.scales))
    blocks = theirs.values.split(block_sizes(theirs.parts), 1)
    for block, whole in zip(blocks, ours.values.cpu().split(128, 1), strict=True):
        assert torch.equal(whole[:, : block.shape[1]], block)
        assert not whole[:, block.shape[1] :].any()


def check_experts(parts: tuple[int, ...], columns: int, tokens: int, device: torch.device) -> None:
    """Each expert has the products of its own linear; the last has no tokens, and adds nothing."""
    count, n = 3, sum(parts)
    own = Site("gate_up_proj", "linear", "int8", dgrad="int8", wgrad="int8", parts=parts)
    site = replace(own, parts=parts * count)
    matrix = publish(site, torch.randn(count * n, columns).to(device))
    assert isinstance(matrix, Int8Rows)
    dy, x = gradients(tokens, n), gradients(tokens, columns)
    dispatch = make_dispatch(torch.randint(0, count - 1, (tokens, 1)).int().to(device), count)
    d_rows, rows = (gather(side.to(device), dispatch, pads=True).values for side in (dy, x))
    made = output_gradient(d_rows, own)
    assert isinstance(made.rows, Int8Parts)
    turned = operands.transposed_parts(matrix, parts, count)
    d_x = HopperProducts.int8_dgrad(made.rows, turned, dispatch).cpu()
    before = torch.randn(count * n, columns)
    grad = before.to(device, copy=True)
    wgrad(HopperProducts, made.tokens, rows, grad, own, dispatch)
    assert torch.equal(grad[-n:].cpu(), before[-n:])
    assert dispatch.experts is not None
    places, labels = dispatch.places[:, 0].cpu().long(), dispatch.experts.cpu()
    weight = LinearWeight(site, of_host(matrix))
    for index, theirs in enumerate(before.split(n)[:-1]):
        token = (labels[places] == index).nonzero()[:, 0]
        exact = specification.output_gradient(dy[token], own)
        expected = specification.dgrad(exact.rows, one_expert(weight, index, count)[0])
        assert torch.equal(d_x[places[token]], expected)
        specification.wgrad(dy[token], x[token], theirs, own)
        assert torch.equal(grad[index * n : (index + 1) * n].cpu(), theirs)
