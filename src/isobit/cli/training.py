"""One training run, of ``isobit train RECIPE.toml`` or ``isobit sft RECIPE.toml``.

``--resume`` continues the run in the output directory from its newest usable checkpoint, or starts
it if there is none, so that a script may always pass the flag. ``--dry-run`` prints what the run
would use and take, on this machine or on the GPUs that ``--gpu`` and ``--gpus`` name, and changes
nothing. ``--KEY VALUE`` overrides any key of the recipe.
"""

import json
import shlex
import signal
import threading
from argparse import REMAINDER, ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from textwrap import fill, wrap
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from isobit.cli.options import (
    ALLOW,
    add_options,
    allow_change,
    allowed_names,
    given,
    gpu_options,
    option,
    path_value,
)
from isobit.cli.start import starting
from isobit.config.base import Strict
from isobit.config.keys import all_keys, is_key
from isobit.config.load import (
    build_with,
    dump_config,
    load_recipe,
    nested_overrides,
    read_words,
)
from isobit.config.recipes import Recipe, recorded_recipe
from isobit.config.rules import check_started
from isobit.parallel.black_box import end_with_launcher
from isobit.parallel.launched import SAVES, is_launched
from isobit.util.errors import ConfigError
from isobit.util.plain_files import read_plain
from isobit.util.terminal import help_width, tell

if TYPE_CHECKING:
    from isobit.commands.dry_run import DryRun
    from isobit.memory.cards import Card
    from isobit.parallel.world import World
    from isobit.run.plan import Plan
    from isobit.run.resolved import ResolvedRecipe

AnyRecipe = TypeVar("AnyRecipe", bound=Recipe)


@dataclass(frozen=True, slots=True)
class TrainingCommand(Generic[AnyRecipe]):
    """What differs between the commands that train."""

    name: str
    description: str
    example: str
    recipe: type[AnyRecipe]
    check: Callable[[AnyRecipe], None]
    """Raises ConfigError for settings that contradict one another."""
    reader: "Callable[[], Callable[[ResolvedRecipe[Any]], Plan[Any, Any]]]"
    """Imports the function that plans a run."""
    starter: Callable[[], Callable[..., object]]
    """Imports the function that runs the training."""


RESUME = "--resume"
_OPTIONS = [
    option("--print-config", "check the recipe, print it with every default, and stop"),
    option(RESUME, "go on with the run in the output directory; RECIPE may be that"),
    allow_change(
        "with --resume: a key or an input that may be other than in the run that goes on, which is "
        "recorded; a refused resume names them"
    ),
    option("--dry-run", "check the run, print what it would use and take, and touch nothing"),
    *gpu_options("with --dry-run: plan for such a GPU, which need not be here: "),
    option(
        "--verbose",
        "with --dry-run: also print the formats of all operations and the resolved recipe",
    ),
]


def run_training(command: TrainingCommand[AnyRecipe], arguments: Sequence[str]) -> int:
    """Train by the recipe. Raises IsobitError for unusable input before anything is written; one of
    several ranks ends with it (``as_rank``).
    """
    with _requests_wait():
        box = end_with_launcher()
        if not is_launched():
            return _obey(command, arguments, may_launch=box is None)
        with starting():
            from isobit.launch.own_rank import as_rank
        with as_rank(box) as world:
            return _obey(command, arguments, world)


@contextmanager
def _requests_wait() -> Iterator[None]:
    """Answer a signal that asks for a checkpoint with a line instead of ending the process, until
    the run installs its own handler.
    """
    before = signal.getsignal(SAVES)
    if threading.current_thread() is not threading.main_thread() or before != signal.SIG_DFL:
        yield
        return
    signal.signal(SAVES, lambda *_: tell(f"{SAVES.name}: there is nothing to save"))
    try:
        yield
    finally:
        signal.signal(SAVES, before)


def _obey(
    command: TrainingCommand[AnyRecipe],
    arguments: Sequence[str],
    world: "World | None" = None,
    may_launch: bool = False,
) -> int:
    options = _read_options(command, arguments)
    allowed = allowed_names(options)
    if allowed and not options.resume:
        raise ConfigError(f"{ALLOW} is for {RESUME}: a new run has nothing to differ from")
    card = _card(options)
    if card is not None:  # the run would be on that machine, whatever the recipe says of this one
        planned: dict[str, Any] = {"device": "cuda", **given(**{"cluster.processes": options.gpus})}
        _check_agrees(command.recipe, options.overrides, planned)
        options.overrides += [f"--{key}={value}" for key, value in planned.items()]
    path = path_value(options.recipe)
    if options.resume and path.is_dir():
        config = _config_of_run(command, path, options.overrides)
    else:
        config = load_recipe(command.recipe, path, options.overrides)
    if options.print_config:
        print(dump_config(config), end="")
    elif options.dry_run:
        with starting():
            from isobit.commands.dry_run import plan_training

            read = command.reader()
        plan = plan_training(config, read, options.resume, allowed, card)
        _print_plan(plan, options.verbose)
    elif may_launch and config.cluster.is_launched:
        command.check(config)
        check_started(config, config.cluster.processes)
        _launch(command.name, config, arguments)
    else:
        with starting():
            from isobit.parallel.world import ALONE

            start = command.starter()
        start(config, resume=options.resume, world=world or ALONE, allowed=allowed)
    return 0


