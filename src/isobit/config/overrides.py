"""Dotted overrides: ``--training.steps 5``, ``--training.steps=5`` or ``training.steps=5`` on top
of a file's tables.

A value is read as TOML where it is a TOML number, boolean, quoted string, list or inline table, and
as plain text otherwise; so ``--output 5`` needs ``--output '"5"'``.  The schema checks it
afterwards, exactly like a value from the file.
"""

import copy
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from isobit.config.algorithm import algorithm_table
from isobit.config.toml import MAX_NESTING, parse_toml
from isobit.errors import ConfigError

Override: TypeAlias = tuple[tuple[str, ...], Any]
"""The parts of a dotted key, and its value."""

_NAMED: dict[str, Callable[[str], dict[str, Any]]] = {
    "precision": lambda preset: {"preset": preset},
    "algorithm": algorithm_table,
}
"""Tables that may be given as a name, and what the name stands for."""


def parse_overrides(arguments: Sequence[str]) -> list[Override]:
    """The overrides of a command line, in order.  Raises ConfigError for a word that is neither a
    key nor a key's value.
    """
    overrides: list[Override] = []
    words = iter(arguments)
    for word in words:
        key, equals, text = word.removeprefix("--").partition("=")
        if not equals and not word.startswith("--"):
            raise ConfigError(
                f"{word!r} is not an override; write --KEY VALUE or KEY=VALUE, for example "
                "--training.steps 5"
            )
        if not equals:
            text = next(words, "--")
            if text.startswith("--"):
                raise ConfigError(f"--{key} has no value; write --{key} VALUE")
        parts = tuple(key.split("."))
        if not all(parts):
            raise ConfigError(f"{word!r} is not a dotted key; write for example --training.steps 5")
        if len(parts) > MAX_NESTING:
            raise ConfigError(
                f"{word[:60]!r}... has {len(parts)} parts; no key is nested so deeply"
            )
        overrides.append((parts, read_value(key, text)))
    return overrides


def nested_overrides(values: Mapping[str, Any]) -> list[Override]:
    """The overrides that tables stand for: ``{"training": {"steps": 5}, "data.train.limit": 9}``
    sets two keys and no others.
    """
    overrides: list[Override] = []
    for key, value in values.items():
        parts = tuple(key.split("."))
        if isinstance(value, Mapping):
            overrides += [((*parts, *below), leaf) for below, leaf in nested_overrides(value)]
        else:
            overrides.append((parts, value))
    return overrides


def apply_overrides(values: Mapping[str, Any], overrides: Iterable[Override]) -> dict[str, Any]:
    """A copy of ``values`` with the overrides set, tables made where they are missing; the last
    override of a key wins.

    A list is replaced as a whole.  ``--precision NAME`` and ``--algorithm NAME`` change the name
    and keep the table's other choices.  Raises ConfigError where a key lies below something that
    is no table.
    """
    result: dict[str, Any] = {}
    for name, value in values.items():
        _set(result, (name,), copy.deepcopy(value))
    for parts, value in overrides:
        _set(result, parts, value)
    return result


def _set(table: dict[str, Any], parts: tuple[str, ...], value: Any) -> None:
    if len(parts) == 1 and parts[0] in _NAMED and isinstance(value, str):
        for key, choice in _NAMED[parts[0]](value).items():
            _set(table, (*parts, key), choice)
        return
    for depth, part in enumerate(parts[:-1], start=1):
        table = table.setdefault(part, {})
        if not isinstance(table, dict):
            raise ConfigError(
                f"{'.'.join(parts)} cannot be set: {'.'.join(parts[:depth])} is {table!r}, not a "
                "table"
            )
    table[parts[-1]] = value


def read_value(key: str, text: str) -> Any:
    """A word of the command line that sets ``key``, as TOML or as the text that it is.  Raises
    ConfigError for TOML beyond all bounds.
    """
    try:
        values = parse_toml(f"value = {text}", f"command line: {key}")
    except tomllib.TOMLDecodeError:
        return text
    readable = len(values) == 1 and isinstance(
        values["value"], bool | int | float | str | list | dict
    )
    return values["value"] if readable else text  # a date, or more than one line, was meant as text
