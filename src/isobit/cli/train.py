"""``isobit train RECIPE.toml [--resume] [--dry-run] [--KEY VALUE ...]``: one training run; every
key of the recipe can be overridden.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from isobit.cli.training import TrainingCommand
from isobit.cli.waiting import starting

if TYPE_CHECKING:
    from isobit.config.run import RunConfig
    from isobit.parallel.world import World

DESCRIPTION = (
    "Train a policy as a TOML recipe says, and leave it with all figures in the recipe's output "
    "directory."
)


def run(arguments: Sequence[str]) -> int:
    """Train as the recipe says.  Raises IsobitError for anything that cannot be used, before
    anything is written.
    """
    from isobit.config.rules import check_run
    from isobit.config.run import RunConfig

    return TrainingCommand(
        "train", DESCRIPTION, "recipes/quickstart.toml", RunConfig, _plan, check_run, _start
    ).run(arguments)


def _plan(config: "RunConfig", resume: bool, allowed: Sequence[str]) -> list[str]:
    with starting():
        from isobit.memory.machine import read_memory
        from isobit.run.plan import plan_training
        from isobit.run.rl.setup import read_rl

    return plan_training(config, read_rl, resume, allowed).describe(read_memory())


def _start(
    config: "RunConfig", resume: bool, allowed: Sequence[str], world: "World | None"
) -> None:
    with starting():
        from isobit.parallel.world import ALONE
        from isobit.run.rl.ranks import train_by_ranks

    train_by_ranks(config, resume, world or ALONE, allowed)
