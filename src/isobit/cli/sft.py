"""``isobit sft RECIPE.toml [--resume] [--dry-run] [--KEY VALUE ...]``: supervised fine-tuning;
every key can be overridden.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from isobit.cli.training import TrainingCommand
from isobit.cli.waiting import starting

if TYPE_CHECKING:
    from isobit.config.sft import SftConfig
    from isobit.parallel.world import World

DESCRIPTION = (
    "Fine-tune a model on prompts and completions as a TOML recipe says, in the same precision "
    "flows as `isobit train`."
)


def run(arguments: Sequence[str]) -> int:
    """Fine-tune as the recipe says.  Raises IsobitError for anything that cannot be used, before
    anything is written.
    """
    from isobit.config.rules import check_sft
    from isobit.config.sft import SftConfig

    return TrainingCommand(
        "sft", DESCRIPTION, "recipes/fine_tune.toml", SftConfig, _plan, check_sft, _start
    ).run(arguments)


def _plan(config: "SftConfig", resume: bool, allowed: Sequence[str]) -> list[str]:
    with starting():
        from isobit.memory.machine import read_memory
        from isobit.run.plan import plan_training
        from isobit.run.sft.setup import read_sft

    return plan_training(config, read_sft, resume, allowed).describe(read_memory())


def _start(
    config: "SftConfig", resume: bool, allowed: Sequence[str], world: "World | None"
) -> None:
    with starting():
        from isobit.parallel.world import ALONE
        from isobit.run.sft.loop import sft

    sft(config, resume=resume, world=world or ALONE, allowed=allowed)
