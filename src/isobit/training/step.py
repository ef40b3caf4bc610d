"""One step of reinforcement learning: graded groups in, new weights out.

    advantages      each group's rewards compared among themselves
    parts           the groups cut into ``updates_per_batch`` parts, so that the samples of one
                    prompt stay together
    old             log-probabilities of the policy that sampled: the recorded ones where engine and
                    trainer are exact, one function; elsewhere the trainer's own, taken with its
                    forward before the first update, since those recorded are another function's
    updates         ``epochs`` times over the parts, one update each; one that runs out of
                    memory is packed and done again (``isobit.training.out_of_memory``)

Only the first update of a batch is on-policy: with more than one, every later part is learnt from
with weights that have moved since it was sampled, which is what the ratio and its clip are for.
For the same reason recorded and trained log-probabilities are compared before any weight has
changed: over the first part where they are exact, over the whole batch where they are recomputed.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import fmean
from typing import Any

import torch

from isobit.algorithms.objective import Algorithm, Judged, JudgedGroup
from isobit.config.training import TrainingConfig
from isobit.errors import ConfigError
from isobit.records.sequence import TokenSequence
from isobit.records.text import Group
from isobit.training.comparison import Comparison
from isobit.training.out_of_memory import within_memory
from isobit.training.packing import first_fit_decreasing, lay_end_to_end, pack, sequences_of
from isobit.training.trainer import Trainer, UpdateMetrics


@dataclass(frozen=True, slots=True)
class StepMetrics:
    """What one step did, over all its updates."""

    updates: tuple[UpdateMetrics, ...]
    comparison: Comparison
    samples: int  # trained on
    excluded_samples: int  # without a valid reward, alone in their group, or empty
    groups: int
    level_groups: int  # all valid rewards equal: every advantage is 0

    @property
    def skipped_updates(self) -> int:
        """Updates not taken because something was not finite."""
        return sum(update.skipped is not None for update in self.updates)

    @property
    def skip_reasons(self) -> tuple[str, ...]:
        """Why, one for each skipped update."""
        return tuple(update.skipped for update in self.updates if update.skipped is not None)

    def scalars(self) -> dict[str, float]:
        """Loss, gradient norm and the like by name: means over the updates taken, maxima and minima
        where a name ends in ``_max`` or ``_min``.
        """
        rows = [update.scalars() for update in self.updates if update.skipped is None]
        names = rows[0] if rows else ()
        joined = {"_max": max, "_min": min}
        return {name: joined.get(name[-4:], fmean)([row[name] for row in rows]) for name in names}


def train_on_groups(
    trainer: Trainer, groups: Sequence[Group], algorithm: Algorithm, exact: bool
) -> StepMetrics:
    """Learn from the graded completions of one step; ``trainer.config`` says into how many updates,
    and how often.

    ``exact``: whether the recorded log-probabilities are those of the trainer's own function, as
    ``isobit.models.function.is_one_function`` says of an engine and a trainer.

    Groups that leave nothing to train on (no two valid rewards in any group of a part) make no
    update.  Raises what ``Trainer.update`` and ``within_memory`` raise, and ConfigError if there
    are fewer groups than parts.
    """
    config = trainer.config
    judged = [JudgedGroup([Judged(reward, 0) for reward in group.rewards]) for group in groups]
    advantages = [
        [None if credit is None else credit.advantages for credit in group]
        for group in algorithm.credit(judged)
    ]
    parts, comparison = _cut(groups, advantages, config), Comparison()
    if not exact:
        parts, comparison = _with_old_log_probs(trainer, parts)
    updates: list[UpdateMetrics] = []
    for _ in range(config.epochs):
        for sequences in parts:
            compare = exact and not updates
            updates.append(_update(trainer, sequences, algorithm, compare))
    if exact and updates:
        comparison = updates[0].comparison
    num_samples = sum(map(len, parts))
    return StepMetrics(
        updates=tuple(updates),
        comparison=comparison,
        samples=num_samples,
        excluded_samples=sum(len(group.completions) for group in groups) - num_samples,
        groups=len(groups),
        level_groups=sum(_is_level(group) for group in advantages),
    )


def cut_by_prompt(num_groups: int, num_parts: int) -> list[range]:
    """Indices of the groups of each part: consecutive, and the sizes differ by at most one."""
    bounds = [part * num_groups // num_parts for part in range(num_parts + 1)]
    return [range(first, last) for first, last in pairwise(bounds)]


def _cut(
    groups: Sequence[Group], advantages: Sequence[Sequence[Any]], config: TrainingConfig
) -> list[list[TokenSequence]]:
    """The sequences of each part that has any."""
    if config.updates_per_batch > len(groups):
        raise ConfigError(
            f"training.updates_per_batch is {config.updates_per_batch}, but a step has "
            f"{len(groups)} prompts; a part needs at least one: "
            "lower it, or raise training.prompts_per_step"
        )
    parts = [
        sequences_of([groups[g] for g in part], [advantages[g] for g in part])
        for part in cut_by_prompt(len(groups), config.updates_per_batch)
    ]
    return [sequences for sequences in parts if sequences]


def _update(
    trainer: Trainer, sequences: Sequence[TokenSequence], algorithm: Algorithm, compare: bool
) -> UpdateMetrics:
    """One update."""
    return within_memory(
        trainer,
        [sequence.length for sequence in sequences],
        lambda tokens: trainer.update(pack(sequences, tokens), algorithm, compare),
    )


def _with_old_log_probs(
    trainer: Trainer, parts: Sequence[Sequence[TokenSequence]]
) -> tuple[list[list[TokenSequence]], Comparison]:
    """The sequences with old log-probabilities by the trainer's forward, and how those differ from
    the recorded ones.
    """
    found: list[list[TokenSequence]] = []
    comparison = Comparison()
    for sequences in parts:
        lengths = [sequence.length for sequence in sequences]
        found.append(
            within_memory(
                trainer,
                lengths,
                lambda tokens, sequences=sequences: _forward(trainer, sequences, tokens),
            )
        )
        batch = lay_end_to_end(found[-1])
        comparison += Comparison.of(batch.recorded_log_probs, batch.old_log_probs)
    return found, comparison


def _forward(
    trainer: Trainer, sequences: Sequence[TokenSequence], tokens: int
) -> list[TokenSequence]:
    """The sequences with the trainer's log-probabilities, which do not depend on how they are
    packed.
    """
    found = list(sequences)
    for members in first_fit_decreasing([sequence.length for sequence in sequences], tokens):
        batch = lay_end_to_end([sequences[index] for index in members])
        counts = torch.bincount(batch.sequence, minlength=len(members)).tolist()
        log_probs = trainer.scorer.score(batch).log_probs.split(counts)
        for index, values in zip(members, log_probs, strict=True):
            column = sequences[index].spread(values.tolist())
            found[index] = replace(sequences[index], old_log_probs=column)
    return found


def _is_level(advantages: Sequence[Any]) -> bool:
    valid = [advantage for advantage in advantages if advantage is not None]
    return bool(valid) and not any(valid)
