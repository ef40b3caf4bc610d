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
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import tomli_w
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from isobit.config.algorithm import algorithm_table
from isobit.config.base import Strict
from isobit.config.recipes import RunConfig, all_keys, choices, locate
from isobit.util.errors import ConfigError
from isobit.util.plain_files import open_plain

_LONGEST_VALUE = 60
_IN_WORDS = {
    "tuple_type": "should be a list",
    "list_type": "should be a list",
    "dict_type": "should be a table",
    "model_type": "should be a table",
    "model_attributes_type": "should be a table",
    "int_type": "should be a whole number",
    "int_parsing": "should be a whole number",
    "int_from_float": "should be a whole number",
    "float_type": "should be a number",
    "float_parsing": "should be a number",
    "finite_number": "should be a finite number",
    "string_type": "should be text",
    "bool_type": "should be true or false",
    "bool_parsing": "should be true or false",
    "path_type": "should be a path",
    "datetime_from_date_parsing": "should be a date, as 2026-11-25 or 2026-11-25T08:30:00",
    "datetime_type": "should be a date, as 2026-11-25 or 2026-11-25T08:30:00",
    "timezone_naive": "should be a date without a time zone",
}
"""What errors say of a value of another type, in the words of TOML."""


def config_error(error: ValidationError, model: type[BaseModel], source: str) -> ConfigError:
    """The error for what ``model`` refused; ``source`` says where the values came from."""
    details = error.errors(include_url=False)
    lines = list(dict.fromkeys(line for detail in details for line in _explain(detail, model)))
    if len(lines) == 1:
        return ConfigError(f"{source}: {lines[0]}")
    return ConfigError(
        "\n".join(
            [f"{source}: {len(lines)} settings cannot be used", *(f"  {line}" for line in lines)]
        )
    )


def did_you_mean(word: str, candidates: Iterable[str]) -> str:
    """``; did you mean X?``, or nothing where no candidate is near."""
    near = get_close_matches(word, list(candidates), n=1)
    return f"; did you mean {near[0]}?" if near else ""


def _explain(detail: ErrorDetails, model: type[BaseModel]) -> list[str]:
    """A line; of an unknown table with names that other frameworks have, one for each."""
    path, siblings = locate(model, detail["loc"])
    if detail["type"] != "extra_forbidden":
        return [_explain_value(detail, model, path)]
    leaves = _leaves(path, detail["input"])
    answers = {leaf: foreign_answer(leaf, path.count(".") + 1, model) for leaf in leaves}
    known = {key.path: key for key in all_keys(model)}.get(_as_listed(path))
    if (known is not None and known.users) or not any(answers.values()):
        return [f"{path}: unknown key{_suggest(path, siblings, model)}"]
    return [f"{leaf}: unknown key{answer and f'; {answer}'}" for leaf, answer in answers.items()]


def _leaves(path: str, value: Any) -> list[str]:
    """The paths of all values in an unknown table; the path alone of a value that is none."""
    if not isinstance(value, Mapping) or not value:
        return [path]
    return [leaf for name, below in value.items() for leaf in _leaves(f"{path}.{name}", below)]


def _as_listed(path: str) -> str:
    return re.sub(r"\.\d+\b", "[]", path)


def _explain_value(detail: ErrorDetails, model: type[BaseModel], path: str) -> str:
    context = detail.get("ctx", {})
    key = context.get("discriminator", "").strip("'")
    match detail["type"]:
        case "missing":
            return f"{path}: missing; set it in the file or with --{path} VALUE"
        case "union_tag_not_found":
            *kinds, last = choices(model, detail["loc"])
            return (
                f"{path}.{key}: missing; it says which kind this is ({', '.join(kinds)} or {last})"
            )
        case "union_tag_invalid":
            tags = context["expected_tags"].replace(", ", " or ")
            near = did_you_mean(str(context["tag"]), choices(model, detail["loc"]))
            return f"{path}.{key}: should be {tags}, but it is {context['tag']!r}{near}"
    message = _IN_WORDS.get(detail["type"], detail["msg"][0].lower() + detail["msg"][1:])
    found = repr(detail["input"])
    if len(found) > _LONGEST_VALUE:
        found = f"{found[: _LONGEST_VALUE - 3]}..."
    return f"{path}: {message.removeprefix('input ')}, but it is {found}"


