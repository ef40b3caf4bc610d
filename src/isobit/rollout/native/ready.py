"""After a forward: which samples have all their tokens in the cache, and the states that
their next ones are drawn from.
"""

from collections.abc import Sequence

import torch

from isobit.rollout.native.scheduler import Plan
from isobit.rollout.native.sequence import Sample, SharedPrompt
from isobit.rollout.native.states import States

Ready = Sequence[tuple[Sample, States]]
"""Samples to draw a token for, each with the state of its last one."""


def take_ready(plan: Plan, states: States, rows: Sequence[int]) -> Ready:
    """Give finished prompts their last token's state; the samples that are up to date now, each
    with its own.

    ``rows[i]``: the row of ``states`` that belongs to the last token of sequence ``i`` of the plan.
    """
    ready: list[tuple[Sample, States]] = []
    for (sequence, _), row in zip(plan, rows, strict=True):
        if sequence.remaining > 0:
            continue
        if isinstance(sequence, SharedPrompt):
            sequence.last = states.row(row).clone()
        elif isinstance(sequence, Sample):
            ready.append((sequence, states.row(row)))
    return ready


def distinct_rows(ready: Ready) -> tuple[States, list[int]]:
    """The states of the R tokens that occur, and for each sample the row of its own: samples of a
    prompt, side by side, share one.
    """
    distinct: list[States] = []
    rows: list[int] = []
    for _, state in ready:
        if not distinct or state is not distinct[-1]:
            distinct.append(state)
        rows.append(len(distinct) - 1)
    routings = [state.routings for state in distinct if state.routings is not None]
    hidden = torch.stack([state.hidden for state in distinct])
    return States(hidden, torch.stack(routings) if routings else None), rows
