"""Sequences are packed into micro-batches, and their columns laid end to end.

    sequence    given tokens | answer | given tokens | answer     L tokens, positions 0 .. L-1
    row i       predicts token i + 1: the rows that are learnt from stand before the tokens in the
                loss mask, of which there may be several spans

Sequences are packed first-fit decreasing within a budget of tokens: longest first, each into the
first bin that has space for it.  That fills the bins (never more than 11/9 of the fewest possible,
and one) and puts sequences of similar length side by side, which suits the attention over a packed
batch.  Ties keep the order given, so that the same sequences make the same bins.

A tree of the largest spaces finds the first bin with space in log n steps: every rank packs the
step of all, and hundreds of GPUs have 100,000 sequences.
"""

from collections.abc import Iterable, Sequence

import numpy as np
import torch

from isobit.records.batch import PackedBatch
from isobit.records.sequence import COLUMNS, Column, TokenSequence
from isobit.records.text import Group

_FULL = -1


def first_fit_decreasing(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Indices into ``lengths``, cut into bins whose lengths sum to at most ``budget``, or that hold
    one index.
    """
    bins: list[list[int]] = []
    spaces = _Spaces(len(lengths), budget)
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        number = spaces.first(lengths[index]) if lengths[index] <= budget else len(bins)
        if number == len(bins):
            bins.append([])
        bins[number].append(index)
        spaces.fill(number, lengths[index])
    return bins


class _Spaces:
    """The space left in every bin, those not yet begun too: node i of a tree has the larger one of
    its children 2 i and 2 i + 1, the leaves are the bins.
    """

    def __init__(self, bins: int, budget: int) -> None:
        self._leaves = 1 << max(bins - 1, 0).bit_length()
        self._largest = [budget] * (2 * self._leaves)

    def first(self, length: int) -> int:
        """The first bin with space for ``length`` tokens."""
        node = 1
        while node < self._leaves:
            node *= 2
            node += self._largest[node] < length
        return node - self._leaves

    def fill(self, place: int, length: int) -> None:
        """Put ``length`` tokens into a bin."""
        node = place + self._leaves
        self._largest[node] = max(self._largest[node] - length, _FULL)
        while node > 1:
            node //= 2
            self._largest[node] = max(self._largest[2 * node], self._largest[2 * node + 1])


def sequences_of(
    groups: Sequence[Group], advantages: Sequence[Sequence[float | None]]
) -> list[TokenSequence]:
    """The sequences of graded groups, with ``advantages[g][i]`` at every token that completion i of
    group g drew.

    An advantage of None (no valid reward, or nothing to compare it with) leaves the completion out;
    so does an empty response.
    """
    return [
        completion.sequence.with_columns(advantages=advantage)
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
    """One micro-batch of the sequences in their order, with every column that ``COLUMNS`` packs."""
    lengths = [sequence.length for sequence in sequences]
    token_ids = torch.from_numpy(
        np.concatenate([sequence.token_ids for sequence in sequences])
    ).long()
    mask = torch.from_numpy(np.concatenate([sequence.loss_mask for sequence in sequences]))
    learnt = mask.nonzero().squeeze(1)
    owner = torch.arange(len(sequences)).repeat_interleave(torch.tensor(lengths))[learnt]
    columns = {
        column.packed: _packed(sequences, column) for column in COLUMNS if column.packed is not None
    }
    temperatures = torch.tensor(
        [sequence.temperature for sequence in sequences], dtype=torch.float32
    )
    return PackedBatch(
        token_ids=token_ids,
        positions=torch.cat([torch.arange(length) for length in lengths]),
        lengths=tuple(lengths),
        rows=learnt - 1,
        targets=token_ids[learnt],
        sequence=owner,
        temperatures=temperatures[owner],
        fresh=torch.tensor([sequence.fresh for sequence in sequences])[owner],
        **columns,  # pyright: ignore[reportArgumentType]
    )


def _packed(sequences: Sequence[TokenSequence], column: Column) -> torch.Tensor | None:
    """The entries of all responses; None where no sequence has the column.  Of what a replayed
    sequence is without, the fill is packed; of other columns all sequences have one, or none.
    """
    arrays: list[np.ndarray | None] = [getattr(sequence, column.name) for sequence in sequences]
    if column.stand_in is not None:
        substitutes = [getattr(sequence, column.stand_in) for sequence in sequences]
        pairs = zip(arrays, substitutes, strict=True)
        arrays = [substitute if array is None else array for array, substitute in pairs]
    missing = sum(array is None for array in arrays)
    if missing == len(arrays):
        return None
    is_lost_in_replay = column.writer == "rollout" and not column.replayed
    assert not missing or is_lost_in_replay, "all sequences have a column, or none"
    return responses(
        sequences,
        [
            np.full(sequence.length, column.fill, column.dtype) if array is None else array
            for sequence, array in zip(sequences, arrays, strict=True)
        ],
    )


def responses(sequences: Sequence[TokenSequence], columns: Iterable[np.ndarray]) -> torch.Tensor:
    """The entries of all response tokens of a column each, end to end."""
    pairs = zip(sequences, columns, strict=True)
    return torch.from_numpy(
        np.concatenate([sequence.of_response(column) for sequence, column in pairs])
    )
