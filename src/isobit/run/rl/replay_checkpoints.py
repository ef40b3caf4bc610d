"""The checkpoints of a run whose steps are done again (``isobit.run.rl.replay_source``).

A checkpoint counts where its files are what its manifest says, and masters and moments what the
step's line says: one whose manifest was changed with it is found by that.  One that does not count
is a difference of its step, and the one before it is used.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from isobit.errors import CheckpointError
from isobit.parallel.broadcast import told
from isobit.parallel.world import World
from isobit.store.checkpoint.format import (
    MASTERS,
    OPTIMISER,
    Checkpoint,
    folders_by_step,
    read_checkpoint,
)
from isobit.store.checkpoint.usable import Say
from isobit.store.directory import RunDirectory
from isobit.store.state_digest import checkpoint_digest
from isobit.store.step_digests import StepDigests


@dataclass(frozen=True, slots=True)
class Difference:
    """Between what was recorded of a step and what is found now."""

    step: int
    what: str
    """A sentence without its end."""


class CheckedCheckpoints:
    """The checkpoints of a run, each looked at once."""

    def __init__(
        self,
        directory: RunDirectory,
        digests: Mapping[int, StepDigests | None],
        say: Say,
        world: World,
    ) -> None:
        self._digests, self._say, self._world = digests, say, world
        self._folders = {
            step: Path(folder)
            for step, folder in told(
                world,
                lambda: [
                    [step, str(folder)]
                    for step, folder in sorted(folders_by_step(directory.checkpoints).items())
                ],
            )
        }
        self.differences: list[Difference] = []

    def before(self, step: int, earliest: int) -> Checkpoint | None:
        """The newest that is usable of those before a step; its own is looked at, too."""
        if step in self._folders:
            self._usable(step)
        for one in reversed(self._folders):
            if earliest <= one < step and (checkpoint := self._usable(one)) is not None:
                return checkpoint
        return None

    def first(self, earliest: int) -> Checkpoint | None:
        """The first that is usable, where not all begins at the start; all are looked at."""
        found = [one for one in map(self._usable, self._folders) if one is not None]
        return next((one for one in found if 0 < earliest <= one.step), None)

    def _usable(self, step: int) -> Checkpoint | None:
        """A checkpoint that is what the run wrote; None of another, which is noted and said."""
        folder = self._folders[step]
        try:
            checkpoint = read_checkpoint(folder, self._world)
        except CheckpointError as error:
            return self._refuse(step, f"checkpoint {folder.name} is damaged: {error}")
        recorded = self._digests.get(step)
        if recorded is None:
            return checkpoint
        found = told(self._world, lambda: checkpoint_digest(checkpoint))
        for name, file in (("masters", MASTERS), ("moments", OPTIMISER)):
            if found[name] != recorded.by_name()[name]:
                return self._refuse(
                    step,
                    f"checkpoint {folder.name}: {folder / file} does not hold the {name} that "
                    "digests.jsonl has of this step, though its manifest says so",
                )
        return checkpoint

    def _refuse(self, step: int, what: str) -> None:
        self.differences.append(Difference(step, what))
        self._say(f"step {step}: {what}")
