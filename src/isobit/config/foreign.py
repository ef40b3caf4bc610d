"""Keys of other frameworks: the rows of ``foreign.toml``, and what an error answers to one.

A name is matched by whole segments and from its beginning, so that a stranger's key whose end
happens to look like a known name gets no answer. What may be missing is the beginning that a
command line or a YAML file left out (``optim.lr`` for ``actor.optim.lr``), as far as the rest means
one thing; what may stand before it is one of our own tables (``training.warmup_steps``).
"""

import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import chain
from pathlib import Path

from pydantic import BaseModel

from isobit.config.keys import all_keys
from isobit.config.recipes import RunConfig

FRAMEWORKS = {
    "trl": "TRL",
    "verl": "verl",
    "nemo_rl": "NeMo RL",
    "openrlhf": "OpenRLHF",
    "prime_rl": "prime-rl",
}
"""The frameworks whose names are known, by their fields of a row."""
_BELOW = ".*"
"""Ends a name that stands for a table: for itself and for every key below it."""
_PREFIX = "actor_rollout_ref."
"""What verl's names leave out."""


@dataclass(frozen=True, slots=True)
class ForeignRow:
    """One thing under its names in other frameworks, and what to do here (``foreign.toml``)."""

    names: Mapping[str, Sequence[str]]
    """The names by framework."""
    key: str = ""
    """Ours; empty where there is none."""
    say: str = ""
    """What differs; without a key, why there is none."""
    needed: bool = True
    """False where nothing has to be set."""

    def all_names(self) -> Iterator[str]:
        return (name for names in self.names.values() for name in names)

    def answer(self, name: str, model: type[BaseModel]) -> "ForeignAnswer":
        """What an error says of a name in a recipe of ``model``."""
        owners = [FRAMEWORKS[framework] for framework, names in self.names.items() if name in names]
        of_table = name.endswith(_BELOW)
        whose = f" ({' and '.join(owners)}: {name.removesuffix(_BELOW)})" if owners else ""
        if not self.key:
            what = "not here" if self.needed else "leave it out"
            return ForeignAnswer(f"{what}{whose}", self.say, of_table)
        command = "" if self.key in {key.path for key in all_keys(model)} else " (isobit train)"
        return ForeignAnswer(f"use {self.key}{command}{whose}", self.say, of_table)


@dataclass(frozen=True, slots=True)
class ForeignAnswer:
    """The answer to a key of another framework."""

    what: str
    reason: str = ""
    of_table: bool = False
    """Whether it is known by its table alone."""

    def __str__(self) -> str:
        return f"{self.what}: {self.reason}" if self.reason else self.what


@dataclass(slots=True)
class Reasons:
    """Writes the answers of one list, and gives each reason in full only once."""

    given: dict[str, str] = field(default_factory=dict[str, str])
    """The key beside which each stands, or the text itself."""

    def line(self, path: str, answer: ForeignAnswer | None) -> str:
        if answer is None:
            return f"{path}: unknown key"
        first = self.given.setdefault(answer.reason, path) if answer.reason else path
        said = answer if first == path else f"{answer.what}: as for {first}"
        return f"{path}: unknown key; {said}"

    def once(self, text: str) -> str:
        return text if self.given.setdefault(text, text) is text else ""


@cache
def foreign_rows() -> Mapping[str, Sequence[ForeignRow]]:
    """The rows by the title of their section."""
    tables = tomllib.loads(Path(__file__).with_name("foreign.toml").read_text(encoding="utf-8"))
    return {
        section["title"]: [
            ForeignRow(
                {name: row[name] for name in FRAMEWORKS if name in row},
                row.get("key", ""),
                row.get("say") or row.get("none") or row.get("nothing", ""),
                "nothing" not in row,
            )
            for row in section["rows"]
        ]
        for section in tables["section"]
    }


@cache
def common_names(model: type[BaseModel]) -> Mapping[str, str]:
    """Our keys by names that many programs have for them."""
    tables = tomllib.loads(Path(__file__).with_name("foreign.toml").read_text(encoding="utf-8"))
    ours = {key.path for key in all_keys(model)}
    keys = {key: names for table in tables["common"] for key, names in table.items()}
    # what is only the other command's comes first, so that what is this one's replaces it
    ordered = sorted(keys, key=ours.__contains__)
    return {name: key for key in ordered for name in keys[key]}


