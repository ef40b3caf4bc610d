"""What the commands that take a model folder share: its arguments, numbers with a range, and dotted overrides behind them."""

from argparse import ArgumentParser, ArgumentTypeError, Namespace, RawDescriptionHelpFormatter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from isobit.config.schema import Strict

Settings = TypeVar("Settings", bound="Strict")


def folder_parser(command: str, description: str, tables: str) -> ArgumentParser:
    """A parser with FOLDER, --precision, --seed and --threads; ``tables`` names those whose keys may be set as well."""
    parser = ArgumentParser(
        prog=f"isobit {command}",
        description=description,
        epilog=f"After FOLDER, --KEY VALUE sets any key of {tables} as well; `isobit train --help` lists them.",
        formatter_class=RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("folder", metavar="FOLDER", help="a Hugging Face model folder, or `starter` for the shipped model")
    parser.add_argument("--precision", metavar="NAME", default="fp8", help="fp32, bf16, fp8-rollout, fp8-linear or fp8 (default)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of everything that is drawn; by default 0")
    parser.add_argument("--threads", type=positive, metavar="N", help="CPU threads; by default torch's choice")
    return parser


def positive(text: str) -> int:
    """A whole number from 1."""
    number = int(text) if text.isdecimal() else 0
    if number < 1:
        raise ArgumentTypeError(f"{text!r} is not a whole number from 1")
    return number


def given(**values: Any) -> dict[str, Any]:
    """The values that are not None: what the command line leaves open keeps the schema's default."""
    return {name: value for name, value in values.items() if value is not None}


def settings_from(model: type[Settings], values: Mapping[str, Any], overrides: Sequence[str]) -> Settings:
    """The settings of a command: ``values`` of its own arguments, under the dotted overrides left over.  Raises ConfigError."""
    from isobit.config.load import build
    from isobit.config.overrides import apply_overrides, parse_overrides

    return build(model, apply_overrides(values, parse_overrides(overrides)), "command line")


def set_threads(options: Namespace) -> None:
    """Give torch the threads that the command line asks for."""
    if options.threads is not None:
        import torch

        torch.set_num_threads(options.threads)
