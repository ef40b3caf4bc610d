"""``isobit train RECIPE.toml`` and ``isobit sft RECIPE.toml``: one training run, of reinforcement
learning or of supervised fine-tuning.  Both take ``[--resume] [--dry-run] [--KEY VALUE ...]``;
every key of the recipe can be overridden.

With ``--resume`` the run in the recipe's output directory goes on from its newest usable
checkpoint; where there is no run yet, it is begun, so that a script may always pass the flag.
``--dry-run`` prints what the run would use and take, and touches nothing.
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
    """One of the two commands.  Torch and whatever needs it are imported when they are needed."""

    name: str
    description: str
    example: str
    """A recipe."""
    schema: type[Config]
    plan: Callable[[Config, bool, Sequence[str]], Sequence[str]]
    """The lines of ``--dry-run``."""
    check: Callable[[Config], None]
    """Every rule of the recipe, before any process is started."""
    start: Callable[[Config, bool, Sequence[str], "World | None"], None]
    """The run itself, in one process where there is no world.  The flag, as that of ``plan``, says
    whether the run is resumed; the names are settings and inputs that may differ from the run's.
    """

    def run(self, arguments: Sequence[str]) -> int:
        """Do what the command line says.  Raises IsobitError for anything that cannot be used,
        before anything is written; one of several ranks ends with it (``as_rank``).
        """
        with requests_wait():
            return self._run(arguments)

    def _run(self, arguments: Sequence[str]) -> int:
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
        """The same for one of several, or for the process that may start them."""
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
        of_run = options.resume and recipe.is_dir()
        config = (
            self._config_of_run(recipe, options.overrides)
            if of_run
            else load_recipe(self.schema, recipe, options.overrides)
        )
        if options.print_config:
            print(dump_config(config), end="")
        elif options.dry_run:
            self._print_plan(config, options.resume, allowed)
        elif may_launch and config.cluster.is_launched:
            self._launch(config, arguments)
        else:
            self.start(config, options.resume, allowed, world)
        return 0

    def _launch(self, config: Config, arguments: Sequence[str]) -> None:
        """The same command line in several processes."""
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

    def _print_plan(self, config: Config, resume: bool, allowed: Sequence[str]) -> None:
        lines = self.plan(config, resume, allowed)
        from isobit.observe.console import printable

        print(printable("\n".join(lines)))

    def _config_of_run(self, directory: Path, overrides: Sequence[str]) -> Config:
        """The resolved configuration of the run in a directory, for ``isobit train RUN
        --resume``.
        """
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


SFT_DESCRIPTION = (
    "Fine-tune a model on prompts and completions as a TOML recipe says, in the same precision "
    "flows as `isobit train`."
)


def run_sft(arguments: Sequence[str]) -> int:
    """Fine-tune as the recipe says.  Raises IsobitError for anything that cannot be used, before
    anything is written.
    """
    from isobit.config.recipes import SftConfig
    from isobit.config.rules import check_sft

    return TrainingCommand(
        "sft",
        SFT_DESCRIPTION,
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


DESCRIPTION = (
    "Train a policy as a TOML recipe says, and leave it with all figures in the recipe's output "
    "directory."
)


def run_train(arguments: Sequence[str]) -> int:
    """Train as the recipe says.  Raises IsobitError for anything that cannot be used, before
    anything is written.
    """
    from isobit.config.recipes import RunConfig
    from isobit.config.rules import check_run

    return TrainingCommand(
        "train", DESCRIPTION, "recipes/quickstart.toml", RunConfig, _plan, check_run, _start
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
