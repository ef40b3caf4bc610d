"""After a forward: which samples have all their tokens in the cache, and the hidden states that
their next ones are drawn from.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from isobit.rollout.native.scheduler import Plan
from isobit.rollout.native.sequence import Sample, SharedPrompt

Ready = Sequence[tuple[Sample, Tensor]]
"""Samples to draw a token for, each with the final hidden state [hidden] of its last one."""


def take_ready(plan: Plan, hidden: Tensor, rows: Sequence[int]) -> Ready:
    """Give finished prompts their last hidden state; the samples that are up to date now, each with
    its own.

    ``rows[i]``: the row of ``hidden`` that belongs to the last token of sequence ``i`` of the plan.
    """
    ready: list[tuple[Sample, Tensor]] = []
    for (sequence, _), row in zip(plan, rows, strict=True):
        if sequence.remaining > 0:
            continue
        if isinstance(sequence, SharedPrompt):
            sequence.last_hidden = hidden[row].clone()  # a view would keep the whole forward alive
        elif isinstance(sequence, Sample):
            ready.append((sequence, hidden[row]))
    return ready


def distinct_rows(ready: Ready) -> tuple[Tensor, list[int]]:
    """The hidden states [R, hidden] that occur, and for each sample the row of its own: samples of
    a prompt, side by side, share one.
    """
    distinct: list[Tensor] = []
    rows: list[int] = []
    for _, hidden in ready:
        if not distinct or hidden is not distinct[-1]:
            distinct.append(hidden)
        rows.append(len(distinct) - 1)
    return torch.stack(distinct), rows
