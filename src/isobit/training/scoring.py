"""Columns of sequences from a forward without learning: log-probabilities and values, by the
policy or by a reference model.

What a forward says of a sequence does not depend on how it is packed, so sequences are packed
anew, by length, and the columns go back to where they belong.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from isobit.models.scorer import Scorer
from isobit.records.bins import first_fit_decreasing
from isobit.records.scores import TokenScores
from isobit.records.sequence import TokenSequence
from isobit.training.packing import lay_end_to_end


@dataclass(frozen=True, slots=True)
class SequenceScores:
    """Of one sequence of L tokens: columns with an entry for each, 0 outside the response."""

    log_probs: tuple[float, ...]
    values: tuple[float, ...] | None
    """None for a model without a value head."""


def score_sequences(
    scorer: Scorer, sequences: Sequence[TokenSequence], tokens_per_microbatch: int
) -> list[SequenceScores]:
    """The scores of sequences, none of them empty, in their order."""
    found: dict[int, SequenceScores] = {}
    lengths = [sequence.length for sequence in sequences]
    for members in first_fit_decreasing(lengths, tokens_per_microbatch):
        batch = lay_end_to_end([sequences[index] for index in members])
        counts = torch.bincount(batch.sequence, minlength=len(members)).tolist()
        scores = scorer.score(batch)
        for place, index in enumerate(members):
            found[index] = _of_sequence(sequences[index], scores, counts, place)
    return [found[index] for index in range(len(sequences))]


def _of_sequence(
    sequence: TokenSequence, scores: TokenScores, counts: Sequence[int], place: int
) -> SequenceScores:
    rows = slice(sum(counts[:place]), sum(counts[: place + 1]))
    values = None if scores.values is None else sequence.spread(scores.values[rows].tolist())
    return SequenceScores(sequence.spread(scores.log_probs[rows].tolist()), values)
