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

With shared prompts (``isobit.models.shared_prefix``) what is packed are sequences that begin with
the same prompt, the tokens before the first in the loss mask.  Together they take the budget that
is the larger of

    their rows         of the prompt once, and of each sequence what follows it
    a quarter          of their tokens, which attention reads (``TOKENS_A_ROW``)

Sequences of a prompt that exceed it are divided, first-fit decreasing again, and each part
computes the prompt.  Where no two sequences have a prompt in common, the bins are the same as
without sharing.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from isobit.records.batch import PackedBatch
from isobit.records.sequence import COLUMNS, Column, Integers, TokenSequence
from isobit.records.text import Group

_FULL = -1
TOKENS_A_ROW = 4
"""Most tokens of sequences for each token of the budget, where sequences share rows: it bounds the
memory of attention, which gathers what every token of a layer reads.
"""


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


def pack(
    sequences: Sequence[TokenSequence], tokens_per_microbatch: int, shared_prefix: bool = False
) -> list[PackedBatch]:
    """Sequences -> micro-batches of at most ``tokens_per_microbatch`` tokens, or rows where they
    share their prompts; a longer sequence gets a micro-batch of its own.
    """
    return [
        lay_end_to_end([sequences[index] for index in members], shared_prefix)
        for members in micro_batches(sequences, tokens_per_microbatch, shared_prefix)
    ]


def micro_batches(
    sequences: Sequence[TokenSequence], tokens_per_microbatch: int, shared_prefix: bool
) -> list[list[int]]:
    """The indices of the sequences in each micro-batch of ``pack``, in its order."""
    if not shared_prefix:
        return first_fit_decreasing([one.length for one in sequences], tokens_per_microbatch)
    units = _units(sequences, tokens_per_microbatch)
    bins = first_fit_decreasing([unit.size for unit in units], tokens_per_microbatch)
    return [[index for unit in members for index in units[unit].members] for members in bins]


@dataclass(slots=True)
class _Unit:
    """Sequences with one prompt, which a micro-batch computes once."""

    prompt: int
    """Tokens of the prompt."""
    members: list[int] = field(default_factory=list)
    """Indices of the sequences."""
    tokens: int = 0
    """Tokens of all sequences, the prompt counted for each."""

    @property
    def size(self) -> int:
        """Tokens of the budget."""
        rows = self.tokens - self.prompt * (len(self.members) - 1)
        return max(rows, -(-self.tokens // TOKENS_A_ROW))

    def takes(self, index: int, length: int, budget: int) -> bool:
        """Whether a sequence is added: where the budget suffices, and always as the first."""
        self.members.append(index)
        self.tokens += length
        if len(self.members) == 1 or self.size <= budget:
            return True
        self.members.pop()
        self.tokens -= length
        return False


def _units(sequences: Sequence[TokenSequence], budget: int) -> list[_Unit]:
    """The sequences by prompt, in the order in which the prompts first occur; each is in the first
    unit of its prompt that has space for it, longest first.
    """
    by_prompt: dict[bytes, list[int]] = {}
    for index, sequence in enumerate(sequences):
        by_prompt.setdefault(_prompt(sequence).tobytes(), []).append(index)
    found: list[_Unit] = []
    for members in by_prompt.values():
        prompt, units = len(_prompt(sequences[members[0]])), list[_Unit]()
        for index in sorted(members, key=lambda index: -sequences[index].length):
            length = sequences[index].length
            if not any(unit.takes(index, length, budget) for unit in units):
                units.append(_Unit(prompt))
                units[-1].takes(index, length, budget)
        found += units
    return found


def answers_within(budget: int, prompt: int, answer: int) -> int:
    """Completions of one length that a micro-batch takes with their prompt, at least 1."""
    by_rows, by_tokens = (budget - prompt) // answer, TOKENS_A_ROW * budget // (prompt + answer)
    return max(1, min(by_rows, by_tokens))


def _prompt(sequence: TokenSequence) -> Integers:
    """The tokens before the first in the loss mask; all of them where none is."""
    mask = sequence.loss_mask
    return sequence.token_ids[: int(mask.argmax()) if mask.any() else len(mask)]


def _row_of(sequences: Sequence[TokenSequence]) -> torch.Tensor | None:
    """``PackedBatch.row_of`` of sequences that share the rows of equal prompts; None where no two
    are equal.
    """
    first_rows: dict[bytes, int] = {}
    rows, parts = 0, list[torch.Tensor]()
    for sequence in sequences:
        prompt = _prompt(sequence)
        if (first := first_rows.setdefault(prompt.tobytes(), rows)) != rows:
            parts.append(torch.arange(first, first + len(prompt)))
        own = sequence.length - (len(prompt) if first != rows else 0)
        parts.append(torch.arange(rows, rows + own))
        rows += own
    return None if len(first_rows) == len(sequences) else torch.cat(parts)


def lay_end_to_end(sequences: Sequence[TokenSequence], shared_prefix: bool = False) -> PackedBatch:
    """One micro-batch of the sequences in their order, with every column that ``COLUMNS`` packs;
    ``shared_prefix``: those with equal prompts share their rows.
    """
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
        row_of=_row_of(sequences) if shared_prefix else None,
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
