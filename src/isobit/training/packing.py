"""Micro-batches of whole sequences laid end to end, without padding and within a budget of tokens.

    sequence    prompt tokens | completion tokens          L = P + C tokens, positions 0 .. L-1
    row i       predicts token i + 1, so the C rows that predict the completion are P-1 .. L-2

Sequences are placed by first-fit decreasing: longest first, each into the first micro-batch with
room for it.  That fills the batches (never more than 11/9 of the fewest possible, and one) and puts
sequences of similar length side by side, which is what the attention over a packed batch likes.
Ties keep the order given, so that the same samples make the same batches.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from isobit.records import Group, PackedBatch


@dataclass(frozen=True, slots=True)
class TrainingSample:
    """One sequence to learn from: at least one token in both parts, and one log-probability for
    each completion token.
    """

    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    advantage: float
    temperature: float

    @property
    def length(self) -> int:
        """Tokens of both parts."""
        return len(self.prompt_ids) + len(self.completion_ids)


def samples_of(
    groups: Sequence[Group], advantages: Sequence[Sequence[float | None]]
) -> list[TrainingSample]:
    """The samples of graded groups, with ``advantages[g][i]`` for completion i of group g.

    An advantage of None (no valid reward, or nothing to compare it with) leaves the sample out; so
    does an empty completion.
    """
    return [
        TrainingSample(
            group.prompt.token_ids,
            completion.token_ids,
            completion.log_probs,
            advantage,
            completion.temperature or 1.0,
        )
        for group, group_advantages in zip(groups, advantages, strict=True)
        for completion, advantage in zip(group.completions, group_advantages, strict=True)
        if advantage is not None and completion.token_ids
    ]


def pack(samples: Sequence[TrainingSample], tokens_per_microbatch: int) -> list[PackedBatch]:
    """Samples -> micro-batches of at most ``tokens_per_microbatch`` tokens; a longer sequence gets
    a micro-batch of its own.
    """
    bins = first_fit_decreasing([sample.length for sample in samples], tokens_per_microbatch)
    return [lay_end_to_end([samples[index] for index in members]) for members in bins]


def first_fit_decreasing(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Indices into ``lengths``, cut into bins whose lengths sum to at most ``budget``, or that hold
    one index.
    """
    bins: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        place = next((b for b, left in enumerate(room) if lengths[index] <= left), len(bins))
        if place == len(bins):
            bins.append([])
            room.append(budget)
        bins[place].append(index)
        room[place] -= lengths[index]
    return bins


def lay_end_to_end(samples: Sequence[TrainingSample]) -> PackedBatch:
    """One micro-batch of the samples in their order."""
    token_ids: list[int] = []
    positions: list[int] = []
    rows: list[int] = []
    for sample in samples:
        assert sample.prompt_ids, "no row would predict the first token"
        assert len(sample.completion_ids) == len(sample.log_probs) > 0, (
            "one log-probability a completion token"
        )
        start = len(token_ids)
        token_ids += sample.prompt_ids + sample.completion_ids
        positions += range(sample.length)
        rows += range(start + len(sample.prompt_ids) - 1, start + sample.length - 1)
    counts = torch.tensor([len(sample.completion_ids) for sample in samples])

    def per_token(values: list[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float32).repeat_interleave(counts)

    return PackedBatch(
        token_ids=torch.tensor(token_ids),
        positions=torch.tensor(positions),
        lengths=tuple(sample.length for sample in samples),
        rows=torch.tensor(rows),
        targets=torch.tensor([token for sample in samples for token in sample.completion_ids]),
        sequence=torch.arange(len(samples)).repeat_interleave(counts),
        temperatures=per_token([sample.temperature for sample in samples]),
        recorded_log_probs=torch.tensor(
            [log_prob for sample in samples for log_prob in sample.log_probs], dtype=torch.float32
        ),
        advantages=per_token([sample.advantage for sample in samples]),
    )
