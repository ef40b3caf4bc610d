"""The embedding's backward on the GPU: the bits of the CPU's, which adds a token's rows in their
order.
"""

import pytest
import torch

from isobit.kernels.triton.pointwise import embedding_backward

VOCABULARY = 1000


def cases(tokens: int) -> dict[str, torch.Tensor]:
    """Ids whose runs are short, long, one, and all there are."""
    generator = torch.Generator().manual_seed(tokens)
    uniform = torch.randint(0, VOCABULARY, (tokens,), generator=generator)
    frequent = torch.where(torch.rand(tokens, generator=generator) < 0.3, VOCABULARY - 1, uniform)
    return {
        "uniform": uniform,
        "frequent": frequent,
        "equal": torch.zeros(tokens, dtype=torch.int64),
        "different": torch.randperm(VOCABULARY, generator=generator)[:tokens],
    }


def expected(dh: torch.Tensor, ids: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    """On the CPU: the table's gradient, added to what was there."""
    return grad + torch.ops.aten.embedding_dense_backward(dh.float(), ids, grad.shape[0], -1, False)


@pytest.mark.parametrize("kind", ["uniform", "frequent", "equal", "different"])
@pytest.mark.parametrize("columns", [64, 896, 1024, 2560])
@pytest.mark.parametrize("tokens", [1, 7, 517])
def test_the_bits_are_those_of_the_specification(tokens: int, columns: int, kind: str) -> None:
    ids = cases(tokens)[kind]
    dh = (torch.randn(ids.numel(), columns) * torch.exp(3 * torch.randn(ids.numel(), 1))).bfloat16()
    before = torch.randn(VOCABULARY, columns)
    grad = before.clone().cuda()
    embedding_backward(dh.cuda(), ids.cuda(), grad)
    assert torch.equal(grad.cpu(), expected(dh, ids, before))
    embedding_backward(dh.cuda(), ids.cuda(), grad)
    assert torch.equal(grad.cpu(), expected(dh, ids, expected(dh, ids, before)))


def test_a_training_batch() -> None:
    generator = torch.Generator().manual_seed(0)
    # A few frequent tokens, many rare ones.
    ids = (50000 * torch.rand(8192, generator=generator) ** 8).long()
    dh = torch.randn(8192, 1024, generator=generator).bfloat16()
    grad = torch.zeros(50000, 1024, device="cuda")
    embedding_backward(dh.cuda(), ids.cuda(), grad)
    assert torch.equal(grad.cpu(), expected(dh, ids, torch.zeros(50000, 1024)))


@pytest.mark.usefixtures("large")
def test_offsets_beyond_two_to_the_31() -> None:
    rows = 2**31 // 1024 + 8
    ids = torch.tensor([rows - 1, 3, rows - 1])
    dh = torch.randn(3, 1024).bfloat16()
    grad = torch.zeros(rows, 1024, device="cuda")
    embedding_backward(dh.cuda(), ids.cuda(), grad)
    assert torch.equal(grad[rows - 1].cpu(), dh[0].float() + dh[2].float()) and torch.equal(
        grad[3].cpu(), dh[1].float()
    )
    assert grad.count_nonzero(1).gt(0).sum() == 2


def test_no_tokens_change_nothing() -> None:
    grad = torch.ones(4, 64, device="cuda")
    embedding_backward(
        torch.empty(0, 64, dtype=torch.bfloat16, device="cuda"),
        torch.empty(0, dtype=torch.int64, device="cuda"),
        grad,
    )
    assert (grad == 1).all()
