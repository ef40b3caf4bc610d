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


_SPELT = {"True": "true", "False": "false", "None": "null"}
"""Values as templates write them, which are Python's, and as JSON does."""
_TYPES: Mapping[type, str] = {str: "string", list: "array", dict: "object", type(None): "null"}


def typed(text: str, schema: Any) -> tuple[Any, str]:
    """The value of a parameter, and what is wrong with it.  It is the text where the schema allows
    one, or says nothing, unless the text is JSON of another type that the schema allows.
    """
    types = _types_of(schema)
    if types <= {"string"}:
        return text, ""
    spelt = _SPELT.get(text.strip(), text.strip())
    value, problem, end = json_at(spelt, 0)
    if not problem and end < len(spelt):
        problem = f"there is text behind its value: {shown_at(spelt, end)}"
    if "string" in types and (problem or _type_of(value) not in types):
        return text, ""
    return value, problem


def _type_of(value: Any) -> str:
    if isinstance(value, bool):
        return "boolean"
    return _TYPES.get(type(value), "number")


def _types_of(schema: Any) -> set[str]:
    """The types that a JSON schema allows, integers as numbers; none where it does not say."""
    if not isinstance(schema, Mapping):
        return set()
    found = set[str]()
    for each in [schema, *_list(schema.get("anyOf")), *_list(schema.get("oneOf"))]:
        named = each.get("type") if isinstance(each, Mapping) else None
        found |= {named} if isinstance(named, str) else set(filter(_is_text, _list(named)))
    if not found:
        found = {_type_of(one) for one in _list(schema.get("enum"))}
    return {"number" if one == "integer" else one for one in found}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _is_text(value: Any) -> bool:
    return isinstance(value, str)
