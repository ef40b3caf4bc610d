"""Rows of a table, and their gradient: added up in one order, and to what is there already."""

import pytest
import torch

from isobit.kernels.spec.embedding import embedding, embedding_backward


def test_rows_are_looked_up() -> None:
    table, ids = torch.randn(32, 64).bfloat16(), torch.tensor([3, 31, 3, 0])
    assert torch.equal(embedding(ids, table), table[ids])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradient_repeats_its_bits_and_is_added(dtype: torch.dtype) -> None:
    ids, dy = torch.randint(0, 32, (5000,)), torch.randn(5000, 64).to(dtype)
    before = torch.randn(32, 64)
    grads = [torch.zeros(32, 64) for _ in range(5)]
    for grad in grads:
        embedding_backward(dy, ids, grad)
    assert all(torch.equal(grads[0], grad) for grad in grads[1:])
    exact = torch.zeros(32, 64, dtype=torch.float64).index_add_(0, ids, dy.double())
    assert (grads[0] - exact).norm() < 1e-6 * exact.norm()
    added = before.clone()
    embedding_backward(dy, ids, added)
    assert torch.equal(added, before + grads[0]), "one finished sum is added"


def test_rows_of_equal_ids_are_added_in_the_order_of_their_tokens() -> None:
    """1e8 + 1 - 1e8 is 0 in FP32, and 1e8 - 1e8 + 1 is 1."""
    grad = torch.zeros(2, 1)
    embedding_backward(torch.tensor([[1e8], [1.0], [-1e8]]), torch.tensor([1, 1, 1]), grad)
    assert grad.tolist() == [[0.0], [0.0]]
    embedding_backward(torch.tensor([[1e8], [-1e8], [1.0]]), torch.tensor([1, 1, 1]), grad)
    assert grad.tolist() == [[0.0], [1.0]]
