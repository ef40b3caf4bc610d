"""What is said of a recipe that its schema refuses: each mistake with its dotted path, what was
expected and what to do, a misspelt key with the right one, another framework's with ours.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from isobit.config.foreign import Reasons, foreign_answer
from isobit.config.keys import all_keys, choices, locate
from isobit.util.errors import ConfigError

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


def listed_error(lines: Sequence[str], source: str) -> ConfigError:
    if len(lines) == 1:
        return ConfigError(f"{source}: {lines[0]}")
    return ConfigError(
        f"{source}: {len(lines)} settings cannot be used", *(f"  {line}" for line in lines)
    )


def refused_lines(error: ValidationError, model: type[BaseModel]) -> list[str]:
    """A line for each key that ``model`` refused."""
    details, reasons = error.errors(include_url=False), Reasons()
    return list(
        dict.fromkeys(line for detail in details for line in _explain(detail, model, reasons))
    )


def did_you_mean(word: str, candidates: Iterable[str]) -> str:
    """``; did you mean X?``, or nothing where no candidate is near."""
    cutoff = 0.6 if len(word) > 2 else 0.75  # two letters of four are no likeness
    near = get_close_matches(word, list(candidates), n=1, cutoff=cutoff)
    return f"; did you mean {near[0]}?" if near else ""


def _explain(detail: ErrorDetails, model: type[BaseModel], reasons: Reasons) -> list[str]:
    """The lines about an error: one, or one for each name of another framework in a table."""
    path, siblings = locate(model, detail["loc"])
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
    misspelt = bool(table) and not exact and bool(did_you_mean(name, siblings))
    if (ours is not None and ours.users) or misspelt or not any(answers.values()):
        listing = f"; {table or 'a run'} has {', '.join(siblings)}" if siblings else ""
        hint = _suggest(path, siblings, model) or reasons.once(listing)
        return [f"{path}: unknown key{hint}"]
    return [reasons.line(leaf, answer) for leaf, answer in answers.items()]


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
    text = repr(detail["input"])
    if text in ("'None'", "'null'", "'~'"):
        return f"{path}: {message.removeprefix('input ')}; leave the key out for no value"
    if len(text) > _LONGEST_VALUE:
        text = f"{text[: _LONGEST_VALUE - 3]}..."
    return f"{path}: {message.removeprefix('input ')}, but it is {text}"


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
