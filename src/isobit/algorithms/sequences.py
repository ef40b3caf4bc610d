"""Sums and means over the response tokens of each sequence."""

import torch


def sequence_sums(values: torch.Tensor, sequence: torch.Tensor) -> torch.Tensor:
    """[N] of the sequences numbered in ``sequence`` (int64 [N]) -> [S], S the largest number and
    one; tokens are added in their order.
    """
    count = int(sequence.max()) + 1 if sequence.numel() else 0
    return values.new_zeros(count).index_add(0, sequence, values)


def sequence_means(values: torch.Tensor, sequence: torch.Tensor) -> torch.Tensor:
    """As ``sequence_sums``, divided by each sequence's number of tokens; 0 where it has none."""
    counts = torch.bincount(sequence).clamp(min=1)
    return sequence_sums(values, sequence) / counts.to(values.dtype)
