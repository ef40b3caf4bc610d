"""Bias, rotation and the Hadamard matrix beside the cases of ``test_cases.py``."""

from dataclasses import replace

import pytest
import torch

from isobit.kernels.operands import QkvTransform, RopeTable
from isobit.kernels.spec.qkv import Heads, hadamard, hadamard_size, rotate, with_bias
from isobit.proof.cases import hadamard_matrix


def test_the_bias_is_rounded_with_the_sum_and_not_before() -> None:
    table = RopeTable.build(torch.ones(16, dtype=torch.float64), 7)
    plain = QkvTransform(6, 2, 32, table.cos, table.sin, 1e-6, None, None, None)
    bias, qkv = torch.randn(320).bfloat16(), torch.randn(7, 320).bfloat16()
    exact = qkv.double() + bias.double()
    assert torch.equal(with_bias(qkv, replace(plain, bias=bias)), exact.float().bfloat16())
    assert with_bias(qkv, plain) is qkv


SIZES = {64: 64, 80: 16, 96: 32, 128: 128, 256: 256}


@pytest.mark.parametrize("head_dim", SIZES)
def test_it_is_sylvesters_matrix(head_dim: int) -> None:
    assert hadamard_size(head_dim) == SIZES[head_dim]
    whole = torch.randint(-1000, 1000, (5, 3, head_dim)).float()  # their sums are exact
    assert torch.equal(hadamard(whole, SIZES[head_dim]), whole @ hadamard_matrix(head_dim).float())
    assert torch.equal(
        hadamard(hadamard(whole, SIZES[head_dim]), SIZES[head_dim]), whole * SIZES[head_dim]
    )


def test_sums_have_the_order_of_the_fast_transform() -> None:
    x = torch.randn(64) * torch.exp(5 * torch.randn(64))
    expected = x.tolist()
    for apart in (1, 2, 4, 8, 16, 32):
        for i in range(64):
            if not i & apart:
                a, b = torch.tensor([expected[i], expected[i + apart]])
                expected[i], expected[i + apart] = float(a + b), float(a - b)
    assert torch.equal(hadamard(x, 64), torch.tensor(expected))


@pytest.mark.parametrize("rows", [1, 2, 1100])
def test_a_hadamard_result_survives_later_calls(rows: int) -> None:
    x = torch.arange(rows * 64.0).view(rows, 64)
    made = hadamard(x, 64)
    kept = made.clone()
    hadamard(x + 1.0, 64)
    assert torch.equal(made, kept)


def test_products_of_vectors_with_large_channels_lose_less() -> None:
    """Two channels of 64 are ten times as large as the others, as in Q and K of trained models."""
    q, k = torch.randn(2, 500, 64)
    q[:, [5, 37]] *= 10.0
    k[:, [5, 37]] *= 10.0
    exact = (q.double() * k.double()).sum(-1)

    def lost(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        read = [Heads.encode(x, "e4m3").dequantised().double() for x in (q, k)]
        return ((read[0] * read[1]).sum(-1) - exact).square().mean().sqrt()

    assert 3 * lost(hadamard(q, 64) / 64, hadamard(k, 64)) < lost(q, k)


FREQUENCIES = torch.tensor([1.0, 0.1, 0.01, 0.001], dtype=torch.float64)
TABLE_ROPE = RopeTable.build(FREQUENCIES, 50)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_backward_table_gives_the_gradient_and_takes_a_rotation_back(
    dtype: torch.dtype,
) -> None:
    rows = TABLE_ROPE.rows(torch.tensor([0, 3, 49]))
    x, dy = torch.randn(3, 2, 8).to(dtype).requires_grad_(), torch.randn(3, 2, 8).to(dtype)
    (dx,) = torch.autograd.grad(rotate(x, rows), x, dy.float())
    ours = rotate(dy, rows.backward()).to(dtype)
    torch.testing.assert_close(ours, dx, rtol=2**-7 if dtype == torch.bfloat16 else 1e-6, atol=1e-6)
    back = rotate(rotate(x.detach(), rows), rows.backward())
    torch.testing.assert_close(
        back.to(dtype), x.detach(), rtol=0, atol=0.05 if dtype != torch.float32 else 1e-6
    )
