"""``isobit train RECIPE.toml`` and ``isobit sft RECIPE.toml``: one training run.

``--resume`` continues the run in the output directory from its newest usable checkpoint, or starts
it if there is none, so that a script may always pass the flag. ``--dry-run`` prints what the run
would use and take, and changes nothing. ``--KEY VALUE`` overrides any key of the recipe.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypeVar

from isobit.cli.arguments import (
    ALLOW,
    add_allow_change,
    allowed_names,
    asks_for_help,
    flags_first,
    recipe_parser,
)
from isobit.cli.main import requests_wait, starting
from isobit.parallel.launched import end_with_launcher, is_launched
from isobit.util.errors import ConfigError

if TYPE_CHECKING:
    from isobit.config.recipes import RunConfig, SftConfig
    from isobit.parallel.world import World


RESUME = "--resume"
FLAGS = ("--print-config", "--dry-run", RESUME)
Config = TypeVar("Config", "RunConfig", "SftConfig")


@dataclass(frozen=True, slots=True)
class TrainingCommand(Generic[Config]):
    """One of the two commands. Torch is imported only when it is needed."""

    name: str
    description: str
    example: str
    schema: type[Config]
    plan: Callable[[Config, bool, Sequence[str]], Sequence[str]]
    """The lines of ``--dry-run``."""
    check: Callable[[Config], None]
    """Check the recipe before any process is started."""
    start: Callable[[Config, bool, Sequence[str], "World | None"], None]
    """Start the run, in one process without a world. The flag, as in ``plan``, says whether it is
    resumed; the names are settings and inputs that may differ from the resumed run's.
    """

    def run(self, arguments: Sequence[str]) -> int:
        """Run the command line. Raises IsobitError for unusable input before anything is written;
        one of several ranks ends with it (``as_rank``).
        """
        with requests_wait():
            box = end_with_launcher()
            if not is_launched():
                return self._obey(arguments, may_launch=box is None)
            with starting():
                from isobit.run.launch_ranks import as_rank
            with as_rank(box) as world:
                return self._obey(arguments, world)

    def _obey(
        self, arguments: Sequence[str], world: "World | None" = None, may_launch: bool = False
    ) -> int:
        from isobit.config.load import dump_config, load_recipe

        helps = asks_for_help(arguments)
        parser = recipe_parser(
            self.name, self.description, self.example, self.schema if helps else None
        )
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
        options = parser.parse_args(["--help"] if helps else flags_first(arguments, FLAGS, ALLOW))
        allowed = allowed_names(options)
        if allowed and not options.resume:
            raise ConfigError(f"{ALLOW} is for {RESUME}: a new run has nothing to differ from")
        recipe = Path(options.recipe)
        if options.resume and recipe.is_dir():
            config = self._config_of_run(recipe, options.overrides)
        else:
            config = load_recipe(self.schema, recipe, options.overrides)
        if options.print_config:
            print(dump_config(config), end="")
        elif options.dry_run:
            lines = self.plan(config, options.resume, allowed)
            from isobit.observe.console import printable

            print(printable("\n".join(lines)))
        elif may_launch and config.cluster.is_launched:
            self._launch(config, arguments)
        else:
            self.start(config, options.resume, allowed, world)
        return 0

    def _launch(self, config: Config, arguments: Sequence[str]) -> None:
        """Run the same command line in several processes."""
        from isobit.run.launch import with_restarts

        self.check(config)
        cluster = config.cluster
        words = ["-m", "isobit.cli.main", self.name, *arguments]

        def start(words: Sequence[str], again: bool) -> None:
            if cluster.launcher == "ray":
                from isobit.run.ray_launcher import launch_on_ray

                fewest = 1 if again else cluster.processes
                launch_on_ray(words, cluster.processes, config.threads, config.device, fewest)
            else:
                from isobit.run.launch import launch

                launch(words, cluster.processes, config.threads)

        with_restarts(start, words, cluster.restarts)

    def _config_of_run(self, directory: Path, overrides: Sequence[str]) -> Config:
        """The configuration in a run's directory, for ``isobit train RUN --resume``."""
        from isobit.config.load import apply_overrides, build, parse_overrides

        path = directory / "run.json"
        try:
            saved = json.loads(path.read_text(encoding="utf-8"))["config"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"{path} cannot be read ({error}); name the recipe of the run instead: isobit "
                f"{self.name} RECIPE.toml --resume"
            ) from None
        return build(
            self.schema,
            apply_overrides({**saved, "output": str(directory)}, parse_overrides(overrides)),
            str(path),
        )


def run_sft(arguments: Sequence[str]) -> int:
    """Fine-tune by the recipe. Raises IsobitError for unusable input before anything is written."""
    from isobit.config.recipes import SftConfig
    from isobit.config.rules import check_sft

    return TrainingCommand(
        "sft",
        "Fine-tune a model on prompts and completions as a TOML recipe says, in the same precision "
        "flows as `isobit train`.",
        "recipes/fine_tune.toml",
        SftConfig,
        _plan_sft,
        check_sft,
        _start_sft,
    ).run(arguments)


def _plan_sft(config: "SftConfig", resume: bool, allowed: Sequence[str]) -> list[str]:
    with starting():
        from isobit.run.plan import plan_training
        from isobit.run.sft import read_sft
        from isobit.util.machine import read_memory

    return plan_training(config, read_sft, resume, allowed).describe(read_memory())


def _start_sft(
    config: "SftConfig", resume: bool, allowed: Sequence[str], world: "World | None"
) -> None:
    with starting():
        from isobit.parallel.world import ALONE
        from isobit.run.sft import sft

    sft(config, resume=resume, world=world or ALONE, allowed=allowed)


def run_train(arguments: Sequence[str]) -> int:
    """Train by the recipe. Raises IsobitError for unusable input before anything is written."""
    from isobit.config.recipes import RunConfig
    from isobit.config.rules import check_run

    return TrainingCommand(
        "train",
        "Train a policy as a TOML recipe says, and leave it with all figures in the output "
        "directory of the recipe.",
        "recipes/quickstart.toml",
        RunConfig,
        _plan,
        check_run,
        _start,
    ).run(arguments)


def _plan(config: "RunConfig", resume: bool, allowed: Sequence[str]) -> list[str]:
    with starting():
        from isobit.run.plan import plan_training
        from isobit.run.setup import read_rl
        from isobit.util.machine import read_memory

    return plan_training(config, read_rl, resume, allowed).describe(read_memory())


def _start(
    config: "RunConfig", resume: bool, allowed: Sequence[str], world: "World | None"
) -> None:
    with starting():
        from isobit.parallel.world import ALONE
        from isobit.run.loop import train_by_ranks

    train_by_ranks(config, resume, world or ALONE, allowed)
