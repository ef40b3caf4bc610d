"""``isobit train RECIPE.toml [--KEY VALUE ...]``: one training run; every key of the recipe can be overridden."""

from argparse import REMAINDER, ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Sequence
from pathlib import Path


def run(arguments: Sequence[str]) -> int:
    """Train as the recipe says.  Raises IsobitError for anything that cannot be used, before anything is written."""
    if {"-h", "--help"} & set(arguments):
        arguments = ["--help"]  # also after the recipe, where every other word is an override
    options = _parser(with_keys=bool(arguments) and arguments[0] == "--help").parse_args(arguments)

    from isobit.config.load import dump_config, load_config

    config = load_config(Path(options.recipe), options.overrides)
    if options.print_config:
        print(dump_config(config), end="")
        return 0

    from isobit.run.loop import train

    train(config)
    return 0


def _parser(with_keys: bool) -> ArgumentParser:
    parser = ArgumentParser(
        prog="isobit train",
        usage="isobit train [--print-config] RECIPE.toml [--KEY VALUE ...]",
        description=(
            "Train a policy as a TOML recipe says, and leave it with all figures in the recipe's output directory.\n"
            "Relative paths are relative to the current directory."
        ),
        epilog=_describe_keys() if with_keys else None,
        formatter_class=RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--print-config", action="store_true", help="check the recipe, print it with every default, and stop")
    parser.add_argument("recipe", metavar="RECIPE.toml", help="for example recipes/quickstart.toml")
    parser.add_argument("overrides", metavar="--KEY VALUE", nargs=REMAINDER, help="changes of the recipe, for example --training.steps 5")
    return parser


def _describe_keys() -> str:
    """Every key of the schema with what it takes, its default and its description."""
    from isobit.config.keys import all_keys
    from isobit.config.schema import RunConfig

    lines = ["keys of a recipe (NAME is yours to choose):"]
    for key in all_keys(RunConfig):
        default = f", default {key.default}" if key.default else ""
        lines += [f"  --{key.path}  ({key.kind}{default})", *([f"        {key.description}"] if key.description else [])]
    return "\n".join(lines)
