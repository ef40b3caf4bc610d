"""The Hadamard matrix before E4M3: its definition, its bits, and what it is for."""

import pytest
import torch

from isobit.kernels.spec.hadamard import hadamard, hadamard_size
from isobit.kernels.spec.heads import Heads

SIZES = {64: 64, 80: 16, 96: 32, 128: 128, 256: 256}


def matrix(head_dim: int) -> torch.Tensor:
    """By Sylvester's construction, a block beside the other."""
    block, pair = torch.ones(1, 1), torch.tensor([[1.0, 1.0], [1.0, -1.0]])
    while len(block) < SIZES[head_dim]:
        block = torch.kron(pair, block)
    return torch.block_diag(*[block] * (head_dim // len(block)))


@pytest.mark.parametrize("head_dim", SIZES)
def test_it_is_sylvesters_matrix(head_dim: int) -> None:
    assert hadamard_size(head_dim) == SIZES[head_dim]
    whole = torch.randint(-1000, 1000, (5, 3, head_dim)).float()  # their sums are exact
    assert torch.equal(hadamard(whole), whole @ matrix(head_dim))
    assert torch.equal(hadamard(hadamard(whole)), whole * SIZES[head_dim])


def test_sums_have_the_order_of_the_fast_transform() -> None:
    x = torch.randn(64) * torch.exp(5 * torch.randn(64))
    expected = x.tolist()
    for apart in (1, 2, 4, 8, 16, 32):
        for i in range(64):
            if not i & apart:
                a, b = torch.tensor([expected[i], expected[i + apart]])
                expected[i], expected[i + apart] = float(a + b), float(a - b)
    assert torch.equal(hadamard(x), torch.tensor(expected))


def test_a_vector_does_not_depend_on_its_place() -> None:
    x = torch.randn(40, 3, 64) * torch.exp(3 * torch.randn(40, 3, 1))
    whole = hadamard(x)
    for rows in (slice(0, 1), slice(3, 20), slice(39, 40)):
        assert torch.equal(hadamard(x[rows]), whole[rows])


def test_products_of_vectors_with_large_channels_lose_less() -> None:
    """Two channels of 64 are ten times as large as the others, as in Q and K of trained models."""
    q, k = torch.randn(2, 500, 64)
    q[:, [5, 37]] *= 10.0
    k[:, [5, 37]] *= 10.0
    exact = (q.double() * k.double()).sum(-1)

    def lost(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        read = [Heads.encode(x, "e4m3").dequantised().double() for x in (q, k)]
        return ((read[0] * read[1]).sum(-1) - exact).square().mean().sqrt()

    assert 3 * lost(hadamard(q) / 64, hadamard(k)) < lost(q, k)
