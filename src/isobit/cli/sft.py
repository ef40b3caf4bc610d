"""``isobit sft RECIPE.toml``: supervised fine-tuning (``isobit.cli.training``)."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from isobit.cli.start import starting
from isobit.cli.training import run_training
from isobit.config.recipes import SftConfig
from isobit.config.rules import check_sft

if TYPE_CHECKING:
    from isobit.commands.dry_run import DryRun
    from isobit.memory.device import Card
    from isobit.parallel.world import World


class _Sft:
    name = "sft"
    description = (
        "Fine-tune a model on prompts and completions as a TOML recipe says, in the same precision "
        "flows as `isobit train`."
    )
    example = "my.toml; `isobit recipe fine_tune > my.toml` writes one"
    recipe = SftConfig

    def check(self, config: SftConfig) -> None:
        check_sft(config)

    def plan(
        self, config: SftConfig, resume: bool, allowed: Sequence[str], card: "Card | None"
    ) -> "DryRun":
        with starting():
            from isobit.commands.dry_run import plan_training
            from isobit.run.sft import read_sft
        return plan_training(config, read_sft, resume, allowed, card)

    def start(
        self, config: SftConfig, resume: bool, world: "World", allowed: Sequence[str]
    ) -> None:
        with starting():
            from isobit.run.sft import sft
        sft(config, resume=resume, world=world, allowed=allowed)


def run_sft(arguments: Sequence[str]) -> int:
    """Fine-tune by the recipe. Raises as ``run_training`` does."""
    return run_training(_Sft(), arguments)
