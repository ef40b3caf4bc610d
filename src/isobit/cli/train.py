"""``isobit train RECIPE.toml``: reinforcement learning (``isobit.cli.training``)."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from isobit.cli.start import starting
from isobit.cli.training import run_training
from isobit.config.recipes import RunConfig
from isobit.config.rules import check_run

if TYPE_CHECKING:
    from isobit.commands.dry_run import DryRun
    from isobit.memory.device import Card
    from isobit.parallel.world import World


class _Train:
    name = "train"
    description = (
        "Train a policy as a TOML recipe says, and leave it with all figures in the output "
        "directory of the recipe."
    )
    example = "my.toml; `isobit recipe quickstart > my.toml` writes one"
    recipe = RunConfig

    def check(self, config: RunConfig) -> None:
        check_run(config)

    def plan(
        self, config: RunConfig, resume: bool, allowed: Sequence[str], card: "Card | None"
    ) -> "DryRun":
        with starting():
            from isobit.commands.dry_run import plan_training
            from isobit.run.rl_run import read_rl
        return plan_training(config, read_rl, resume, allowed, card)

    def start(
        self, config: RunConfig, resume: bool, world: "World", allowed: Sequence[str]
    ) -> None:
        with starting():
            from isobit.run.rollouter_process import train_by_ranks
        train_by_ranks(config, resume, world, allowed)


def run_train(arguments: Sequence[str]) -> int:
    """Train by the recipe. Raises as ``run_training`` does."""
    return run_training(_Train(), arguments)
