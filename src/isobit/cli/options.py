"""What a command is: a name, a description and a list of options, many of which are shared."""

import re
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from isobit.config.base import MAX_PROCESSES, MAX_SEED, MAX_STEPS, MAX_THREADS, Strict
from isobit.util.errors import ConfigError
from isobit.util.files import at_home

Settings = TypeVar("Settings", bound=Strict)


def path_value(text: str) -> Path:
    """A path, with ``~`` as the home directory, which no shell expands in ``--out=~/file``."""
    try:
        return Path(at_home(text))
    except RuntimeError as error:
        raise ArgumentTypeError(str(error)) from None


def precision_value(text: str) -> Any:
    """A preset's name, or the table of a precision flow."""
    return _key_value("precision", text)


def _key_value(key: str, text: str) -> Any:
    from isobit.config.load import read_value  # takes long, and some commands have no keys

    return read_value(key.rpartition(".")[2], text)


def whole(least: int, most: int) -> Callable[[str], int]:
    """A parser of whole numbers from ``least`` to ``most``."""

    def read(text: str) -> int:
        short = len(text) <= len(str(most))  # Python converts no text of thousands of digits
        number = int(text) if short and text.isdecimal() else -1
        if not least <= number <= most:
            shown = text if len(text) <= 40 else f"{text[:37]}..."
            raise ArgumentTypeError(f"{shown!r} is not a whole number from {least} to {most:,}")
        return number

    return read


positive = whole(1, MAX_STEPS)
count_of_threads = whole(1, MAX_THREADS)


def _model_name(text: str) -> str:
    """Refuse the empty text, which as a path would be the current directory."""
    if not text.strip():
        raise ArgumentTypeError("the name is empty; name a folder, org/name or starter")
    return str(path_value(text)) if text.startswith("~") else text


@dataclass(frozen=True, slots=True)
class Option:
    """An option of a command, or an argument by its position."""

    flag: str
    """The option as it is written, such as ``--samples``, or the name of a positional argument."""
    settings: Mapping[str, Any]
    """The other arguments of ``ArgumentParser.add_argument``."""
    key: str | None
    """The configuration's key that takes the value, such as ``rollout.top_p``."""

    @property
    def name(self) -> str:
        """The attribute of the parsed options that holds the value."""
        return self.settings.get("dest") or self.flag.removeprefix("--").replace("-", "_")

    @property
    def is_switch(self) -> bool:
        return self.settings.get("action") == "store_true"


def option(
    words: str,
    help: str | None = None,
    read: Callable[[str], Any] | None = None,
    *,
    key: str | None = None,
    **settings: Any,
) -> Option:
    """An option from its words in the help: ``--samples N`` takes a value, ``--json`` is a switch,
    and ``folder FOLDER`` is a positional argument.

    ``read`` converts the value; that of ``key`` is by default read like an override.
    """
    name, *metavar = words.split()
    if metavar:
        settings["metavar"] = metavar[0]
    elif name.startswith("--") and "choices" not in settings:
        settings["action"] = "store_true"
    if read is not None:
        settings["type"] = read
    elif key is not None:
        settings["type"] = partial(_key_value, key)
    return Option(name, {**settings, "help": help}, key)


Options: TypeAlias = Sequence["Option | Sequence[Option]"]
"""Options in the order of the help; of an inner list exactly one must be given."""


@dataclass(frozen=True, slots=True)
class Command:
    """A command, as its help describes it."""

    name: str
    description: str
    options: Options
    epilog: str | None = None

    def parser(self) -> ArgumentParser:
        parser = ArgumentParser(
            prog=f"isobit {self.name}",
            description=self.description,
            epilog=self.epilog,
            allow_abbrev=False,
        )
        add_options(parser, self.options)
        return parser

    def read(self, arguments: Sequence[str]) -> Namespace:
        """Parse the options. Exits with code 2 and a message for arguments that are not valid."""
        return self.parser().parse_args(arguments)

    def read_some(self, arguments: Sequence[str]) -> tuple[Namespace, list[str]]:
        """Parse the options. -> Also the remaining words, which override configuration keys."""
        words: list[str] = []
        for word in arguments:
            # joined, as the parser would take the value of a key before FOLDER for the folder
            is_value = bool(words) and re.fullmatch(r"--\w+(\.\w+)+", words[-1]) is not None
            if is_value and not word.startswith("--"):
                words[-1] += f"={word}"
            else:
                words.append(word)
        return self.parser().parse_known_args(words)

    def settings(
        self, model: type[Settings], options: Namespace, overrides: Sequence[str], **tables: Any
    ) -> Settings:
        """The configuration: ``tables``, then the options that have a key, then the overrides, each
        of which replaces values of those before. Raises ConfigError.
        """
        from isobit.config.load import build_with

        for member in chain.from_iterable(_groups(self.options)):
            value = getattr(options, member.name)
            if member.key is not None and value is not None:
                *path, name = member.key.split(".")
                table = tables
                for part in path:
                    table = table.setdefault(part, {})
                table[name] = value
        return build_with(model, tables, overrides, "command line")


