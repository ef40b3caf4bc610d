"""What one micro-batch of the trainer sees: sequences laid end to end, as tensors.

Which sequences are laid end to end together, within a budget of tokens.

First-fit decreasing: longest first, each into the first bin with room for it.  That fills the bins
(never more than 11/9 of the fewest possible, and one) and puts sequences of similar length side by
side, which is what the attention over a packed batch likes.  Ties keep the order given, so that the
same sequences make the same bins.

The first bin with room is found in a tree of the largest rooms, in log n steps: every rank packs
the step of all, and hundreds of GPUs have 100,000 sequences.

What a forward over packed sequences says of the tokens in the loss mask.

Micro-batches of whole sequences laid end to end, without padding and within a budget of tokens.

    sequence    given tokens | answer | given tokens | answer     L tokens, positions 0 .. L-1
    row i       predicts token i + 1: the rows that are learnt from stand before the tokens in the
                loss mask, of which there may be several spans

Which sequences go together is said by ``isobit.records.batch``.

One completion of a step, as it is judged and learnt from.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from isobit.records.sequence import Numbers, TokenSequence
from isobit.records.text import Group


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


_FULL = -1


def first_fit_decreasing(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Indices into ``lengths``, cut into bins whose lengths sum to at most ``budget``, or that hold
    one index.
    """
    bins: list[list[int]] = []
    rooms = _Rooms(len(lengths), budget)
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        place = rooms.first(lengths[index]) if lengths[index] <= budget else len(bins)
        if place == len(bins):
            bins.append([])
        bins[place].append(index)
        rooms.fill(place, lengths[index])
    return bins


class _Rooms:
    """Room of every bin, those not yet begun too: node i of a tree has the larger one of its
    children 2 i and 2 i + 1, the leaves are the bins.
    """

    def __init__(self, bins: int, budget: int) -> None:
        self._leaves = 1 << max(bins - 1, 0).bit_length()
        self._largest = [budget] * (2 * self._leaves)

    def first(self, length: int) -> int:
        """The first bin with so much room."""
        node = 1
        while node < self._leaves:
            node *= 2
            node += self._largest[node] < length
        return node - self._leaves

    def fill(self, place: int, length: int) -> None:
        """Put so much into a bin."""
        node = place + self._leaves
        self._largest[node] = max(self._largest[node] - length, _FULL)
        while node > 1:
            node //= 2
            self._largest[node] = max(self._largest[2 * node], self._largest[2 * node + 1])


@dataclass(frozen=True, slots=True)
class RouterScores:
    """The routers of S sequences over all sparse layers, on the host
    (``isobit.kernels.operands``).
    """

    balance: torch.Tensor
    """FP32 [S]: the mean over the layers; 1 where all experts are chosen equally often."""
    z: torch.Tensor
    """FP32 [S], likewise."""
    load: torch.Tensor
    """int64 [layers, E]: choices that fell on each expert, of all sequences together."""


@dataclass(frozen=True, slots=True)
class TokenScores:
    """Of the N targets of a batch, on the host; FP32 [N] where nothing else is said."""

    log_probs: torch.Tensor
    """At the temperature that each target was drawn with; [0] for a model without lm_head."""
    entropies: torch.Tensor
    """Of the distribution that each target was drawn from, nats; [0] likewise."""
    values: torch.Tensor | None = None
    """By a scalar head, at the row that predicts each target; None where the model has none."""
    routings: torch.Tensor | None = None
    """int64 [N]: the digest of the experts at the row that predicts each target
    (``isobit.models.layers``); None for a dense model.
    """
    router: RouterScores | None = None
    """Of a mixture of experts in a pass that is learnt from."""


def sequences_of(
    groups: Sequence[Group], advantages: Sequence[Sequence[float | None]]
) -> list[TokenSequence]:
    """The sequences of graded groups, with ``advantages[g][i]`` at every token that completion i of
    group g drew.

    An advantage of None (no valid reward, or nothing to compare it with) leaves the completion out;
    so does an empty response.
    """
    return [
        completion.sequence.with_advantages(advantage)
        for group, group_advantages in zip(groups, advantages, strict=True)
        for completion, advantage in zip(group.completions, group_advantages, strict=True)
        if advantage is not None and completion.length
    ]


def pack(sequences: Sequence[TokenSequence], tokens_per_microbatch: int) -> list[PackedBatch]:
    """Sequences -> micro-batches of at most ``tokens_per_microbatch`` tokens; a longer sequence
    gets a micro-batch of its own.
    """
    bins = first_fit_decreasing([sequence.length for sequence in sequences], tokens_per_microbatch)
    return [lay_end_to_end([sequences[index] for index in members]) for members in bins]


def lay_end_to_end(sequences: Sequence[TokenSequence]) -> PackedBatch:
    """One micro-batch of the sequences in their order; a column that none of them has is None, and
    all of them have it or none.
    """
    lengths = [sequence.length for sequence in sequences]
    token_ids = torch.from_numpy(np.concatenate([one.token_ids for one in sequences])).long()
    mask = torch.from_numpy(np.concatenate([one.loss_mask for one in sequences]))
    learnt = mask.nonzero().squeeze(1)
    owner = torch.arange(len(sequences)).repeat_interleave(torch.tensor(lengths))[learnt]

    def numbers(columns: Iterable[Numbers]) -> torch.Tensor:
        return responses(sequences, columns)

    def optional(columns: Iterable[Numbers | None]) -> torch.Tensor | None:
        given = [column for column in columns if column is not None]
        assert len(given) in (0, len(sequences)), "all sequences have a column, or none"
        return numbers(given) if given else None

    routings = None
    if any(sequence.routings is not None for sequence in sequences):
        none = [np.zeros(length, np.int64) for length in lengths]
        pairs = zip(sequences, none, strict=True)
        routings = responses(
            sequences, [zeros if one.routings is None else one.routings for one, zeros in pairs]
        )
    temperatures = torch.tensor([sequence.temperature for sequence in sequences])
    return PackedBatch(
        token_ids=token_ids,
        positions=torch.cat([torch.arange(length) for length in lengths]),
        lengths=tuple(lengths),
        rows=learnt - 1,
        targets=token_ids[learnt],
        sequence=owner,
        temperatures=temperatures[owner],
        recorded_log_probs=numbers(sequence.log_probs for sequence in sequences),
        old_log_probs=numbers(sequence.ratio_log_probs for sequence in sequences),
        advantages=numbers(sequence.advantages for sequence in sequences),
        reference_log_probs=optional(sequence.reference_log_probs for sequence in sequences),
        values=optional(sequence.values for sequence in sequences),
        returns=optional(sequence.returns for sequence in sequences),
        importance=optional(sequence.importance for sequence in sequences),
        recorded_routings=routings,
        fresh=torch.tensor([sequence.fresh for sequence in sequences])[owner],
    )


def responses(sequences: Sequence[TokenSequence], columns: Iterable[np.ndarray]) -> torch.Tensor:
    """The entries of all response tokens of a column each, end to end."""
    pairs = zip(sequences, columns, strict=True)
    return torch.from_numpy(np.concatenate([one.of_response(column) for one, column in pairs]))


@dataclass(frozen=True, slots=True)
class Sample:
    """One completion with its reward, as a step learns from it."""

    sequence: TokenSequence
    reward: float | None
    """None excludes it."""
    truncated: bool = False
    """Whether the length limit ended it."""
    advantage: float | None = None
    """That it was given when it was fresh; None of a fresh one."""

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing in it to learn from."""
        return self.sequence.response_length == 0
