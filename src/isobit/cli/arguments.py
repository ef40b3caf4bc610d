"""Arguments that several commands share."""

from argparse import (
    REMAINDER,
    ArgumentParser,
    ArgumentTypeError,
    Namespace,
    RawDescriptionHelpFormatter,
)
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from isobit.config.base import MAX_PROCESSES, MAX_SEED, MAX_STEPS, MAX_THREADS
from isobit.util.errors import ConfigError
from isobit.util.files import at_home

if TYPE_CHECKING:
    from isobit.config.base import Strict
from typing import TYPE_CHECKING

ALLOW = "--allow-change"
Settings = TypeVar("Settings", bound="Strict")


def folder_parser(
    command: str,
    description: str,
    tables: str,
    with_folder: bool = True,
    with_seed: bool = True,
    with_precision: bool = True,
) -> ArgumentParser:
    """A parser with FOLDER, --seed and --precision (or without), and --threads; the help says that
    keys of ``tables`` may be set too.
    """
    parser = ArgumentParser(
        prog=f"isobit {command}",
        description=description,
        epilog=(
            f"After FOLDER, --KEY VALUE sets any key of {tables} as well; `isobit train --help` "
            "lists them."
        ),
        formatter_class=RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    if with_folder:
        parser.add_argument(
            "folder",
            type=_model_name,
            metavar="FOLDER",
            help="a Hugging Face model folder, a name of the hub (org/name, org/name@revision), or "
            "`starter` for the shipped model",
        )
    if with_precision:
        parser.add_argument(
            "--precision",
            type=precision_value,
            metavar="NAME",
            default="fp8",
            help="fp32, bf16, fp8-rollout, fp8-linear, fp8 (default), int8-rollout, int8-linear or "
            "int8; or a recipe's table, such as "
            '\'{preset = "fp8", scales = "fp32"}\'',
        )
    if with_seed:
        parser.add_argument(
            "--seed",
            type=whole(0, MAX_SEED),
            default=0,
            metavar="N",
            help="of everything that is drawn; by default 0",
        )
    add_threads(parser)
    return parser


def path_value(text: str) -> Path:
    """A path, with ``~`` as the home directory, which no shell expands in ``--out=~/file``."""
    try:
        return Path(at_home(text))
    except RuntimeError as error:
        raise ArgumentTypeError(str(error)) from None


def precision_value(text: str) -> Any:
    from isobit.config.load import read_value

    return read_value("precision", text)


def recipe_parser(
    command: str, description: str, example: str, schema: "type[Strict] | None"
) -> ArgumentParser:
    """A parser with RECIPE.toml, --print-config and overrides, and help on keys of ``schema``."""
    parser = ArgumentParser(
        prog=f"isobit {command}",
        usage=f"isobit {command} [--print-config] RECIPE.toml [--KEY VALUE ...]",
        description=f"{description}\nRelative paths are relative to the current directory.",
        epilog=_describe_keys(schema) if schema else None,
        formatter_class=RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--print-config",
        action="store_true",
        help="check the recipe, print it with every default, and stop",
    )
    parser.add_argument("recipe", metavar="RECIPE.toml", help=f"for example {example}")
    overrides = parser.add_argument(
        "overrides",
        metavar="--KEY VALUE",
        nargs=REMAINDER,
        help="changes of the recipe, for example --training.steps 5",
    )
    overrides.required = False  # otherwise argparse requires at least one
    return parser


def asks_for_help(arguments: Sequence[str]) -> bool:
    return bool({"-h", "--help"} & set(arguments))


def flags_first(
    arguments: Sequence[str], flags: Collection[str], valued: Collection[str] = ()
) -> list[str]:
    """The arguments with ``flags``, and ``valued`` ones with the word after, moved to the front:
    after the recipe the parser would take them for overrides.
    """
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
    return first + rest


def _describe_keys(schema: "type[Strict]") -> str:
    from isobit.config.keys import all_keys

    lines = ["keys of a recipe (NAME is yours to choose):"]
    for key in all_keys(schema):
        default = f", default {key.default}" if key.default else ""
        lines += [
            f"  --{key.path}  ({key.kind}{default})",
            *([f"        {key.description}"] if key.description else []),
        ]
    return "\n".join(lines)


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


def add_threads(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--threads",
        type=count_of_threads,
        metavar="N",
        help="CPU threads; by default torch's choice",
    )


def add_gpu(parser: ArgumentParser, help: str) -> None:
    parser.add_argument(
        "--gpu",
        metavar="NAME",
        help=f"{help}h100, h200, or the GiB that a process has of it",
    )
    parser.add_argument(
        "--gpus",
        type=whole(1, MAX_PROCESSES),
        metavar="N",
        help="with --gpu: how many of them train together",
    )


def add_allow_change(parser: ArgumentParser, help: str) -> None:
    parser.add_argument(ALLOW, metavar="NAME[,NAME..]", action="append", default=[], help=help)


def allowed_names(options: Namespace) -> list[str]:
    """The settings, inputs and classes of bits that may differ from the run's."""
    return [name for names in options.allow_change for name in names.split(",") if name]


def given(**values: Any) -> dict[str, Any]:
    """The values that are not None, read like overrides; the others keep the schema's defaults."""
    from isobit.config.load import read_value

    return {
        name: read_value(name, value) if isinstance(value, str) else value
        for name, value in values.items()
        if value is not None
    }


def _model_name(text: str) -> str:
    """Refuse the empty text, which as a path would be the current directory."""
    if not text.strip():
        raise ArgumentTypeError("the name is empty; name a folder, org/name or starter")
    return str(path_value(text)) if text.startswith("~") else text


def data_table(text: str, split: str | None = None) -> dict[str, Any]:
    """The rows that a word names: a file by its suffix, a folder, or ``hub:ORG/NAME``."""
    if text.startswith("hub:"):
        return {"type": "hub", "dataset": text.removeprefix("hub:"), "split": split}
    if path_value(text).is_dir():
        return {"type": "hf", "path": text, "split": split}
    from isobit.config.data import file_rows

    return file_rows(Path(text)).model_dump(include={"type", "path"})


def settings_from(
    model: type[Settings], values: Mapping[str, Any], overrides: Sequence[str]
) -> Settings:
    """The settings of a command: ``values``, under the dotted overrides. Raises ConfigError."""
    from isobit.config.load import build_with

    return build_with(model, values, overrides, "command line")


def check_new(path: Path) -> None:
    """Raise ConfigError if the file exists or its directory does not."""
    if path.exists():
        raise ConfigError(f"--out is {str(path)!r}, which exists; name another file, or remove it")
    check_directory(path)


def check_directory(path: Path) -> None:
    if not path.parent.is_dir():
        raise ConfigError(
            f"--out is {str(path)!r}, but there is no directory {str(path.parent)!r}; make it first"
        )


def set_threads(options: Namespace) -> None:
    if options.threads is not None:
        import torch

        torch.set_num_threads(options.threads)


_TASK = "task:"


def evaluation_source(options: Namespace) -> tuple[str, dict[str, Any]]:
    text: str = options.data
    if text.startswith(_TASK):
        name = text.removeprefix(_TASK)
        return name, {
            "type": "reasoning_gym",
            "task": name,
            "seed": options.seed,
            **given(size=options.problems),
        }
    table = data_table(text, options.split) | given(limit=options.problems)
    return Path(text.rpartition(":")[2].partition("@")[0]).stem, table


def add_data(parser: ArgumentParser, required: bool) -> None:
    parser.add_argument(
        "--data",
        required=required,
        metavar="WHAT",
        help=(
            "a JSONL, CSV or Parquet file, a Hugging Face dataset's folder, hub:ORG/NAME for a "
            "dataset of the hub, task:NAME for a task of reasoning-gym, or starter:held_out.jsonl"
        ),
    )
    parser.add_argument(
        "--split", metavar="NAME", help="of a folder or a dataset of the hub that has several"
    )
    parser.add_argument(
        "--problems",
        type=positive,
        metavar="N",
        help="use the first N; by default all, or 1000 of a task",
    )


def add_output(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--no-chat",
        action="store_true",
        help="take prompts as they stand, without the tokenizer's chat template",
    )
    parser.add_argument("--json", action="store_true", help="print a JSON object instead of text")