def _groups(options: Options) -> list[Sequence[Option]]:
    return [[entry] if isinstance(entry, Option) else entry for entry in options]


def add_options(parser: ArgumentParser, options: Options) -> None:
    for group in _groups(options):
        is_choice = len(group) > 1
        target = parser.add_mutually_exclusive_group(required=True) if is_choice else parser
        for member in group:
            target.add_argument(member.flag, **member.settings)


def also_keys(tables: str) -> str:
    """The end of the help of a command that takes overrides, of keys of ``tables``."""
    return (
        f"After FOLDER, --KEY VALUE sets any key of {tables} as well; `isobit train --help` lists "
        "them."
    )


FOLDER = option(
    "folder FOLDER",
    "a Hugging Face model folder, a name of the hub (org/name, org/name@revision), or `starter` "
    "for the shipped model",
    _model_name,
)
PRECISION = option(
    "--precision NAME",
    "int8 (default), int8-linear, int8-rollout, fp8, fp8-linear, fp8-rollout, bf16 or fp32; or a "
    'recipe\'s table, such as \'{preset = "fp8", scales = "fp32"}\'',
    precision_value,
    key="precision",
)
"""The flow; the default is that of ``PrecisionConfig``, or of a run."""
SEED = option(
    "--seed N", "of everything that is drawn; by default 0", whole(0, MAX_SEED), default=0
)
THREADS = option("--threads N", "CPU threads; by default torch's choice", count_of_threads)
SAMPLING = [FOLDER, PRECISION, SEED, THREADS]
"""The options of the commands that sample with a model."""
NO_CHAT = option("--no-chat", "take prompts as they stand, without the tokenizer's chat template")
JSON = option("--json", "print a JSON object instead of text")


GPU_NAMES = (
    "h100, h200, a100-40, a100-80, l40s, rtx3090, rtx4090, rtx5090, b200, or the GiB that a "
    "process has of it"
)


def gpu_options(help: str) -> list[Option]:
    """``--gpu NAME``, with what it is for, and ``--gpus N``."""
    return [
        option("--gpu NAME", f"{help}{GPU_NAMES}"),
        option("--gpus N", "with --gpu: how many of them train together", whole(1, MAX_PROCESSES)),
    ]


def given(**values: Any) -> dict[str, Any]:
    """The values that are not None; the others keep their defaults."""
    return {name: value for name, value in values.items() if value is not None}


ALLOW = "--allow-change"


def allow_change(help: str) -> Option:
    return option(f"{ALLOW} NAME[,NAME..]", help, action="append", default=[])


def allowed_names(options: Namespace) -> list[str]:
    """The settings, inputs and classes of bits that may differ from the run's."""
    return [name for names in options.allow_change for name in names.split(",") if name]


def set_threads(options: Namespace) -> None:
    if options.threads is not None:
        import torch

        torch.set_num_threads(options.threads)


def check_new(path: Path) -> None:
    """Raise ConfigError if the file exists or its directory does not."""
    if path.exists():
        raise ConfigError(f"--out is {str(path)!r}, which exists; name another file, or remove it")
    check_directory(path)


def check_directory(path: Path, flag: str = "--out") -> None:
    if not path.parent.is_dir():
        raise ConfigError(
            f"{flag} is {str(path)!r}, but there is no directory {str(path.parent)!r}; make it "
            "first"
        )
