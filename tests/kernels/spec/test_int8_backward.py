"""DGrad and WGrad in INT8 on a CPU: as near to the exact products as the format allows, and what
zeros and numbers that are not finite do.
"""

from dataclasses import replace

import pytest
import torch

from isobit.kernels.operands import LinearWeight
from isobit.kernels.spec.int8_backward import balance
from isobit.kernels.spec.linear import (
    dgrad,
    input_saved,
    output_gradient,
    wgrad,
)
from isobit.kernels.spec.quantise import dequantise_int8, publish
from isobit.precision.flow import Site
from isobit.precision.quant_tensor import Int8Rows
from tests.kernels.comparison import relative_error, same

PARTS, K = (256, 128, 96), 160
SITE = Site("w", "linear", "int8", dgrad="int8", wgrad="int8", parts=PARTS)
E4M3 = replace(SITE, dgrad="e4m3", wgrad="e4m3")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def sizes(tokens: int) -> torch.Tensor:
    """Factors of tokens over three powers of ten."""
    return torch.exp(1.7 * torch.randn(tokens, 1))


def operands(tokens: int = 300) -> tuple[torch.Tensor, torch.Tensor]:
    """dY and X of tokens whose sizes differ, among them one on which attention rests."""
    size = sizes(tokens)
    dy = torch.randn(tokens, sum(PARTS)) / size * 1e-4
    x = torch.randn(tokens, K) * size
    dy[3] /= 1000
    x[3] *= 1000
    return dy.bfloat16(), x.bfloat16()


def weight_gradient(dy: torch.Tensor, x: torch.Tensor, site: Site = SITE) -> torch.Tensor:
    grad = torch.zeros(sum(PARTS), K)
    wgrad(output_gradient(dy, site).tokens, input_saved(x, site), grad, site)
    return grad


def published(site: Site = SITE) -> LinearWeight:
    return LinearWeight(site, publish(site, torch.randn(sum(PARTS), K) * 0.02))


def test_dgrad_is_nearer_than_e4m3() -> None:
    dy, _ = operands()
    weight = published()
    assert isinstance(weight.matrix, Int8Rows)
    exact = dy.double() @ dequantise_int8(weight.matrix).double()
    errors = [
        relative_error(dgrad(output_gradient(dy, site).rows, replace(weight, site=site)), exact)
        for site in (SITE, E4M3)
    ]
    assert errors[0] < errors[1] / 2


def test_wgrad_of_tokens_of_all_sizes_is_nearer_than_e4m3() -> None:
    dy, x = operands()
    exact = dy.double().t() @ x.double()
    errors = [relative_error(weight_gradient(dy, x, site), exact) for site in (SITE, E4M3)]
    assert errors[0] < 0.015
    assert errors[0] < errors[1] / 2


@pytest.mark.parametrize("shift", [-9, 4, 20])
def test_balance_knows_no_size_of_a_token(shift: int) -> None:
    """dY 2^-k and X 2^k of a token have the same product, and give the same bits."""
    dy, x = operands()
    moved_dy, moved_x = dy.clone(), x.clone()
    moved_dy[7] *= 2.0**-shift
    moved_x[7] *= 2.0**shift
    assert torch.equal(weight_gradient(dy, x), weight_gradient(moved_dy, moved_x))


def test_balanced_sides_are_equally_large() -> None:
    dy, x = operands()
    left, right = balance(dy, x)
    assert torch.equal(left * right, torch.ones(len(x)))
    ratio = (dy.float().abs().amax(1) * left) / (x.float().abs().amax(1) * right)
    assert ((ratio >= 0.5) & (ratio <= 2)).all()


@pytest.mark.parametrize("side", [0, 1])
def test_a_token_with_a_side_of_zeros_adds_nothing(side: int) -> None:
    dy, x = operands()
    without = weight_gradient(torch.cat([dy[:9], dy[10:]]), torch.cat([x[:9], x[10:]]))
    (dy, x)[side][9], (x, dy)[side][9] = 0.0, 3e38
    assert torch.equal(weight_gradient(dy, x), without)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_is_not_hidden(value: float) -> None:
    dy, x = operands()
    dy[5, 300] = value
    broken = weight_gradient(dy, x).isnan()
    assert broken[300].all()
    assert broken.sum() == K
    x[8, 20] = value
    dy[8] = 0.0  # 0 times infinity
    broken = weight_gradient(dy, x).isnan()
    assert broken[:, 20].all()
    assert broken.sum() == K + sum(PARTS) - 1
    d_x = dgrad(output_gradient(dy, SITE).rows, published())
    assert d_x[5].isnan().all()
    assert d_x.isnan().sum() == K


def test_a_broken_row_of_w_breaks_every_gradient() -> None:
    master = torch.randn(sum(PARTS), K)
    master[300, 4] = torch.nan
    weight = LinearWeight(SITE, publish(SITE, master))
    assert dgrad(output_gradient(operands()[0], SITE).rows, weight).isnan().all()


def test_no_tokens_and_no_gradient() -> None:
    dy, x = operands()
    assert not weight_gradient(dy[:0], x[:0]).any()
    assert not weight_gradient(torch.zeros_like(dy), x).any()
    rows = output_gradient(torch.zeros_like(dy), SITE).rows
    assert not dgrad(rows, published()).any()
    assert dgrad(output_gradient(dy[:0], SITE).rows, published()).shape == (0, K)


def test_it_repeats_and_a_gradient_is_added_to() -> None:
    dy, x = operands()
    made = weight_gradient(dy, x)
    grad = torch.randn(sum(PARTS), K)
    expected = grad + made
    wgrad(dy, x, grad, SITE)
    assert torch.equal(grad, expected)
    assert same(output_gradient(dy, SITE).rows, output_gradient(dy, SITE).rows)
