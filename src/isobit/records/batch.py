"""What one micro-batch of the trainer sees: sequences laid end to end, as tensors."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """Whole sequences laid end to end without padding: T tokens of S sequences, N of them in a loss
    mask.

    Row ``i`` of the forward predicts token ``i + 1`` of the same sequence; ``rows`` names the N
    rows whose prediction is learnt from and ``targets`` the tokens predicted there.  All on the
    host.
    """

    token_ids: torch.Tensor
    """int64 [T]"""
    positions: torch.Tensor
    """int64 [T], from 0 in each sequence."""
    lengths: tuple[int, ...]
    """S of them, summing to T."""
    rows: torch.Tensor
    """int64 [N], ascending."""
    targets: torch.Tensor
    """int64 [N]"""
    sequence: torch.Tensor
    """int64 [N], 0..S-1, ascending: the sequence each target belongs to."""
    temperatures: torch.Tensor
    """float32 [N]"""
    recorded_log_probs: torch.Tensor
    """float32 [N], of the targets, by whoever drew them."""
    old_log_probs: torch.Tensor
    """float32 [N], of the targets, that the ratio of the loss is taken to: the trainer's own from
    before its first update, or the recorded ones where those are the same function's.
    """
    advantages: torch.Tensor
    """float32 [N]"""
    recorded_routings: torch.Tensor | None = None
    """int64 [N], of the row that each target was drawn from; 0 where none is known (of what is
    replayed), and None where no sequence has any.
    """
    fresh: torch.Tensor | None = None
    """bool [N], whether a target was drawn from the weights of before the step's updates; None is
    everywhere.
    """
    reference_log_probs: torch.Tensor | None = None
    """float32 [N], of the targets, by the reference model."""
    values: torch.Tensor | None = None
    """float32 [N], by the value head before the first update of the batch."""
    returns: torch.Tensor | None = None
    """float32 [N], what the value head is to learn."""
    importance: torch.Tensor | None = None
    """float32 [N], the weights of the corrections; None is 1 everywhere."""
