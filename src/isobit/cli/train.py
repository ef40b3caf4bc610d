"""``isobit train RECIPE.toml`` and ``isobit sft RECIPE.toml``: one training run.

``--resume`` continues the run in the output directory from its newest usable checkpoint, or starts
it if there is none, so that a script may always pass the flag. ``--dry-run`` prints what the run
would use and take, on this machine or on the GPUs that ``--gpu`` and ``--gpus`` name, and changes
nothing. ``--KEY VALUE`` overrides any key of the recipe.
"""

import json
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from isobit.cli.arguments import (
    ALLOW,
    add_allow_change,
    add_gpu,
    allowed_names,
    asks_for_help,
    flags_first,
    path_value,
    recipe_parser,
)
from isobit.cli.main import requests_wait, starting
from isobit.parallel.black_box import end_with_launcher
from isobit.parallel.launched import is_launched
from isobit.util.errors import ConfigError
from isobit.util.plain_files import read_plain

if TYPE_CHECKING:
    from isobit.config.recipes import Recipe
    from isobit.memory.device import Card
    from isobit.parallel.world import World

RESUME = "--resume"
FLAGS = ("--print-config", "--dry-run", "--verbose", RESUME)
VALUED = (ALLOW, "--gpu", "--gpus")
_HELP = {
    "train": (
        "Train a policy as a TOML recipe says, and leave it with all figures in the output "
        "directory of the recipe.",
        "my.toml; `isobit recipe quickstart > my.toml` writes one",
    ),
    "sft": (
        "Fine-tune a model on prompts and completions as a TOML recipe says, in the same precision "
        "flows as `isobit train`.",
        "my.toml; `isobit recipe fine_tune > my.toml` writes one",
    ),
}
"""Description and example of each command."""


def run_train(arguments: Sequence[str]) -> int:
    """Train by the recipe. Raises IsobitError for unusable input before anything is written; one of
    several ranks ends with it (``as_rank``).
    """
    return _run("train", arguments)


def run_sft(arguments: Sequence[str]) -> int:
    """Fine-tune by the recipe. Raises as ``run_train`` does."""
    return _run("sft", arguments)


def _run(command: str, arguments: Sequence[str]) -> int:
    with requests_wait():
        box = end_with_launcher()
        if not is_launched():
            return _obey(command, arguments, may_launch=box is None)
        with starting():
            from isobit.launch.own_rank import as_rank
        with as_rank(box) as world:
            return _obey(command, arguments, world)


def _obey(
    command: str, arguments: Sequence[str], world: "World | None" = None, may_launch: bool = False
) -> int:
    from isobit.config.load import dump_config, load_recipe
    from isobit.config.recipes import RECIPES

    helps, schema = asks_for_help(arguments), RECIPES[command]
    parser = recipe_parser(command, *_HELP[command], schema if helps else None)
    parser.add_argument(
        RESUME,
        action="store_true",
        help="go on with the run in the output directory; RECIPE may be that",
    )
    add_allow_change(
        parser,
        "with --resume: a key or an input that may be other than in the run that goes on, "
        "which is recorded; a refused resume names them",
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="check the run, print what it would use and take, and touch nothing",
    )
    add_gpu(parser, "with --dry-run: plan for such a GPU, which need not be here: ")
    parser.add_argument(
        "--verbose",
        action="store_true",
        help="with --dry-run: also print the formats of all operations and the resolved recipe",
    )
    options = parser.parse_args(["--help"] if helps else flags_first(arguments, FLAGS, VALUED))
    allowed = allowed_names(options)
    if allowed and not options.resume:
        raise ConfigError(f"{ALLOW} is for {RESUME}: a new run has nothing to differ from")
    card = _card(options)
    if card is not None:  # the run would be on that machine, whatever the recipe says of this one
        options.overrides += ["--device", "cuda"]
        if options.gpus is not None:
            options.overrides += ["--cluster.processes", str(options.gpus)]
    recipe = path_value(options.recipe)
    if options.resume and recipe.is_dir():
        config = _config_of_run(command, recipe, options.overrides)
    else:
        config = load_recipe(schema, recipe, options.overrides)
    if options.print_config:
        print(dump_config(config), end="")
    elif options.dry_run:
        lines = _plan(config, options, allowed, card)
        from isobit.observe.console import printable

        print(printable("\n".join(lines)))
    elif may_launch and config.cluster.is_launched:
        _launch(command, config, arguments)
    else:
        _start(config, options.resume, allowed, world)
    return 0


