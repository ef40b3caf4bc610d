"""The space that a run needs on its disk, before it begins.

    a checkpoint     4 P bytes and the moments'      FP32 masters of P parameters, and what
                                                     ``isobit.training.optimiser.moment_bytes`` says
                     and those of extras             a refreshed reference model, for example
    the model        2 P bytes                       in BF16, at the end

An old checkpoint is removed only once the new one is complete, so at the last save the disk holds
the ``keep_last`` before it, the new one, those of ``keep_every``, and the best.
"""

from collections.abc import Collection
from dataclasses import dataclass
from math import lcm, prod
from pathlib import Path

from isobit.config.recipes import Recipe
from isobit.config.tables import CheckpointConfig
from isobit.models.config import ModelConfig
from isobit.models.decoder import master_shapes
from isobit.training.optimiser import moment_bytes
from isobit.util.disk_space import free_bytes
from isobit.util.errors import StorageError
from isobit.util.terminal import gib

_BESIDE_TENSORS = 1 << 16
"""Headers, counters and manifest of a checkpoint; configuration and tokenizer of a model."""


@dataclass(frozen=True, slots=True)
class DiskPlan:
    """What a run writes, apart from its logs, with at most ``checkpoints`` on disk at once."""

    root: Path
    checkpoint_bytes: int
    checkpoints: int
    on_disk: int  # checkpoints that exist already
    model_bytes: int
    free: int

    @property
    def needed(self) -> int:
        """Bytes that the run will still write."""
        return max(self.checkpoints - self.on_disk, 0) * self.checkpoint_bytes + self.model_bytes

    def describe(self, here: bool = True) -> str:
        """A line with what the run writes, and, of the disk ``here``, with what is free."""
        room = f" of {gib(self.free)} free in {self.root}" if here else ""
        contents = f"the trained model of {gib(self.model_bytes)}"
        if self.checkpoints:
            there = f", of which {self.on_disk} are there" if self.on_disk else ""
            contents = (
                f"checkpoints of {gib(self.checkpoint_bytes)}, at most {self.checkpoints} at "
                f"once{there} and {contents}"
            )
        return f"disk: {gib(self.needed)}{room} for {contents}"

    def check(self) -> None:
        """Raise StorageError where the disk has too little space."""
        if self.needed > self.free:
            raise StorageError(
                f"{self.describe()}: too little; lower checkpoint.keep_last (0 writes no "
                "checkpoint at all), set checkpoint.every = 0 (a checkpoint at the end only), "
                "free some space, or name a directory on another disk (--output PATH)"
            )


def plan_disk(
    config: Recipe, shape: ModelConfig, on_disk: Collection[int] = (), extra_bytes: int = 0
) -> DiskPlan:
    """The plan of a run of a model of ``shape``, which has checkpoints of the steps ``on_disk``;
    each holds at most ``extra_bytes`` of tensors of extras.
    """
    root, training = config.output, config.training
    masters = [prod(sizes) for sizes in master_shapes(shape).values()]
    size = 4 * sum(masters) + moment_bytes(masters, training.moments)
    size += extra_bytes + _BESIDE_TENSORS
    model = 2 * sum(masters) + _BESIDE_TENSORS
    most = most_at_once(training.steps, config.checkpoint, config.evaluation.every, on_disk)
    return DiskPlan(root, size, most, len(on_disk), model, free_bytes(root))


def most_at_once(
    steps: int, rules: CheckpointConfig, evaluated_every: int = 0, on_disk: Collection[int] = ()
) -> int:
    """The most checkpoints on disk: at the last of ``steps``, before old ones are removed."""
    if rules.keep_last == 0:
        return len(on_disk)
    newest, last = max(on_disk, default=0), rules.keep_last + 1
    # ranges, and no list of steps: there may be 10^7
    due = _multiples(rules.every, steps)
    due = due[newest // rules.every :] if due else due
    end = [steps] if steps > newest else []
    recent = {*[*sorted(on_disk)[-last:], *due[-last:], *end][-last:]}

    def stays(step: int) -> bool:
        return step in recent or (rules.keep_every > 0 and step % rules.keep_every == 0)

    together = len(recent) + sum(stays(step) for step in {*on_disk, *end} - recent)
    if rules.keep_every and due:
        both = lcm(rules.every, rules.keep_every)
        others = range(both * (newest // both + 1), steps, both)
        together += len(others) - sum(step in others for step in recent)
    another = rules.keep_best is not None and not (
        together == len(on_disk) + len(due) + len(end)
        and all(
            stays(step) and (step in on_disk or step in due or step in end)
            for step in _multiples(evaluated_every, steps)
        )
    )
    return max(together + another, len(on_disk))


def _multiples(every: int, steps: int) -> range:
    """Every so many steps, without the last; none for 0."""
    return range(every, steps, every) if every else range(0)
