"""``isobit sft RECIPE.toml [--KEY VALUE ...]``: supervised fine-tuning; every key of the recipe can be overridden."""

from collections.abc import Sequence
from pathlib import Path

from isobit.cli.arguments import asks_for_help, flags_first, recipe_parser
from isobit.cli.waiting import starting

FLAGS = ("--print-config",)
DESCRIPTION = "Fine-tune a model on prompts and completions as a TOML recipe says, in the same precision flows as `isobit train`."


def run(arguments: Sequence[str]) -> int:
    """Fine-tune as the recipe says.  Raises IsobitError for anything that cannot be used, before anything is written."""
    from isobit.config.load import dump_config, load_recipe
    from isobit.config.sft import SftConfig

    helps = asks_for_help(arguments)
    parser = recipe_parser("sft", DESCRIPTION, "recipes/fine_tune.toml", SftConfig if helps else None)
    options = parser.parse_args(["--help"] if helps else flags_first(arguments, FLAGS))
    config = load_recipe(SftConfig, Path(options.recipe), options.overrides)
    if options.print_config:
        print(dump_config(config), end="")
        return 0

    with starting():
        from isobit.run.sft.loop import sft

    sft(config)
    return 0
