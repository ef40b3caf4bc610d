"""``isobit sft RECIPE.toml``: supervised fine-tuning (``isobit.cli.training``)."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from isobit.cli.training import TrainingCommand, run_training
from isobit.config.recipes import SftConfig
from isobit.config.rules import check_sft

if TYPE_CHECKING:
    from isobit.run.resolved import ResolvedRecipe
    from isobit.run.sft import SftPlan


def _reader() -> "Callable[[ResolvedRecipe[SftConfig]], SftPlan]":
    from isobit.run.sft import read_sft

    return read_sft


def _starter() -> Callable[..., object]:
    from isobit.run.sft import sft

    return sft


_COMMAND = TrainingCommand(
    name="sft",
    description="Fine-tune a model on prompts and completions as a TOML recipe says, in the same "
    "precision flows as `isobit train`.",
    example="my.toml; `isobit recipe fine_tune > my.toml` writes one",
    recipe=SftConfig,
    check=check_sft,
    reader=_reader,
    starter=_starter,
)


def run_sft(arguments: Sequence[str]) -> int:
    """Fine-tune by the recipe. Raises as ``run_training`` does."""
    return run_training(_COMMAND, arguments)
