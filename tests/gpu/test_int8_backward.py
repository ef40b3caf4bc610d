"""DGrad and WGrad in INT8 on a GPU: the operands and the bits of the specification."""

import pytest
import torch

from isobit.kernels.backend import backend_of
from isobit.kernels.operands import LinearWeight
from isobit.kernels.spec import int8_backward as specification
from isobit.kernels.spec import linear as linear_specification
from isobit.kernels.triton import int8_backward as operands
from isobit.kernels.triton.pointwise import swiglu_backward_bf16
from isobit.precision.flow import Site
from isobit.precision.quant_tensor import Int8Parts, Int8Rows
from tests.gpu.kernels import GPU, output_gradient, publish, swiglu_backward
from tests.int8_products import BACKWARDS, EXPECTED, backward_digests
from tests.kernels.comparison import bits
from tests.kernels.int8_backward import assert_same_parts, check_experts, gradients, of_host

dgrad, wgrad = GPU.dgrad, GPU.wgrad

CASES = [
    ((256, 128, 72), 80, 5),
    ((576, 192, 192), 576, 300),
    ((1040, 1040), 576, 129),
    ((4096, 1024, 1024), 1024, 512),
    ((2048, 2048), 1024, 1000),
    ((128, 128, 128), 128, 77),  # parts of a block
    ((384,), 150, 77),
    ((64,), 64, 1),
]
"""Rows of the parts, columns and tokens."""


def assert_equal(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    """Of NaN no bit is compared."""
    torch.testing.assert_close(ours.cpu(), theirs, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("spoilt", [None, torch.nan, torch.inf])
@pytest.mark.parametrize(("parts", "columns", "tokens"), CASES)
def test_the_specifications_bits(
    parts: tuple[int, ...], columns: int, tokens: int, spoilt: float | None
) -> None:
    torch.manual_seed(0)
    site = Site("w", "linear", "int8", dgrad="int8", wgrad="int8", parts=parts)
    master = torch.randn(sum(parts), columns) * torch.exp(torch.randn(sum(parts), 1))
    x, dy = gradients(tokens, columns), gradients(tokens, sum(parts)) * 1e-5
    if spoilt is not None:
        dy[0, 1] = x[1 % tokens, 0] = master[2, 3] = spoilt
    matrix = publish(site, master.cuda())
    assert isinstance(matrix, Int8Rows)
    weight, on_host = LinearWeight(site, matrix), LinearWeight(site, of_host(matrix))
    assert_same_parts(
        operands.transposed_parts(matrix, parts),
        specification.transposed_parts(of_host(matrix), parts),
    )
    made = output_gradient(dy.cuda(), site)
    theirs = linear_specification.output_gradient(dy, site)
    assert isinstance(made.rows, Int8Parts)
    assert isinstance(theirs.rows, Int8Parts)
    assert_same_parts(made.rows, theirs.rows)
    assert isinstance(made.tokens, operands.Unbalanced)
    sides = operands.balanced_rows(made.tokens, x.cuda())
    for side, exact in zip(sides, specification.balanced_rows(dy, x), strict=True):
        assert torch.equal(bits(side.scales), bits(exact.scales))
        assert torch.equal(side.values[:, :tokens].cpu(), exact.values)
        assert not side.values[:, tokens:].any()
    assert_equal(dgrad(made.rows, weight), linear_specification.dgrad(theirs.rows, on_host))
    grad = torch.randn(sum(parts), columns)
    ours = grad.cuda()
    wgrad(made.tokens, x.cuda(), ours, site)
    linear_specification.wgrad(dy, x, grad, site)
    assert_equal(ours, grad)
    again = output_gradient(dy.cuda(), site)
    assert_equal(dgrad(again.rows, weight), dgrad(made.rows, weight).cpu())


@pytest.mark.parametrize("columns", [80, 576, 4224, 9728, 11008, 12288, 14336, 18944])
def test_the_gradient_of_swiglu_is_quantised_as_it_is_rounded(columns: int) -> None:
    torch.manual_seed(0)
    site = Site("w", "linear", "int8", dgrad="int8", wgrad="int8", parts=(columns, columns))
    dy = gradients(9, columns).cuda() * 1e-5
    gate_up = torch.cat([gradients(9, columns), torch.randn(9, columns).bfloat16()], 1).cuda()
    gate_up[3, 5] = float("nan")
    made = swiglu_backward(dy, gate_up, site)
    exact = output_gradient(swiglu_backward_bf16(dy, gate_up), site)
    assert isinstance(made.rows, Int8Parts)
    assert isinstance(exact.rows, Int8Parts)
    assert torch.equal(made.rows.values, exact.rows.values)
    assert torch.equal(bits(made.rows.scales), bits(exact.rows.scales))
    assert isinstance(made.tokens, operands.Unbalanced)
    assert isinstance(exact.tokens, operands.Unbalanced)
    assert torch.equal(bits(made.tokens.values), bits(exact.tokens.values))
    ours, theirs = (
        operands.balanced_rows(one, dy)[0].values for one in (made.tokens, exact.tokens)
    )
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    ("parts", "columns", "tokens"), [((768, 768), 2048, 700), ((320,), 80, 150), ((40, 24), 80, 9)]
)
def test_experts_have_the_products_of_their_own_linears(
    parts: tuple[int, ...], columns: int, tokens: int
) -> None:
    torch.manual_seed(0)
    check_experts(parts, columns, tokens, torch.device("cuda"))


@pytest.mark.parametrize("name", list(BACKWARDS))
def test_digests_made_on_a_cpu(name: str) -> None:
    """SHA-256 of operands and products."""
    backend = backend_of(torch.device("cuda", torch.cuda.current_device()))
    assert backward_digests(name, backend, operands) == EXPECTED[name]