def _read_options(command: TrainingCommand[AnyRecipe], arguments: Sequence[str]) -> Namespace:
    is_help = bool({"-h", "--help"} & set(arguments))
    about = f"{command.description}  Relative paths are relative to the current directory."
    parser = ArgumentParser(
        prog=f"isobit {command.name}",
        usage=_usage(command.name),
        description=fill(about, help_width()),
        epilog=_describe_keys(command.recipe) if is_help else None,
        formatter_class=RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_options(parser, [*_OPTIONS, option("recipe RECIPE.toml", f"for example {command.example}")])
    overrides = parser.add_argument(
        "overrides",
        metavar="--KEY VALUE",
        nargs=REMAINDER,
        help="changes of the recipe, for example --training.steps 5",
    )
    overrides.required = False  # otherwise argparse requires at least one
    if is_help:
        return parser.parse_args(["--help"])
    flags, rest = _flags_of(arguments)
    place = _place_of_recipe(rest, command.recipe)
    if rest and place is None:
        parser.error(
            f"the recipe is missing: isobit {command.name} RECIPE.toml {shlex.join(arguments)}"
        )
    place = place or 0
    return parser.parse_args([*flags, *rest[place : place + 1], *rest[:place], *rest[place + 1 :]])


def _usage(name: str) -> str:
    begin = f"isobit {name}"
    indent = len(f"usage: {begin} ") * " "
    return (
        f"{begin} RECIPE.toml [--resume] [--dry-run [--gpu NAME [--gpus N]]]\n{indent}"
        "[--print-config] [--KEY VALUE ...]"
    )


def _place_of_recipe(words: Sequence[str], model: type[Strict]) -> int | None:
    """The place of the recipe: the first word that neither overrides a key nor is the value of one;
    None where there is none.
    """
    place = 0
    while place < len(words):
        key, equals, _ = words[place].removeprefix("--").partition("=")
        if not words[place].startswith("--") and not (equals and is_key(key, model)):
            return place
        is_flag = not equals
        place += 1
        if is_flag and is_key(key, model):
            place += 1
        elif is_flag:  # another program's, which may have no value or several
            while place < len(words) and not words[place].startswith("--"):
                if words[place].endswith(".toml"):
                    return place
                place += 1
    return None


def _flags_of(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """The options with their values, and the other words: after the recipe the parser would take
    options for overrides.
    """
    flags = [option.flag for option in _OPTIONS if option.is_switch]
    valued = [option.flag for option in _OPTIONS if not option.is_switch]
    first: list[str] = []
    rest: list[str] = []
    words = iter(arguments)
    for word in words:
        if word in valued:
            first += [word, *(value for value in [next(words, None)] if value is not None)]
        elif word in flags or word.partition("=")[0] in valued:
            first.append(word)
        else:
            rest.append(word)
    return first, rest


def _describe_keys(schema: type[Strict]) -> str:
    lines = ["keys of a recipe (NAME is yours to choose):"]
    room, indent = help_width(), 8 * " "
    for key in all_keys(schema):
        default = f", default {key.default}" if key.default else ""
        head = f"  --{key.path}  ({key.kind}{default})"
        lines += wrap(head, room, subsequent_indent=indent, break_on_hyphens=False)
        lines += wrap(key.description, room, initial_indent=indent, subsequent_indent=indent)
    return "\n".join(lines)


def _config_of_run(
    command: TrainingCommand[AnyRecipe], directory: Path, overrides: Sequence[str]
) -> AnyRecipe:
    path = directory / "run.json"
    try:
        saved = recorded_recipe(json.loads(read_plain(path))["config"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{path} cannot be read ({error}); name the recipe of the run instead: isobit "
            f"{command.name} RECIPE.toml --resume"
        ) from None
    if saved.get("data", {}).get("epochs") is not None:
        saved["training"].pop("steps", None)  # follows from it
    values = {**saved, "output": str(directory)}
    return build_with(command.recipe, values, overrides, str(path))


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
        from isobit.memory.cards import read_card
    return read_card(options.gpu)


def _check_agrees(
    model: type[Strict], overrides: Sequence[str], planned: Mapping[str, Any]
) -> None:
    """Raise ConfigError where the command line sets a key to another value than ``--gpu`` does."""
    for parts, value in read_words(overrides, model).overrides:
        for below, said in nested_overrides({".".join(parts): value}):
            key = ".".join(below)
            if key in planned and said not in (planned[key], "auto"):
                flag = "--gpus" if key == "cluster.processes" else "--gpu"
                raise ConfigError(
                    f"{flag} plans with {key} = {planned[key]}, and --{key} is {said}: leave one "
                    "of them out"
                )


def _print_plan(plan: "DryRun", verbose: bool) -> None:
    from isobit.observe.console import Console, printable
    from isobit.util.machine import read_memory

    lines = plan.describe(read_memory(), verbose)
    if verbose:  # the recipe stays TOML, whose lines no terminal may break
        print(printable("\n".join(lines)))
    else:
        Console().lines(lines)


def _launch(command: str, config: Recipe, arguments: Sequence[str]) -> None:
    """Run the same command line in several processes."""
    from isobit.launch.local import launch, with_restarts

    cluster = config.cluster

    def start(words: Sequence[str], again: bool) -> None:
        if cluster.launcher == "ray":
            from isobit.launch.ray_launcher import launch_on_ray

            fewest = cluster.rollout_tp if again else cluster.processes
            launch_on_ray(
                words, cluster.processes, config.threads, config.device, fewest, cluster.rollouters
            )
        else:
            launch(words, cluster.processes, config.threads, rollouters=cluster.rollouters)

    with_restarts(start, ["-m", "isobit.cli.main", command, *arguments], cluster.restarts)
