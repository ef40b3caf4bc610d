"""Where steps of a run are done again: at one of its checkpoints or at its beginning, in a
directory of their own.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from typing import Any

from isobit.config.recipe import Recipe
from isobit.parallel.broadcast import told
from isobit.parallel.world import ALONE, World
from isobit.store.budget_record import read_changes
from isobit.store.checkpoint.compatible import REPLAYING
from isobit.store.checkpoint.format import Checkpoint
from isobit.store.checkpoint.start import Start, position_at
from isobit.store.checkpoint.usable import Say
from isobit.store.directory import RunDirectory
from isobit.store.reward_record import RewardRecord
from isobit.store.room import Room
from isobit.training.budget import BudgetChange


@contextmanager
def begin_again(
    config: Recipe,
    source: RunDirectory,
    manifest: Mapping[str, Any],
    checkpoint: Checkpoint | None,
    rewards: RewardRecord,
    say: Say,
    world: World = ALONE,
    allowed: Sequence[str] = (),
    check: Callable[[], None] = lambda: None,
) -> Iterator[Start]:
    """Where steps of the run in ``source``, whose ``run.json`` holds ``manifest``, are done again:
    at a checkpoint of its, or at the beginning, and in the empty directory ``config.output``, into
    which alone is written.  Rewards come from ``rewards``, changes of the budget from the run.
    ``check`` is as in ``isobit.store.checkpoint.start.begin``.

    ``Start.restore`` raises ConfigError for inputs or a class of bits that are others than the
    run's and not ``allowed``.
    """
    directory, hosts = RunDirectory(config.output), world.messages(world.host)
    found = told(
        world,
        lambda: [
            asdict(change)
            for change in read_changes(source.budget, position_at(checkpoint, source.budget))
        ],
    )
    changes = [BudgetChange(**change) for change in found]
    room = Room(world, directory.root, config.checkpoint.wait_for_space_s, say, check)
    with ExitStack() as lock:
        yield Start(
            directory,
            rewards,
            world,
            hosts,
            room,
            lock,
            say,
            manifest,
            checkpoint,
            budget_changes=changes,
            allowed=allowed,
            doing=REPLAYING,
        )
