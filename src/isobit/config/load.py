"""Loading of recipes: from a TOML file and dotted overrides to a checked configuration, or one
``ConfigError`` that lists all mistakes, each with its dotted path and what to do; and back to TOML.

The file overrides the defaults, and ``--training.steps 5``, ``--training.steps=5`` or
``training.steps=5`` override the file. A value on the command line is read as TOML if it is a TOML
number, boolean, quoted string, list or inline table, and as plain text otherwise; so ``--output 5``
needs ``--output '"5"'``. Relative paths are relative to the directory in which the command runs.
"""

import codecs
import copy
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import tomli_w
from pydantic import BaseModel, ValidationError

from isobit.config.algorithm import algorithm_table
from isobit.config.base import Strict
from isobit.config.foreign import foreign_answer
from isobit.config.keys import is_key
from isobit.config.precision import chosen_options
from isobit.config.recipes import RECIPES, RunConfig
from isobit.config.refusals import config_error, listed_error, refused_lines
from isobit.config.shipped import how_to_get, in_place_of
from isobit.util.errors import ConfigError
from isobit.util.plain_files import open_plain

LARGEST_FILE = 1 << 20
"""Bytes; a recipe has some hundreds."""
MAX_NESTING = 32


def read_toml(path: Path) -> dict[str, Any]:
    """The tables of a recipe, unchecked. Raises ConfigError for a file that is not TOML."""
    try:
        with open_plain(path) as file:
            content = file.read(LARGEST_FILE + 1)
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file; {how_to_get(path)}") from None
    except IsADirectoryError:
        raise ConfigError(f"{path}: a directory; {in_place_of(path)}") from None
    except (OSError, ValueError) as error:  # ValueError: a null byte in the name
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"{path}: cannot be read: {reason}") from None
    if len(content) > LARGEST_FILE:
        raise ConfigError(
            f"{path}: has more than {LARGEST_FILE:,} bytes; a configuration is a TOML file of some "
            "hundreds"
        )
    return _tables_of(content, path)


_UTF_16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
_OTHER_SUFFIXES = {".yaml": "YAML", ".yml": "YAML", ".json": "JSON"}
_YAML = re.compile(r"(---\s*$|[\w-]+:(\s|$))")
"""The first line of a YAML file that is neither blank nor a comment."""


def _tables_of(content: bytes, path: Path) -> dict[str, Any]:
    if content.startswith(_UTF_16):
        raise ConfigError(f"{path}: not a text file in UTF-8 but in UTF-16; save it as UTF-8")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path}: not a text file in UTF-8 (byte {error.start}); a configuration is a TOML file"
        ) from None
    try:
        return parse_toml(text.replace("\r\n", "\n"), str(path))
    except tomllib.TOMLDecodeError as error:
        hint = _other_format(path, text) or _other_words(text, error)
        raise ConfigError(f"{path}: not valid TOML: {error}{hint}") from None


def _other_format(path: Path, text: str) -> str:
    """What to do with a recipe in another format; empty if it looks like TOML."""
    lines = (line.strip() for line in text.splitlines())
    first = next((line for line in lines if line and not line.startswith("#")), "")
    format = _OTHER_SUFFIXES.get(path.suffix.lower()) or ("YAML" if _YAML.match(first) else "")
    format = "JSON" if not format and first.startswith("{") else format
    if not format:
        return ""
    return (
        f". This looks like {format}; a recipe is TOML, in which `training: {{steps: 5}}` is a "
        "line `[training]` and below it `steps = 5`; `isobit schema --markdown` prints all keys, "
        "and `isobit recipe quickstart` prints an example"
    )


_NOT_TOML = re.compile(r"\b(True|False|None|null|yes|no|on|off)\b")


def _other_words(text: str, error: tomllib.TOMLDecodeError) -> str:
    """What TOML writes for a word of Python or YAML on the line that cannot be read."""
    line = re.search(r"at line (\d+)", str(error))
    lines = text.splitlines()
    word = _NOT_TOML.search(lines[int(line[1]) - 1].partition("=")[2]) if line else None
    if word is None:
        return ""
    return f". {word[1]} is not TOML: write true or false, or leave the key out for no value"


def parse_toml(text: str, source: str) -> dict[str, Any]:
    """The tables of a text. Raises ConfigError, naming ``source``, for deep nesting and numbers of
    thousands of digits, TOMLDecodeError for what is not TOML.
    """
    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        raise
    except RecursionError:
        raise _too_deep(source) from None
    except ValueError:  # Python converts no integer of more than some thousand digits
        raise ConfigError(f"{source}: holds a number of too many digits") from None
    check_nesting(tables, source)
    return tables


