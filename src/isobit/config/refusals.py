"""What is said of a recipe that its schema refuses: each mistake with its dotted path, what was
expected and what to do, a misspelt key with the right one, another framework's with ours.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from isobit.config.foreign import Reasons, foreign_answer, foreign_value
from isobit.config.keys import (
    ErrorPlace,
    all_keys,
    choices,
    has_named_tables,
    has_tables,
    is_key,
    locate,
)
from isobit.config.recipes import RECIPES
from isobit.util.errors import ConfigError, did_you_mean

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
    return listed_error(refused_lines(error, model), source)


def listed_error(lines: Sequence[str], source: str, notes: Iterable[str] = ()) -> ConfigError:
    if len(lines) == 1:
        return ConfigError(f"{source}: {lines[0]}", *notes)
    return ConfigError(
        f"{source}: {len(lines)} settings cannot be used", *(f"  {line}" for line in lines), *notes
    )


def refused_lines(error: ValidationError, model: type[BaseModel]) -> list[str]:
    """A line for each key that ``model`` refused."""
    details, reasons = _grouped(error.errors(include_url=False), model), Reasons()
    return list(
        dict.fromkeys(line for detail in details for line in _explain(detail, model, reasons))
    )


_KINDS, _UNNAMED = "kinds", "unnamed"
"""The types of errors that stand for those of all kinds that a key takes, and of all keys of a
table that lacks its name.
"""


def _grouped(details: Sequence[ErrorDetails], model: type[BaseModel]) -> list[ErrorDetails]:
    """The errors, of which those of one value of several kinds are one, and those of the keys of
    one table that lacks its name.
    """
    groups: dict[tuple[str, str], list[tuple[ErrorDetails, str]]] = {}
    for number, detail in enumerate(details):
        place = locate(model, detail["loc"])
        table, _, name = place.path.rpartition(".")
        group = f"{number}", ""
        if place.union:
            group = place.union, _KINDS
        elif name in place.named and not isinstance(detail["input"], Mapping):
            group = table, _UNNAMED
        groups.setdefault(group, []).append((detail, place.path))
    found: list[ErrorDetails] = []
    for (path, kind), members in groups.items():
        first = members[0][0]
        inside = [detail for detail, of in members if of != path]
        if kind == _UNNAMED:
            names = [of.rpartition(".")[2] for _, of in members]
            found.append({**first, "type": _UNNAMED, "ctx": {"table": path, "keys": names}})
        elif kind == _KINDS and not inside:
            kinds = dict.fromkeys(kind for detail, _ in members for kind in _kinds(detail))
            found.append({**first, "type": _KINDS, "ctx": {"kinds": list(kinds)}})
        else:  # what lies in a list is told, and not that the list is no text
            found += inside or [first]
    return found


def _kinds(detail: ErrorDetails) -> list[str]:
    """What an error expects, behind `should be`."""
    if detail["type"] == "literal_error":
        return re.findall(r"'[^']*'", detail.get("ctx", {}).get("expected", ""))
    return [_expected(detail).removeprefix("should be ")]


def _expected(detail: ErrorDetails) -> str:
    message = detail["msg"][0].lower() + detail["msg"][1:]
    return _IN_WORDS.get(detail["type"], message).removeprefix("input ")


def _listed(words: Sequence[str], last: str) -> str:
    *others, end = words
    return f"{', '.join(others)} {last} {end}" if others else end


def _explain(detail: ErrorDetails, model: type[BaseModel], reasons: Reasons) -> list[str]:
    """The lines about an error: one, or one for each name of another framework in a table."""
    place = locate(model, detail["loc"])
    path, siblings = place.path, place.siblings
    if detail["type"] == "missing":
        return [f"{path}: missing; {_how_to_set(place)}"]
    if detail["type"] == _UNNAMED:
        table, keys = (detail.get("ctx", {})[name] for name in ("table", "keys"))
        return [
            f"{table}.NAME: missing; {_listed(keys, 'and')} cannot stand in {table} itself: choose "
            f"a name, and write [{table}.NAME] above them"
        ]
    answers = {leaf: foreign_answer(leaf, model) for leaf in leaves_of(path, detail["input"])}
    known = {key.path: key for key in all_keys(model)}
    if detail["type"] != "extra_forbidden":
        below = {
            leaf: answer for leaf, answer in answers.items() if leaf != path and answer is not None
        }
        foreign = [
            reasons.line(leaf, answer)
            for leaf, answer in below.items()
            if _as_listed(leaf) not in known
        ]
        # A table in the place of text or of a kind is another framework's.
        stands = bool(foreign) and len(below) == len(answers)
        return [*([] if stands else [_explain_value(detail, model, path)]), *foreign]
    ours = known.get(_as_listed(path))
    exact = any(answer is not None and not answer.of_table for answer in answers.values())
    table, _, name = path.rpartition(".")
    if owner := _other_command(answers, model):
        here = [answer for answer in answers.values() if answer is not None]
        instead = f"; here {here[0]}" if here else ""
        return [f"{path}: unknown key; only a recipe of `isobit {owner}` has it{instead}"]
    misspelt = bool(table) and not exact and bool(did_you_mean(name, siblings))
    if (ours is not None and ours.users) or misspelt or not any(answers.values()):
        listing = f"; {table or 'a run'} has {', '.join(siblings)}" if siblings else ""
        hint = _suggest(path, siblings, model) or reasons.once(listing)
        return [f"{path}: unknown key{hint}"]
    return [reasons.line(leaf, answer) for leaf, answer in answers.items()]


def _how_to_set(place: ErrorPlace) -> str:
    if has_tables(place.takes) or has_named_tables(place.takes):
        return f"set it in the file, as a table [{place.path}]"
    return f"set it in the file or with --{place.path} VALUE"


def _other_command(paths: Iterable[str], model: type[BaseModel]) -> str:
    """The command whose recipes have all of these keys, where ``model`` is that of another."""
    keys = [re.sub(r"\[\]|\.\d+\b", "", path) for path in paths]
    if model not in RECIPES.values() or any(is_key(key, model) for key in keys):
        return ""
    owners = (name for name, other in RECIPES.items() if all(is_key(key, other) for key in keys))
    return next(owners, "")


def leaves_of(path: str, value: Any) -> list[str]:
    """The paths of all values in a table; the path alone of a value that is none."""
    if isinstance(value, Mapping) and value:
        return [
            leaf for name, below in value.items() for leaf in leaves_of(f"{path}.{name}", below)
        ]
    if isinstance(value, list) and value and all(isinstance(item, Mapping) for item in value):
        return list(dict.fromkeys(leaf for item in value for leaf in leaves_of(f"{path}[]", item)))
    return [path]


def _as_listed(path: str) -> str:
    return re.sub(r"\.\d+\b", "[]", path)


def _explain_value(detail: ErrorDetails, model: type[BaseModel], path: str) -> str:
    context = detail.get("ctx", {})
    key = context.get("discriminator", "").strip("'")
    taken: Sequence[str] = ()
    match detail["type"]:
        case "union_tag_not_found":
            *kinds, last = choices(model, detail["loc"])
            return (
                f"{path}.{key}: missing; it says which kind this is ({', '.join(kinds)} or {last})"
            )
        case "union_tag_invalid":
            tags = context["expected_tags"].replace(", ", " or ")
            instead = _instead(f"{path}.{key}", context["tag"], choices(model, detail["loc"]))
            return f"{path}.{key}: should be {tags}, but it is {context['tag']!r}{instead}"
        case "dict_type" if has_named_tables(locate(model, detail["loc"]).takes):
            message = f"should be a table with a table {path}.NAME in it"
        case _ if detail["type"] == _KINDS:
            taken = context["kinds"]
            message = f"should be {_listed(taken, 'or')}"
        case _:
            taken, message = _kinds(detail), _expected(detail)
    text = repr(detail["input"])
    if text in ("'None'", "'null'", "'~'"):
        return f"{path}: {message}; leave the key out for no value"
    if len(text) > _LONGEST_VALUE:
        text = f"{text[: _LONGEST_VALUE - 3]}..."
    words = [kind[1:-1] for kind in taken if kind.startswith("'")]
    return f"{path}: {message}, but it is {text}{_instead(path, detail['input'], words)}"


def _instead(path: str, value: Any, words: Sequence[str]) -> str:
    """What to write for a value that is none of the ``words``, behind a semicolon, if known."""
    if not isinstance(value, str) or not words:
        return ""
    said = foreign_value(path, value)
    return f"; {said}" if said else did_you_mean(value, words)


def _suggest(path: str, siblings: list[str], model: type[BaseModel]) -> str:
    """The kinds that have the key, if another kind of the table has it; else the list of the table
    that takes the name as a value; else a near key of the same table or of one around it; else the
    key of that name in another table; else nothing.
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
    return ""
