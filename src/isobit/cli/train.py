"""``isobit train RECIPE.toml [--resume | --dry-run] [--KEY VALUE ...]``: one training run; every key of the recipe can be overridden.

With ``--resume`` the run in the recipe's output directory goes on from its newest usable checkpoint; where there is no run yet, it is
begun, so that a script may always say it.  ``--dry-run`` prints what the run would use and take, and touches nothing.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from isobit.cli.arguments import asks_for_help, flags_first, recipe_parser
from isobit.cli.waiting import starting
from isobit.errors import ConfigError

if TYPE_CHECKING:
    from isobit.config.schema import RunConfig

FLAGS = ("--print-config", "--dry-run", "--resume")
DESCRIPTION = "Train a policy as a TOML recipe says, and leave it with all figures in the recipe's output directory."


def run(arguments: Sequence[str]) -> int:
    """Train as the recipe says.  Raises IsobitError for anything that cannot be used, before anything is written."""
    from isobit.config.load import dump_config, load_config
    from isobit.config.schema import RunConfig

    helps = asks_for_help(arguments)
    parser = recipe_parser("train", DESCRIPTION, "recipes/quickstart.toml", RunConfig if helps else None)
    parser.add_argument("--resume", action="store_true", help="go on with the run in the output directory; RECIPE may be that directory")
    parser.add_argument("--dry-run", action="store_true", help="check the run, print what it would use and take, and touch nothing")
    options = parser.parse_args(["--help"] if helps else flags_first(arguments, FLAGS))
    recipe = Path(options.recipe)
    config = _config_of_run(recipe, options.overrides) if options.resume and recipe.is_dir() else load_config(recipe, options.overrides)
    if options.print_config:
        print(dump_config(config), end="")
        return 0
    if options.dry_run:
        _print_plan(config, options.resume)
        return 0

    with starting():
        from isobit.run.loop import train

    train(config, resume=options.resume)
    return 0


def _print_plan(config: "RunConfig", resume: bool) -> None:
    with starting():
        from isobit.run.console import printable
        from isobit.run.machine import read_memory
        from isobit.run.plan import describe_plan, plan_run

    print(printable("\n".join(describe_plan(plan_run(config, resume), read_memory()))))


def _config_of_run(directory: Path, overrides: Sequence[str]) -> "RunConfig":
    """The resolved configuration of the run in a directory, for ``isobit train RUN --resume``."""
    from isobit.config.load import build
    from isobit.config.overrides import apply_overrides, parse_overrides
    from isobit.config.schema import RunConfig

    path = directory / "run.json"
    try:
        saved = json.loads(path.read_text(encoding="utf-8"))["config"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path} cannot be read ({error}); name the recipe of the run instead: isobit train RECIPE.toml --resume"
        ) from None
    return build(RunConfig, apply_overrides({**saved, "output": str(directory)}, parse_overrides(overrides)), str(path))