def _suggest(path: str, siblings: list[str], model: type[BaseModel]) -> str:
    """The kinds that have the key, if another kind of the table has it; else the list of the table
    that takes the name as a value; else a near key of the same table or of one around it; else the
    key of that name in another table; else the keys of the table.
    """
    dashes = "--" if "-" in path else ""  # a flag of a command line
    table, _, name = path.replace("-", "_").rpartition(".")
    known = {key.path: key for key in all_keys(model)}.get(_as_listed(path))
    if known is not None and known.users:
        *others, last = known.users
        return (
            f"; only {', '.join(others)} and {last} have it" if others else f"; only {last} has it"
        )
    for key in all_keys(model):
        of, taken = key.path.rpartition(".")[0], key.kind.partition("list of ")[2].split(" | ")
        if of == table and name in taken:
            return f'; write {dashes}{key.path} = ["{name}"]'
    hint = did_you_mean(name, siblings)
    if hint:
        return hint.replace("mean ", f"mean {dashes}{table}." if table else f"mean {dashes}")
    outer = table
    while "." in (outer := outer.rpartition(".")[0]):
        around = [key.path for key in all_keys(model) if key.path.rpartition(".")[0] == outer]
        if hint := did_you_mean(f"{outer}.{name}", around):
            return hint
    elsewhere = [key.path for key in all_keys(model) if key.path.rpartition(".")[2] == name]
    if elsewhere:
        return f"; did you mean {dashes}{elsewhere[0]}?"
    return f"; {table or 'a run'} has {', '.join(siblings)}" if siblings else ""


FRAMEWORKS = {"trl": "TRL", "verl": "verl", "nemo_rl": "NeMo RL", "openrlhf": "OpenRLHF"}
"""Whose names are known, by the fields of a row."""


@dataclass(frozen=True, slots=True)
class ForeignRow:
    """One thing under its names in other frameworks, and what to do here (``foreign.toml``)."""

    names: Mapping[str, Sequence[str]]
    """By framework."""
    key: str = ""
    """Ours; empty where there is none."""
    say: str = ""
    """What differs; without a key, why there is none."""
    needed: bool = True
    """False where nothing has to be set."""

    def answer(self, name: str, model: type[BaseModel]) -> str:
        """What an error says of a name in a recipe of ``model``."""
        owners = [FRAMEWORKS[one] for one, names in self.names.items() if name in names]
        whose = f" ({' and '.join(owners)}: {name})" if owners else ""
        if self.key:
            command = "" if self.key in {key.path for key in all_keys(model)} else " (isobit train)"
            return f"use {self.key}{command}{whose}{self.say and f': {self.say}'}"
        return f"{'not here' if self.needed else 'leave it out'}{whose}: {self.say}"


@cache
def foreign_rows() -> Mapping[str, Sequence[ForeignRow]]:
    """The rows by the title of their section."""
    tables = tomllib.loads(Path(__file__).with_name("foreign.toml").read_text(encoding="utf-8"))
    return {
        section["title"]: [
            ForeignRow(
                {one: row[one] for one in FRAMEWORKS if one in row},
                row.get("key", ""),
                row.get("say") or row.get("none") or row.get("nothing", ""),
                "nothing" not in row,
            )
            for row in section["rows"]
        ]
        for section in tables["section"]
    }