def check_nesting(value: Any, source: str) -> None:
    """Raise ConfigError, naming ``source``, for tables and lists nested too deeply."""
    level = [value]
    for _ in range(MAX_NESTING + 1):
        level = [
            below
            for value in level
            if isinstance(value, dict | list)
            for below in (value.values() if isinstance(value, dict) else value)
        ]
        if not level:
            return
    raise _too_deep(source)


def _too_deep(source: str) -> ConfigError:
    return ConfigError(
        f"{source}: tables or lists lie more than {MAX_NESTING} deep in one another; no key is "
        "nested so deeply"
    )


Override: TypeAlias = tuple[tuple[str, ...], Any]
"""The parts of a dotted key, and its value."""
_COMMAND_LINE = "command line"

_NAMED: dict[str, Callable[[str], dict[str, Any]]] = {
    "precision": lambda preset: {"preset": preset},
    "algorithm": algorithm_table,
}
"""Tables that may be given as a name, and what the name stands for."""

_REPLACED = {
    "reward.model": ("reward.function", "reward.options"),
    "reward.function": ("reward.model",),
    "environment.class": ("environment.verifiers", "environment.openenv"),
    "environment.verifiers": ("environment.class", "environment.openenv"),
    "environment.openenv": ("environment.class", "environment.verifiers"),
    "training.warmup_ratio": ("training.warmup_updates",),
    "training.warmup_updates": ("training.warmup_ratio",),
    "training.steps": ("data.epochs",),
    "data.epochs": ("training.steps",),
}
"""Keys of which a recipe may have one, and what an override of one replaces in the recipe."""


@dataclass(slots=True)
class Words:
    """The overrides of a command line, and what is wrong with its words."""

    overrides: list[Override] = field(default_factory=list["Override"])
    faults: list[str] = field(default_factory=list[str])
    faults_if_built: list[str] = field(default_factory=list[str])
    """Faults of flags that are overrides all the same, so that the schema answers their names: they
    count where a later table has replaced what they set.
    """


def read_words(arguments: Sequence[str], model: type[BaseModel]) -> Words:
    """The words of a command line that sets keys of ``model``.

    A flag that is no key of ours may have no value or several, as other programs' have: it is an
    override with the value true or a list, so that the schema answers it with all other keys.
    """
    read = Words()
    rest = list(arguments)
    while rest:
        word = rest.pop(0)
        key, equals, text = word.removeprefix("--").partition("=")
        key = key.lstrip("+")  # Hydra's, for a key that its schema lacks
        if not equals and not word.startswith("--"):
            read.faults.append(
                f"{word!r} is not an override; write --KEY VALUE or KEY=VALUE, for example "
                "--training.steps 5, and a list as '[1, 2]'"
            )
            continue
        parts, is_ours = tuple(key.split(".")), is_key(key, model)
        values = [text] if equals else _values_after(rest, several=not is_ours)
        fault = _fault_of(word, parts)
        number = f"{len(values)} values" if values else "no value"
        loose = "" if len(values) == 1 else f"--{key} has {number}; write --{key} VALUE"
        if fault or (loose and is_ours):
            read.faults.append(fault or loose)
            continue
        if loose:
            read.faults_if_built.append(loose)
        several = [read_value(key, value) for value in values] or [True]
        read.overrides.append((parts, several[0] if len(several) == 1 else several))
    return read


def _fault_of(word: str, parts: tuple[str, ...]) -> str:
    if not all(parts):
        return f"{word!r} is not a dotted key; write for example --training.steps 5"
    if len(parts) > MAX_NESTING:
        return f"{word[:60]!r}... has {len(parts)} parts; no key is nested so deeply"
    return ""


def _values_after(rest: list[str], several: bool) -> list[str]:
    """Take the value of a flag from the words after it, or all of ``several``."""
    values: list[str] = []
    while rest and not rest[0].startswith("--") and (several or not values):
        if values and "=" in rest[0]:
            break
        values.append(rest.pop(0))
    return values


