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
from isobit.parallel.agreement import shared_out
from isobit.parallel.world import ALONE, World
from isobit.records.bins import first_fit_decreasing
from isobit.records.sequence import Digests, Numbers, TokenSequence
from isobit.training.out_of_memory import measured_within_memory, within_memory
from isobit.training.packing import lay_end_to_end
from isobit.training.trainer import Trainer


@dataclass(frozen=True, slots=True)
class SequenceScores:
    """Of one sequence of L tokens: columns with an entry for each, 0 outside the response."""

    log_probs: Numbers
    values: Numbers | None
    """None for a model without a value head."""
    routings: Digests | None = None
    """Digests of the experts; None for a model without any."""


def score_sequences(
    scorer: Scorer,
    sequences: Sequence[TokenSequence],
    tokens_per_microbatch: int,
    world: World = ALONE,
) -> list[SequenceScores]:
    """The scores of sequences, none of them empty, in their order; each micro-batch by one rank."""
    lengths = [sequence.length for sequence in sequences]
    bins = first_fit_decreasing(lengths, tokens_per_microbatch)

    def columns(members: Sequence[int]) -> list[Sequence[torch.Tensor] | None]:
        batch = lay_end_to_end([sequences[index] for index in members])
        counts = torch.bincount(batch.sequence, minlength=len(members)).tolist()
        scores = scorer.score(batch)
        found = (scores.log_probs, scores.values, scores.routings)
        return [None if column is None else column.split(counts) for column in found]

    made: dict[int, SequenceScores] = {}
    for members, found in zip(bins, shared_out(world, bins, columns), strict=True):
        for place, index in enumerate(members):
            log_probs, values, routings = (of and of[place].numpy() for of in found)
            sequence = sequences[index]
            made[index] = SequenceScores(
                sequence.spread(log_probs),
                None if values is None else sequence.spread(values),
                None if routings is None else sequence.spread_digests(routings),
            )
    return [made[index] for index in range(len(sequences))]


def scores_by_policy(trainer: Trainer, sequences: Sequence[TokenSequence]) -> list[SequenceScores]:
    """By the policy as it is now.  What runs out of memory lowers the budget of the update that
    comes next.
    """
    return within_memory(
        trainer,
        [sequence.length for sequence in sequences],
        lambda tokens: score_sequences(trainer.scorer, sequences, tokens, trainer.policy.world),
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
        lambda tokens: score_sequences(Scorer(model()), sequences, tokens, trainer.policy.world),
        phase,
    )