@cache
def foreign_values() -> Mapping[tuple[str, str], str]:
    """What to do in place of a value, by our key and the value in small letters."""
    tables = tomllib.loads(Path(__file__).with_name("foreign.toml").read_text(encoding="utf-8"))
    return {
        (key, name): table["say"]
        for table in tables["value"]
        for key in table["keys"]
        for name in table["names"]
    }


def foreign_value(key: str, value: str) -> str:
    """What to do in place of a value of ``key`` that other programs take; empty for any other."""
    return foreign_values().get((key, value.lower().replace("-", "_")), "")


_NamedRow = tuple[str, ForeignRow]


@cache
def _names(of_tables: bool) -> Mapping[str, _NamedRow]:
    """Each name of a key, or each of a table without its mark, with its row."""
    rows_by_name: dict[str, _NamedRow] = {}
    for row in chain.from_iterable(foreign_rows().values()):
        for name in row.all_names():
            if name.endswith(_BELOW) == of_tables:
                rows_by_name.setdefault(name.removesuffix(_BELOW), (name, row))
    return rows_by_name


@cache
def _endings() -> Mapping[str, _NamedRow]:
    """The ends of names that mean one thing alone. One that also ends a key of ours (``type``)
    means that, unless the row's key ends so too.
    """
    meant: dict[str, list[_NamedRow]] = {}
    for row in chain.from_iterable(foreign_rows().values()):
        for name in row.all_names():
            for ending in _ends(name) if not name.endswith(_BELOW) else ():
                meant.setdefault(ending, []).append((name, row))
    ours = {key.path.rpartition(".")[2] for key in all_keys(RunConfig)}
    return {
        ending: rows[0]
        for ending, rows in meant.items()
        if len({id(row) for _, row in rows}) == 1
        and (ending not in ours or rows[0][1].key.rpartition(".")[2] == ending)
    }


def _ends(name: str) -> Iterator[str]:
    while "." in name:
        name = name.partition(".")[2]
        yield name


def foreign_answer(path: str, model: type[BaseModel]) -> ForeignAnswer | None:
    """What to use for a key of another framework in a recipe of ``model``; None if none has it."""
    first, _, rest = path.replace("-", "_").replace("[]", "").partition(".")
    path = rest if rest and first in FRAMEWORKS else f"{first}.{rest}".rstrip(".")
    bare = path.removeprefix(_PREFIX)
    inside = _without_our_tables(bare, model)
    for name in dict.fromkeys((path, bare, *inside)):
        is_word = name == bare and not re.search("[._]", name)  # `n` alone could be anyone's
        for known in (_names(False), _names(True), {} if is_word else _endings()):
            if name in known and not _is_namesake(path, name, known[name][1]):
                return _answer(known[name], model)
    while "." in bare:
        bare = bare.rpartition(".")[0]
        if bare in _names(True):
            return _answer(_names(True)[bare], model)
    common = common_names(model)
    for name in dict.fromkeys((path, *inside)):
        if name in common:
            return ForeignRow({}, common[name]).answer(name, model)
    return None


def _answer(named_row: _NamedRow, model: type[BaseModel]) -> ForeignAnswer:
    name, row = named_row
    return row.answer(name, model)


def _is_namesake(path: str, name: str, row: ForeignRow) -> bool:
    """Whether ``name`` is also the name of our key, which is suggested instead."""
    return row.key == path or row.key.endswith(f".{name}")


def _without_our_tables(path: str, model: type[BaseModel]) -> list[str]:
    """The path without the tables of ours that it begins with, the longest beginning first."""
    parts = path.split(".")
    tables = {key.path.replace("[]", "").rpartition(".")[0] for key in all_keys(model)}
    return [
        ".".join(parts[depth:])
        for depth in range(len(parts) - 1, 0, -1)
        if any(_stands_for(table.split("."), parts[:depth]) for table in tables)
    ]


def _stands_for(table: Sequence[str], parts: Sequence[str]) -> bool:
    return len(table) >= len(parts) and all(
        name in ("NAME", part) for name, part in zip(table, parts, strict=False)
    )
