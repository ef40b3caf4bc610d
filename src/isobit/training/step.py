"""One step of reinforcement learning: graded groups in, new weights out.

    advantages      each group's rewards compared among themselves
    parts           the groups cut into ``updates_per_batch`` parts, so that the samples of one prompt stay together
    old             log-probabilities of the policy that sampled: the recorded ones where the flow is exact; elsewhere the trainer's
                    own, taken with its forward before the first update, since those recorded belong to another function
    updates         ``epochs`` times over the parts, one optimiser step each

Only the first update of a batch is on-policy: with more than one, every later part is learnt from with weights that have moved
since it was sampled, which is what the ratio and its clip are for.  For the same reason recorded and trained log-probabilities are
compared before any weight has changed: over the first part in an exact flow, over the whole batch where they are recomputed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean

import torch

from isobit.algorithms.objective import Algorithm
from isobit.config.schema import TrainingConfig
from isobit.errors import ConfigError
from isobit.records import Group, PackedBatch
from isobit.training.comparison import Comparison
from isobit.training.packing import pack, samples_of
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
        """Loss, gradient norm and the like by name: means over the updates taken, maxima where a name ends in ``_max``."""
        rows = [update.scalars() for update in self.updates if update.skipped is None]
        names = rows[0] if rows else ()
        return {name: (max if name.endswith("_max") else fmean)([row[name] for row in rows]) for name in names}


def train_on_groups(trainer: Trainer, groups: Sequence[Group], algorithm: Algorithm) -> StepMetrics:
    """Learn from the graded completions of one step; ``trainer.config`` says into how many updates, and how often.

    Groups that leave nothing to train on (no two valid rewards in any group of a part) make no update.  Raises what
    ``Trainer.update`` raises, and ConfigError if there are fewer groups than parts.
    """
    config = trainer.config
    advantages = [algorithm.advantages(group.rewards) for group in groups]
    parts = _pack_parts(groups, advantages, config)
    old_log_probs, comparison = _old_log_probs(trainer, parts)
    updates: list[UpdateMetrics] = []
    for _ in range(config.epochs):
        for batches, old in zip(parts, old_log_probs, strict=True):
            compare = trainer.policy.flow.exact and not updates
            updates.append(trainer.update(batches, algorithm, old, compare))
    if trainer.policy.flow.exact and updates:
        comparison = updates[0].comparison
    samples = sum(len(batch.lengths) for batches in parts for batch in batches)
    return StepMetrics(
        updates=tuple(updates),
        comparison=comparison,
        samples=samples,
        excluded_samples=sum(len(group.completions) for group in groups) - samples,
        groups=len(groups),
        level_groups=sum(_is_level(group) for group in advantages),
    )


def cut_by_prompt(num_groups: int, num_parts: int) -> list[range]:
    """Indices of the groups of each part: consecutive, and the sizes differ by at most one."""
    bounds = [part * num_groups // num_parts for part in range(num_parts + 1)]
    return [range(first, last) for first, last in pairwise(bounds)]


def _pack_parts(groups: Sequence[Group], advantages: Sequence[Sequence[float | None]], config: TrainingConfig) -> list[list[PackedBatch]]:
    """The micro-batches of each part that has any."""
    if config.updates_per_batch > len(groups):
        raise ConfigError(
            f"training.updates_per_batch is {config.updates_per_batch}, but a step has {len(groups)} prompts; a part needs at least one: "
            "lower it, or raise training.prompts_per_step"
        )
    parts = [
        pack(samples_of([groups[g] for g in part], [advantages[g] for g in part]), config.tokens_per_microbatch)
        for part in cut_by_prompt(len(groups), config.updates_per_batch)
    ]
    return [batches for batches in parts if batches]


def _old_log_probs(trainer: Trainer, parts: Sequence[Sequence[PackedBatch]]) -> tuple[list[list[torch.Tensor]], Comparison]:
    """Log-probabilities of the sampling policy for each part, and, where they had to be recomputed, how they differ from those recorded."""
    if trainer.policy.flow.exact:
        return [[batch.recorded_logprobs for batch in batches] for batches in parts], Comparison()
    recomputed = [[trainer.log_probs(batch) for batch in batches] for batches in parts]
    comparison = Comparison()
    for batches, tensors in zip(parts, recomputed, strict=True):
        for batch, log_probs in zip(batches, tensors, strict=True):
            comparison += Comparison.of(batch.recorded_logprobs, log_probs)
    return recomputed, comparison


def _is_level(advantages: Sequence[float | None]) -> bool:
    valid = [advantage for advantage in advantages if advantage is not None]
    return bool(valid) and not any(valid)
