"""Columns of sequences from a forward without learning: log-probabilities and values, by the
policy or by a reference model.

What a forward says of a sequence does not depend on how it is packed, so sequences are packed
anew, by length, and the columns go back to where they belong.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from isobit.models.frozen import FrozenPolicy
from isobit.models.scorer import Scorer
from isobit.records.bins import first_fit_decreasing
from isobit.records.sequence import TokenSequence
from isobit.training.out_of_memory import measured_within_memory, within_memory
from isobit.training.packing import lay_end_to_end
from isobit.training.trainer import Trainer


@dataclass(frozen=True, slots=True)
class SequenceScores:
    """Of one sequence of L tokens: columns with an entry for each, 0 outside the response."""

    log_probs: tuple[float, ...]
    values: tuple[float, ...] | None
    """None for a model without a value head."""
    routings: tuple[int, ...] | None = None
    """Digests of the experts; None for a model without any."""


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
        log_probs = scores.log_probs.split(counts)
        absent = [None] * len(members)
        values = absent if scores.values is None else scores.values.split(counts)
        routings = absent if scores.routings is None else scores.routings.split(counts)
        for index, ours, theirs, chosen in zip(members, log_probs, values, routings, strict=True):
            sequence = sequences[index]
            found[index] = SequenceScores(
                sequence.spread(ours.tolist()),
                None if theirs is None else sequence.spread(theirs.tolist()),
                None if chosen is None else sequence.spread_integers(chosen.tolist()),
            )
    return [found[index] for index in range(len(sequences))]


def scores_by_policy(trainer: Trainer, sequences: Sequence[TokenSequence]) -> list[SequenceScores]:
    """By the policy as it is now.  What runs out of memory lowers the budget of the update that
    comes next.
    """
    return within_memory(
        trainer,
        [sequence.length for sequence in sequences],
        lambda tokens: score_sequences(trainer.scorer, sequences, tokens),
    )


def scores_by_frozen(
    trainer: Trainer,
    model: Callable[[], FrozenPolicy],
    sequences: Sequence[TokenSequence],
    phase: str,
) -> list[SequenceScores]:
    """By another model, beside the trainer; ``phase`` names it where the memory does not suffice.
    ``model`` is called again for each attempt, so that one which is made for it goes with it.
    """
    return measured_within_memory(
        trainer,
        [sequence.length for sequence in sequences],
        trainer.budget.at(trainer.updates),
        lambda tokens: score_sequences(Scorer(model()), sequences, tokens),
        phase,
    )