def nested_overrides(values: Mapping[str, Any]) -> list[Override]:
    """The overrides of nested tables: ``{"training": {"steps": 5}, "data.train.limit": 9}`` are
    two.
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
    """A copy of ``values`` with the overrides set, in order; missing tables are made.

    A list is replaced as a whole. ``--precision NAME`` and ``--algorithm NAME`` change the name and
    keep the table's other choices. ``--reward.model`` replaces a function, and likewise of other
    keys that exclude one another. Raises ConfigError for a key below a value that is not a table.
    """
    overrides = list(overrides)
    result = _copied(values, overrides)
    for parts, value in overrides:
        _set(result, parts, value)
    return result


def _copied(values: Mapping[str, Any], overrides: Iterable[Override]) -> dict[str, Any]:
    """The values without those that the overrides replace by another key."""
    result: dict[str, Any] = {}
    for name, value in values.items():
        _set(result, (name,), copy.deepcopy(value))
    for parts, value in overrides:
        for key in _replaced_by(parts) if value else ():
            table: Any = result
            for part in key[:-1]:
                table = table.get(part) if isinstance(table, dict) else None
            if isinstance(table, dict):
                table.pop(key[-1], None)
    return result


def _replaced_by(parts: tuple[str, ...]) -> list[tuple[str, ...]]:
    *above, last = parts
    if len(parts) == 4 and parts[:2] == ("reward", "parts"):
        others = _REPLACED.get(f"reward.{last}", ())
        return [(*above, other.removeprefix("reward.")) for other in others]
    return [tuple(other.split(".")) for other in _REPLACED.get(".".join(parts), ())]


def _set(table: dict[str, Any], parts: tuple[str, ...], value: Any) -> None:
    if len(parts) == 1 and parts[0] in _NAMED and isinstance(value, str):
        given = table.get(parts[0])
        if parts[0] == "precision" and isinstance(given, dict) and "preset" in given:
            table["precision"] = chosen_options(given)
        for key, choice in _NAMED[parts[0]](value).items():
            _set(table, (*parts, key), choice)
        return
    for depth, part in enumerate(parts[:-1], start=1):
        table = table.setdefault(part, {})
        if not isinstance(table, dict):
            key = ".".join(parts)
            answer = foreign_answer(key, RunConfig)
            raise ConfigError(
                f"{key} cannot be set: {'.'.join(parts[:depth])} is {table!r}, not a table"
                f"{'' if answer is None else f'; {answer}'}"
            )
    table[parts[-1]] = value


_PYTHON_WORDS = {"True": True, "False": False}
"""Truth values as Python programs spell them on their command lines."""


def read_value(key: str, text: str) -> Any:
    """A word of the command line that sets ``key``, read as TOML or else as text. Raises
    ConfigError for TOML that is nested too deeply or has too long numbers.
    """
    if text in _PYTHON_WORDS:
        return _PYTHON_WORDS[text]
    try:
        values = parse_toml(f"value = {text}", f"{_COMMAND_LINE}: {key}")
    except tomllib.TOMLDecodeError:
        return text
    readable = len(values) == 1 and isinstance(
        values["value"], bool | int | float | str | list | dict
    )
    return values["value"] if readable else text  # a date, or more than one line, was meant as text


Model = TypeVar("Model", bound=Strict)


def load_config(path: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """The configuration of a run, from a TOML file and command-line words such as
    ``--training.steps 5``.

    Raises ConfigError for a file that cannot be read as TOML, and for every unknown key, missing
    key and value out of range, all in one message with their dotted paths.
    """
    return load_recipe(RunConfig, path, overrides)


def load_recipe(model: type[Model], path: Path, overrides: Sequence[str] = ()) -> Model:
    """A recipe of any command, read as ``model``. Raises ConfigError as ``load_config`` does."""
    source = f"{path} with its overrides" if overrides else str(path)
    return build_with(model, read_toml(path), overrides, source)


def build_with(
    model: type[Model], values: Mapping[str, Any], overrides: Sequence[str], source: str
) -> Model:
    """The values under the words of a command line, built; the faults of both are in one list."""
    words = read_words(overrides, model)
    tables = _copied(values, words.overrides)
    for parts, value in words.overrides:
        try:
            _set(tables, parts, value)
        except ConfigError as error:
            words.faults.append(str(error))
    try:
        built = model.model_validate(tables)
    except ValidationError as error:
        lines = [*words.faults, *refused_lines(error, model)]
        raise listed_error(lines, source, () if words.faults else _takers(tables, model)) from None
    if words.faults or words.faults_if_built:
        raise listed_error([*words.faults, *words.faults_if_built], _COMMAND_LINE)
    return built


def _takers(tables: Mapping[str, Any], model: type[BaseModel]) -> Iterator[str]:
    """A line for the command that takes a recipe which is refused as one of ``model``."""
    for command, other in RECIPES.items():
        if model in RECIPES.values() and other is not model:
            with suppress(ValidationError):
                other.model_validate(tables)
                yield f"isobit {command} takes this recipe as it is"


def build(model: type[Model], values: Mapping[str, Any], source: str) -> Model:
    """Any part of the schema; ``source`` is for errors. Raises ConfigError as
    ``load_config`` does.
    """
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise config_error(error, model, source) from None


def dump_config(config: Strict) -> str:
    """The configuration as TOML with every default written out, except keys without a value (None);
    ``load_config`` reads it back to an equal one.
    """
    return tomli_w.dumps(config.model_dump(mode="json", exclude_none=True))
