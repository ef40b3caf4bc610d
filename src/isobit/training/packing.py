"""Micro-batches of whole sequences laid end to end, without padding and within a budget of tokens.

    sequence    given tokens | answer | given tokens | answer     L tokens, positions 0 .. L-1
    row i       predicts token i + 1: the rows that are learnt from stand before the tokens in the
                loss mask, of which there may be several spans

Which sequences go together is said by ``isobit.records.bins``.
"""

from collections.abc import Iterable, Sequence

import numpy as np
import torch

from isobit.records.batch import PackedBatch
from isobit.records.bins import first_fit_decreasing
from isobit.records.sequence import Numbers, TokenSequence
from isobit.records.text import Group


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
