"""One step of reinforcement learning: graded groups in, new weights out.

    advantages      each group's rewards compared among themselves
    parts           the groups cut into ``updates_per_batch`` parts, so that the samples of one
                    prompt stay together
    old             log-probabilities of the policy that sampled: the recorded ones where the flow
                    is exact; elsewhere the trainer's own, taken with its forward before the first
                    update, since those recorded belong to another function
    updates         ``epochs`` times over the parts, one optimiser step each; one that runs out of
                    memory is packed and done again (``isobit.training.out_of_memory``)

Only the first update of a batch is on-policy: with more than one, every later part is learnt from
with weights that have moved since it was sampled, which is what the ratio and its clip are for.
For the same reason recorded and trained log-probabilities are compared before any weight has
changed: over the first part in an exact flow, over the whole batch where they are recomputed.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import fmean

import torch

from isobit.algorithms.objective import Algorithm
from isobit.config.schema import TrainingConfig
from isobit.errors import ConfigError
from isobit.records import Group
from isobit.training.comparison import Comparison
from isobit.training.out_of_memory import within_memory
from isobit.training.packing import (
    TrainingSample,
    first_fit_decreasing,
    lay_end_to_end,
    pack,
    samples_of,
)
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
        """Loss, gradient norm and the like by name: means over the updates taken, maxima where a
        name ends in ``_max``.
        """
        rows = [update.scalars() for update in self.updates if update.skipped is None]
        names = rows[0] if rows else ()
        return {
            name: (max if name.endswith("_max") else fmean)([row[name] for row in rows])
            for name in names
        }


def train_on_groups(trainer: Trainer, groups: Sequence[Group], algorithm: Algorithm) -> StepMetrics:
    """Learn from the graded completions of one step; ``trainer.config`` says into how many updates,
    and how often.

    Groups that leave nothing to train on (no two valid rewards in any group of a part) make no
    update.  Raises what ``Trainer.update`` and ``within_memory`` raise, and ConfigError if there
    are fewer groups than parts.
    """
    config, exact = trainer.config, trainer.policy.flow.exact
    advantages = [algorithm.advantages(group.rewards) for group in groups]
    parts = _cut(groups, advantages, config)
    olds, comparison = (parts, Comparison()) if exact else _recompute(trainer, parts)
    updates: list[UpdateMetrics] = []
    for _ in range(config.epochs):
        for samples, old in zip(parts, olds, strict=True):
            updates.append(_update(trainer, samples, old, algorithm, compare=exact and not updates))
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
    groups: Sequence[Group], advantages: Sequence[Sequence[float | None]], config: TrainingConfig
) -> list[list[TrainingSample]]:
    """The samples of each part that has any."""
    if config.updates_per_batch > len(groups):
        raise ConfigError(
            f"training.updates_per_batch is {config.updates_per_batch}, but a step has "
            f"{len(groups)} prompts; a part needs at least one: "
            "lower it, or raise training.prompts_per_step"
        )
    parts = [
        samples_of([groups[g] for g in part], [advantages[g] for g in part])
        for part in cut_by_prompt(len(groups), config.updates_per_batch)
    ]
    return [samples for samples in parts if samples]


def _update(
    trainer: Trainer,
    samples: Sequence[TrainingSample],
    old: Sequence[TrainingSample],
    algorithm: Algorithm,
    compare: bool,
) -> UpdateMetrics:
    """One optimiser step; ``old`` are the samples with the log-probabilities that the ratio is
    taken to.
    """

    def attempt(tokens: int) -> UpdateMetrics:
        batches = pack(samples, tokens)
        old_batches = batches if old is samples else pack(old, tokens)
        return trainer.update(
            batches, algorithm, [batch.recorded_log_probs for batch in old_batches], compare
        )

    return within_memory(trainer, [sample.length for sample in samples], attempt)


def _recompute(
    trainer: Trainer, parts: Sequence[Sequence[TrainingSample]]
) -> tuple[list[list[TrainingSample]], Comparison]:
    """The samples with log-probabilities by the trainer's forward, and how those differ from the
    recorded ones.
    """
    recomputed: list[list[TrainingSample]] = []
    comparison = Comparison()
    for samples in parts:
        lengths = [sample.length for sample in samples]
        recomputed.append(
            within_memory(
                trainer, lengths, lambda tokens, samples=samples: _forward(trainer, samples, tokens)
            )
        )
        comparison += Comparison.of(_log_probs_of(samples), _log_probs_of(recomputed[-1]))
    return recomputed, comparison


def _forward(
    trainer: Trainer, samples: Sequence[TrainingSample], tokens: int
) -> list[TrainingSample]:
    """The samples with the trainer's log-probabilities, which do not depend on how they are
    packed.
    """
    found = list(samples)
    for members in first_fit_decreasing([sample.length for sample in samples], tokens):
        log_probs = trainer.scorer.score(
            lay_end_to_end([samples[index] for index in members])
        ).log_probs
        counts = [len(samples[index].completion_ids) for index in members]
        for index, values in zip(members, log_probs.split(counts), strict=True):
            found[index] = replace(samples[index], log_probs=tuple(values.tolist()))
    return found


def _log_probs_of(samples: Sequence[TrainingSample]) -> torch.Tensor:
    return torch.tensor(
        [value for sample in samples for value in sample.log_probs], dtype=torch.float32
    )


def _is_level(advantages: Sequence[float | None]) -> bool:
    valid = [advantage for advantage in advantages if advantage is not None]
    return bool(valid) and not any(valid)