@cache
def _foreign_names() -> Mapping[str, tuple[str, ForeignRow]]:
    """Each name, and the last part of each as far as it means one thing, with its row. A part that
    ends one of our keys (``type``) means that, unless the row's key ends so too.
    """
    found: dict[str, tuple[str, ForeignRow]] = {}
    last: dict[str, list[tuple[str, ForeignRow]]] = {}
    for row in (row for rows in foreign_rows().values() for row in rows):
        for name in (name for names in row.names.values() for name in names):
            found.setdefault(name, (name, row))
            last.setdefault(name.rpartition(".")[2], []).append((name, row))
    ours = {key.path.rpartition(".")[2] for key in all_keys(RunConfig)}
    for part, meant in last.items():
        is_ours = part in ours and meant[0][1].key.rpartition(".")[2] != part
        if len({id(row) for _, row in meant}) == 1 and not is_ours:
            found.setdefault(part, meant[0])
    return found


def foreign_answer(path: str, least: int, model: type[BaseModel]) -> str:
    """What to use for a key of another framework; empty if none has it. Tables around it may be
    missing or be others, and of those below it the first ``least`` parts of the path must be named.
    """
    parts, names = path.replace("-", "_").split("."), _foreign_names()
    for end in range(len(parts), least - 1, -1):
        for start in range(end):
            name, row = names.get(".".join(parts[start:end]), ("", None))
            ours = least == len(parts) and row is not None and row.key.endswith(f".{parts[-1]}")
            if (
                row is not None and not ours and row.key != path
            ):  # the same name in another table is suggested
                return row.answer(name, model)
    return ""


LARGEST_FILE = 1 << 20
"""Bytes; a recipe has some hundreds."""
MAX_NESTING = 32


def read_toml(path: Path) -> dict[str, Any]:
    """The tables of a recipe, unchecked. Raises ConfigError for a file that is not TOML."""
    try:
        with open_plain(path) as file:
            content = file.read(LARGEST_FILE + 1)
    except FileNotFoundError:
        raise ConfigError(
            f"{path}: no such file; name a TOML file, for example recipes/quickstart.toml"
        ) from None
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
        raise ConfigError(f"{path}: not valid TOML: {error}{_other_format(path, text)}") from None


def _other_format(path: Path, text: str) -> str:
    """What to do with a recipe in another format; empty if it looks like TOML."""
    lines = (line.strip() for line in text.splitlines())
    first = next((line for line in lines if line and not line.startswith("#")), "")
    found = _OTHER_SUFFIXES.get(path.suffix.lower()) or ("YAML" if _YAML.match(first) else "")
    found = "JSON" if not found and first.startswith("{") else found
    if not found:
        return ""
    return (
        f". This looks like {found}; a recipe is TOML, in which `training: {{steps: 5}}` is a line "
        "`[training]` and below it `steps = 5`; docs/configuration.md has all keys, and "
        "recipes/quickstart.toml is an example"
    )


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
            for one in level
            if isinstance(one, dict | list)
            for below in (one.values() if isinstance(one, dict) else one)
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

_NAMED: dict[str, Callable[[str], dict[str, Any]]] = {
    "precision": lambda preset: {"preset": preset},
    "algorithm": algorithm_table,
}
"""Tables that may be given as a name, and what the name stands for."""


def parse_overrides(arguments: Sequence[str]) -> list[Override]:
    """The overrides of a command line, in order. Raises ConfigError for a word that is none."""
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
                answer = foreign_answer(key, key.count(".") + 1, RunConfig)
                raise ConfigError(f"--{key} has no value; {answer or f'write --{key} VALUE'}")
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
    keep the table's other choices. Raises ConfigError for a key below a value that is not a table.
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
    """A word of the command line that sets ``key``, read as TOML or else as text. Raises
    ConfigError for TOML that is nested too deeply or has too long numbers.
    """
    try:
        values = parse_toml(f"value = {text}", f"command line: {key}")
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
    values = apply_overrides(read_toml(path), parse_overrides(overrides))
    return build(model, values, f"{path} with its overrides" if overrides else str(path))


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
