"""``isobit train RECIPE.toml``: reinforcement learning (``isobit.cli.training``)."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from isobit.cli.training import TrainingCommand, run_training
from isobit.config.recipes import RunConfig
from isobit.config.rules import check_run

if TYPE_CHECKING:
    from isobit.run.resolved import ResolvedRecipe
    from isobit.run.rl_run import RlPlan


def _reader() -> "Callable[[ResolvedRecipe[RunConfig]], RlPlan]":
    from isobit.run.rl_run import read_rl

    return read_rl


def _starter() -> Callable[..., object]:
    from isobit.run.rollouter_process import train_by_ranks

    return train_by_ranks


_COMMAND = TrainingCommand(
    name="train",
    description="Train a policy as a TOML recipe says, and leave it with all figures in the output "
    "directory of the recipe.",
    example="my.toml; `isobit recipe quickstart > my.toml` writes one",
    recipe=RunConfig,
    check=check_run,
    reader=_reader,
    starter=_starter,
)


def run_train(arguments: Sequence[str]) -> int:
    """Train by the recipe. Raises as ``run_training`` does."""
    return run_training(_COMMAND, arguments)