def _config_of_run(command: str, directory: Path, overrides: Sequence[str]) -> "Recipe":
    from isobit.config.load import build_with
    from isobit.config.recipes import RECIPES

    path = directory / "run.json"
    try:
        saved = json.loads(read_plain(path))["config"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path} cannot be read ({error}); name the recipe of the run instead: isobit "
            f"{command} RECIPE.toml --resume"
        ) from None
    if saved.get("data", {}).get("epochs") is not None:
        saved["training"].pop("steps", None)  # follows from it
    values = {**saved, "output": str(directory)}
    return build_with(RECIPES[command], values, overrides, str(path))


def _card(options: Namespace) -> "Card | None":
    """The GPU to plan for, if one is named. Raises ConfigError where there is nothing to plan."""
    if options.gpu is None:
        if options.gpus is not None:
            raise ConfigError(
                "--gpus says how many, and not of which kind: add --gpu h100 or --gpu h200"
            )
        return None
    if not options.dry_run:
        raise ConfigError(
            "--gpu is for --dry-run, which plans a run on that GPU; a run takes the GPUs that are "
            "here (device, cluster.processes)"
        )
    if options.resume:
        raise ConfigError("--gpu plans a new run, and --resume goes on with one: leave one out")
    with starting():
        from isobit.memory.device import read_card
    return read_card(options.gpu)


def _plan(
    config: "Recipe", options: Namespace, allowed: Sequence[str], card: "Card | None"
) -> list[str]:
    from isobit.config.recipes import SftConfig

    resume = options.resume
    with starting():
        from isobit.commands.dry_run import plan_training
        from isobit.util.machine import read_memory
    if isinstance(config, SftConfig):
        with starting():
            from isobit.run.sft import read_sft
        plan = plan_training(config, read_sft, resume, allowed, card)
    else:
        with starting():
            from isobit.run.rl_run import read_rl
        plan = plan_training(config, read_rl, resume, allowed, card)
    return plan.describe(read_memory(), options.verbose)


def _launch(command: str, config: "Recipe", arguments: Sequence[str]) -> None:
    """Check the recipe, and run the same command line in several processes."""
    from isobit.config.recipes import SftConfig
    from isobit.config.rules import check_run, check_sft
    from isobit.launch.local import launch, with_restarts

    if isinstance(config, SftConfig):
        check_sft(config)
    else:
        check_run(config)
    cluster = config.cluster

    def start(words: Sequence[str], again: bool) -> None:
        if cluster.launcher == "ray":
            from isobit.launch.ray_launcher import launch_on_ray

            fewest = 1 if again else cluster.processes
            launch_on_ray(words, cluster.processes, config.threads, config.device, fewest)
        else:
            launch(words, cluster.processes, config.threads)

    with_restarts(start, ["-m", "isobit.cli.main", command, *arguments], cluster.restarts)


def _start(config: "Recipe", resume: bool, allowed: Sequence[str], world: "World | None") -> None:
    """Run the training; settings and inputs in ``allowed`` may differ from the resumed run's."""
    from isobit.config.recipes import SftConfig

    with starting():
        from isobit.parallel.world import ALONE
    if isinstance(config, SftConfig):
        with starting():
            from isobit.run.sft import sft
        sft(config, resume=resume, world=world or ALONE, allowed=allowed)
    else:
        with starting():
            from isobit.run.rollouter_process import train_by_ranks
        train_by_ranks(config, resume, world or ALONE, allowed)
