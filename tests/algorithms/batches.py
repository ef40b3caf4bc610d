"""Micro-batches that know of their tokens what a loss reads."""

from dataclasses import replace
from random import Random
from typing import Any

import torch

from isobit.records.batch import PackedBatch, TokenScores

GIVEN = 2
"""Tokens of each prompt."""


def batch_of(lengths: list[int], first: int = 0, **columns: Any) -> PackedBatch:
    """Sequences of so many response tokens behind two given ones, with other token ids each;
    columns of the N response tokens by name, the rest zeros.
    """
    total = [GIVEN + length for length in lengths]
    starts = [sum(total[:index]) for index in range(len(total))]
    rows = [
        start + GIVEN - 1 + token
        for start, length in zip(starts, lengths, strict=True)
        for token in range(length)
    ]
    ids = [
        (first + index) * 31 + token for index, size in enumerate(total) for token in range(size)
    ]
    zeros = torch.zeros(len(rows), dtype=torch.float64)
    batch = PackedBatch(
        token_ids=torch.tensor(ids),
        positions=torch.cat([torch.arange(size) for size in total]),
        lengths=tuple(total),
        rows=torch.tensor(rows),
        targets=torch.tensor(ids)[torch.tensor(rows) + 1],
        sequence=torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths)),
        temperatures=torch.ones(len(rows)),
        recorded_log_probs=zeros,
        old_log_probs=zeros,
        advantages=zeros,
    )
    return replace(batch, **columns)


def random_batch(
    seed: int, lengths: list[int], dtype: torch.dtype = torch.float64
) -> tuple[TokenScores, PackedBatch]:
    """A batch with every column that a loss can read, and scores that carry gradients."""
    random = Random(seed)
    count = sum(lengths)

    def column(low: float, high: float) -> torch.Tensor:
        return torch.tensor([random.uniform(low, high) for _ in range(count)], dtype=dtype)

    old = column(-4, -0.1)
    chosen = [random.choice([-1.3, -0.4, 0.0, 0.7, 2.1]) for _ in lengths]
    batch = batch_of(
        lengths,
        old_log_probs=old,
        advantages=torch.tensor(chosen, dtype=dtype).repeat_interleave(torch.tensor(lengths)),
        reference_log_probs=old + column(-0.5, 0.5),
        values=column(-1, 1),
        returns=column(-1, 1),
        importance=column(0.5, 1.5),
    )
    assert batch.values is not None
    scores = TokenScores(
        (old + column(-0.6, 0.6)).requires_grad_(),
        column(0, 2).requires_grad_(),
        (batch.values + column(-0.5, 0.5)).requires_grad_(),
    )
    return scores, batch
