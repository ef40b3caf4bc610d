"""From the states of a forward to draws: which samples have all their tokens in the cache, what
their next tokens are drawn with, and the check of the logits that they come from.

Rows and samples are not one to one: the samples of a prompt draw their first tokens from one row,
each with its own noise. Every step works row by row, so a token and its log-probability do not
depend on what else is drawn with it.
"""

from collections.abc import Sequence
from itertools import groupby

import torch
from torch import Tensor

from isobit.kernels.operands import Draws
from isobit.rollout.scheduler import Plan
from isobit.rollout.sequence import Sample, SharedPrompt, States
from isobit.util.errors import NonFiniteError

Ready = Sequence[tuple[Sample, States]]
"""Samples to draw a token for, each with the state of its last one; behind it those of its
guesses.
"""


def take_ready(plan: Plan, states: States, rows: Sequence[int]) -> Ready:
    """Give finished prompts their last token's state; the samples that are up to date now, each
    with its own, and once more with that of each guess behind it.

    ``rows[i]``: the row of ``states`` that belongs to the last token of sequence ``i`` of the plan.
    """
    ready: list[tuple[Sample, States]] = []
    for (sequence, _), row in zip(plan, rows, strict=True):
        if sequence.remaining > 0:
            continue
        if isinstance(sequence, SharedPrompt):
            sequence.last = states.row(row).clone()
        elif isinstance(sequence, Sample):
            first = row - len(sequence.draft)
            ready += [(sequence, states.row(at)) for at in range(first, row + 1)]
    return ready


def distinct_rows(ready: Ready) -> tuple[States, list[int]]:
    """The states of the R tokens that occur, and for each sample the row of its own: samples of a
    prompt share one.
    """
    distinct: dict[States, int] = {}
    rows = [distinct.setdefault(state, len(distinct)) for _, state in ready]
    routings = [state.routings for state in distinct if state.routings is not None]
    hidden = torch.stack([state.hidden for state in distinct])
    return States(hidden, torch.stack(routings) if routings else None), rows


def truncates(samples: Sequence[Sample]) -> bool:
    """Whether any sample has a filter."""
    return any(sample.prompt.request.sampling.truncates for sample in samples)


def draws_of(rows: Sequence[int], samples: Sequence[Sample]) -> Draws:
    """Temperature, noise and filters of each sample's next token, on the host, or of its next ones
    where it occurs several times in a row; ``rows`` of the logits are those that they come from.
    """
    sampling = [sample.prompt.request.sampling for sample in samples]
    filters = None
    if truncates(samples):
        filters = (
            torch.tensor([params.top_k for params in sampling]),
            torch.tensor([params.top_p for params in sampling], dtype=torch.float64),
            torch.tensor([params.min_p for params in sampling], dtype=torch.float64),
        )
    return Draws(
        rows=torch.tensor(rows, dtype=torch.int32),
        temperatures=torch.tensor([params.temperature for params in sampling], dtype=torch.float32),
        keys=torch.tensor([sample.key for sample in samples]),
        positions=torch.tensor(
            [one.length + place for one, its in groupby(samples) for place, _ in enumerate(its)]
        ),
        filters=filters,
    )


def finite_rows(logits: Tensor, temperatures: Tensor) -> Tensor:
    """Whether a distribution can be made of each row of FP32 logits [R, V] at temperatures FP32 [R]
    above 0: bool [R].
    """
    least, most = logits.aminmax(dim=1)
    return least.isfinite() & (most / temperatures).isfinite()


def non_finite(logits: Tensor, sample: Sample) -> NonFiniteError:
    """The error for a row of ``logits`` FP32 [V] that holds no distribution of the sample's next
    token.
    """
    count = int((~torch.isfinite(logits)).sum())
    what = f"{count} of {logits.numel()} are NaN or infinite"
    if not count:
        temperature = sample.prompt.request.sampling.temperature
        what = f"divided by the temperature {temperature} they leave FP32"
    return NonFiniteError(f"logits of {place_of(sample)}: {what}")


def place_of(sample: Sample) -> str:
    """Name a sample's prompt, position and adapter, for an error message."""
    named = f"prompt {sample.prompt.request.prompt.id!r} at position {len(sample.tokens) - 1}"
    return named if sample.adapter is None else f"{named} with the adapter {sample.adapter!r}"
