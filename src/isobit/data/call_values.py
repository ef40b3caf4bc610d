"""Values in the text of a call: JSON, and texts that are read by the schema of a parameter."""

import json
from collections.abc import Mapping
from typing import Any, NoReturn


def _refused(number: str) -> NoReturn:
    raise ValueError(f"{number:.20} is no number of JSON")


def _finite(number: str) -> float:
    value = float(number)
    return value if abs(value) < float("inf") else _refused(number)


_JSON = json.JSONDecoder(parse_constant=_refused, parse_float=_finite)


def json_at(text: str, place: int) -> tuple[Any, str, int]:
    """The JSON value that begins at ``place``, what is wrong with it (empty if nothing is), and
    where it ends.
    """
    try:
        value, end = _JSON.raw_decode(text, place)
    except json.JSONDecodeError as error:
        return None, f"invalid JSON: {error.msg} at {shown_at(text, error.pos)}", place
    except (ValueError, RecursionError) as error:  # numbers of 5,000 digits, brackets of that depth
        return None, f"invalid JSON: {str(error)[:80]}", place
    return value, "", end


def shown_at(text: str, place: int) -> str:
    """What stands at ``place``, for a message."""
    return repr(text[place : place + 20]) if place < len(text) else "the end"


_SPELT = {"true": "true", "false": "false", "none": "null", "null": "null"}
"""Words in small letters and JSON's for them: templates write Python's."""
_TYPES: Mapping[type, str] = {str: "string", list: "array", dict: "object", type(None): "null"}
_NAMES = {
    **{name: name for name in ("string", "array", "object", "boolean", "number", "null")},
    **dict.fromkeys(("str", "text"), "string"),
    **dict.fromkeys(("integer", "int", "float"), "number"),
    **{"bool": "boolean", "list": "array", "dict": "object", "none": "null"},
}
"""Names of types, as they are written in schemas in small letters, and JSON schema's; integers are
numbers.
"""
_ANY = "any"
_MOST_BRANCHES, _DEEPEST = 64, 4
"""What is read of a schema, which is untrusted."""


def typed(text: str, schema: Any) -> tuple[Any, str]:
    """The value of a parameter, and what is wrong with it.

    It is what the text is in JSON, of a type that the schema allows, or else the text where the
    schema allows texts. Where it allows anything, or is not understood, only objects and arrays are
    read as JSON; without a schema all is text.
    """
    types = _types_of(schema) if isinstance(schema, Mapping) else {"string"}
    if types == {"string"}:
        return text, ""
    spelt = text.strip()
    spelt = _SPELT.get(spelt.lower(), spelt)
    value, problem, end = json_at(spelt, 0)
    if not problem and end < len(spelt):
        problem = f"there is text behind its value: {shown_at(spelt, end)}"
    of_any = {"array", "object"} if _ANY in types else set[str]()
    if not problem and _type_of(value) in (types - {"string"}) | of_any:
        return value, ""
    return (text, "") if types & {"string", _ANY} else (value, problem)


def _type_of(value: Any) -> str:
    if isinstance(value, bool):
        return "boolean"
    return _TYPES.get(type(value), "number")


def _types_of(schema: Any, depth: int = 0) -> set[str]:
    """The types that a JSON schema allows; ``_ANY`` where it does not say, or says it elsewhere."""
    if not isinstance(schema, Mapping) or depth > _DEEPEST:
        return {_ANY}
    if (named := schema.get("type")) is not None:
        names = named if isinstance(named, list) else [named]
        return {_NAMES.get(str(one).lower(), _ANY) for one in names[:_MOST_BRANCHES]}
    if "const" in schema:
        return {_type_of(schema["const"])}
    for key in ("enum", "anyOf", "oneOf", "allOf"):
        if isinstance(found := schema.get(key), list) and found:
            some = found[:_MOST_BRANCHES]
            each = [{_type_of(one)} if key == "enum" else _types_of(one, depth + 1) for one in some]
            return set[str]().union(*each)
    return {_ANY}
