"""From pydantic's validation errors to one ``ConfigError`` that lists them all, each with its
dotted path and what to do.
"""

import re
from collections.abc import Iterable
from difflib import get_close_matches

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from isobit.config.keys import all_keys, choices, locate
from isobit.errors import ConfigError

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
}
"""What is said of a value that is of another kind; TOML has lists and tables, no tuples."""


def config_error(error: ValidationError, model: type[BaseModel], source: str) -> ConfigError:
    """The error to raise for what ``model`` refused; ``source`` says where the values came from."""
    lines = [_explain(detail, model) for detail in error.errors(include_url=False)]
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


def _explain(detail: ErrorDetails, model: type[BaseModel]) -> str:
    path, siblings = locate(model, detail["loc"])
    context = detail.get("ctx", {})
    key = context.get("discriminator", "").strip("'")
    match detail["type"]:
        case "extra_forbidden":
            return f"{path}: unknown key{_suggest(path, siblings, model)}"
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
    return f"{path}: {message.removeprefix('input ')}, but it is {_shorten(detail['input'])}"


def _suggest(path: str, siblings: list[str], model: type[BaseModel]) -> str:
    """Whose key it is, if another table of a choice has it; else a near key of the same table; else
    the key of that name in another table; else what the table holds.
    """
    table, _, name = path.rpartition(".")
    known = {key.path: key for key in all_keys(model)}.get(re.sub(r"\.\d+\b", "[]", path))
    if known is not None and known.users:
        *others, last = known.users
        return (
            f"; only {', '.join(others)} and {last} have it" if others else f"; only {last} has it"
        )
    hint = did_you_mean(name, siblings)
    if hint:
        return hint.replace("did you mean ", f"did you mean {table}." if table else "did you mean ")
    elsewhere = [key.path for key in all_keys(model) if key.path.rpartition(".")[2] == name]
    if elsewhere:
        return f"; did you mean {elsewhere[0]}?"
    return f"; {table or 'a run'} has {', '.join(siblings)}" if siblings else ""


def _shorten(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _LONGEST_VALUE else f"{text[: _LONGEST_VALUE - 3]}..."
