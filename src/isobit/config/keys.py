"""The keys of a recipe as dotted paths, for help and errors.

A key is the path through the tables of a TOML file: ``training.steps``. ``NAME`` is a free name
(``data.eval.NAME.task``), ``[]`` a list of tables (``corrections[]``). Where a table's ``type`` or
``name`` chooses between models, the keys of all are listed; pydantic's path to an error holds the
choice as an extra part, which ``locate`` leaves out.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, NaiveDatetime
from pydantic.fields import FieldInfo
from pydantic_core import to_jsonable_python

TAGS = ("type", "name")
"""Keys that choose between tables."""


@dataclass(frozen=True, slots=True)
class Key:
    path: str
    kind: str
    """What it takes: ``int``, ``fp8 | bf16``, ..."""
    default: str
    """Empty for a key that is required or off."""
    description: str
    users: tuple[str, ...] = ()
    """The tables of a choice that have it, if not all do."""


def fields_by_key(model: type[BaseModel]) -> dict[str, FieldInfo]:
    """The fields of a table by their names in TOML (``async``), in the order of the schema."""
    return {field.alias or name: field for name, field in model.model_fields.items()}


def with_defaults(annotation: Any, value: Any) -> Any:
    """What a record has for a key of this type, with the default of each key that its tables lack,
    in the form of JSON. What is no table of known keys, and unknown keys, stay as they are.
    """
    annotation = _plain(annotation)
    if isinstance(value, list | tuple) and get_origin(annotation) is tuple:
        return [with_defaults(get_args(annotation)[0], one) for one in value]
    if not isinstance(value, Mapping):
        return value
    if get_origin(annotation) is dict:
        below = get_args(annotation)[1]
        return {name: with_defaults(below, one) for name, one in value.items()}
    models = _models(annotation)
    tags = {value.get(name) for name in TAGS if isinstance(value.get(name), str)}
    model = next((one for one in models if len(models) == 1 or tag_of(one) in tags), None)
    if model is None:
        return value
    fields = fields_by_key(model)
    given = {
        name: with_defaults(fields[name].annotation, one) if name in fields else one
        for name, one in value.items()
    }
    missing = {
        name: to_jsonable_python(field.get_default(call_default_factory=True))
        for name, field in fields.items()
        if name not in value and not field.is_required()
    }
    return given | missing


@cache
def all_keys(model: type[BaseModel], prefix: str = "") -> tuple[Key, ...]:
    return tuple(
        key
        for name, field in fields_by_key(model).items()
        for key in _keys_of(field.annotation, field, f"{prefix}{name}")
    )


def _keys_of(annotation: Any, field: FieldInfo, path: str) -> Iterator[Key]:
    annotation = _plain(annotation)
    models = _models(annotation)
    if models:
        yield from _merge({tag_of(model): all_keys(model, f"{path}.") for model in models})
    elif get_origin(annotation) is dict and _models(_plain(get_args(annotation)[1])):
        yield from _keys_of(get_args(annotation)[1], field, f"{path}.NAME")
    elif get_origin(annotation) is tuple and _models(_plain(get_args(annotation)[0])):
        yield from _keys_of(get_args(annotation)[0], field, f"{path}[]")
    else:
        description = " ".join((field.description or "").split()).replace("``", "")
        yield Key(path, _kind_text(annotation), _default_text(field), description)


def tag_of(model: type[BaseModel]) -> str:
    """The value of ``type`` or ``name`` that chooses this model; empty if nothing chooses it."""
    for name in TAGS:
        field = model.model_fields.get(name)
        if field is not None and get_origin(field.annotation) is Literal:
            return str(field.default)
    return ""


def _merge(members: Mapping[str, Sequence[Key]]) -> Iterator[Key]:
    """One key for each path from the keys of each member of a choice, the tags first. It takes what
    any of them takes, and names the defaults that differ and the members that have it if not all
    do. Keys of a table inside one member say nothing of that.
    """
    table = min((key.path.rpartition(".")[0] for keys in members.values() for key in keys), key=len)
    by_path: dict[str, dict[str, Key]] = {}
    for tag, keys in members.items():
        for key in keys:
            by_path.setdefault(key.path, {})[tag] = key
    for path in sorted(by_path, key=lambda path: path.rpartition(".")[2] not in TAGS):
        owners = by_path[path]
        first = next(iter(owners.values()))
        if path.rpartition(".")[0] != table:
            yield first
            continue
        kinds = dict.fromkeys(kind for key in owners.values() for kind in key.kind.split(" | "))
        yield replace(
            first,
            kind=" | ".join(kinds),
            default="" if path.rpartition(".")[2] in TAGS else _defaults(owners),
            description=f"{first.description} {_users(list(owners), list(members))}".strip(),
            users=tuple(owners) if len(owners) < len(members) else first.users,
        )


def _defaults(owners: Mapping[str, Key]) -> str:
    """``0.2; dapo: 0.28``: the most common default, then those that differ."""
    tags: dict[str, list[str]] = {}
    for tag, key in owners.items():
        tags.setdefault(key.default, []).append(tag)
    (usual, _), *others = sorted(tags.items(), key=lambda item: -len(item[1]))
    return "; ".join([usual, *(f"{', '.join(names)}: {value}" for value, names in others)])


def _users(owners: Sequence[str], members: Sequence[str]) -> str:
    missing = [tag for tag in members if tag not in owners]
    if not missing:
        return ""
    return (
        f"({', '.join(owners)})" if len(missing) >= len(owners) else f"(not {', '.join(missing)})"
    )


def choices(model: type[BaseModel], location: Sequence[str | int]) -> list[str]:
    """The values that ``type`` or ``name`` may have in the table at a pydantic error's location."""
    annotation: Any = model
    for part in location:
        models = _models(_plain(annotation))
        annotation = _below(_plain(annotation), models, part)
    return [tag_of(candidate) for candidate in _models(_plain(annotation))]


@dataclass(frozen=True, slots=True)
class ErrorPlace:
    """The place of an error."""

    path: str
    siblings: list[str]
    """The valid keys of its table."""
    union: str = ""
    """The path of a value that may be of several kinds, none of them a table, if this is or lies in
    one.
    """
    named: tuple[str, ...] = ()
    """The keys of a table in which this is the free name, if it is one."""
    takes: Any = None
    """What the key takes."""


def locate(model: type[BaseModel], location: Sequence[str | int]) -> ErrorPlace:
    """The place of a pydantic error's location."""
    annotation: Any = model
    parts: list[str] = []
    siblings: list[str] = []
    union, named = "", ()
    for part in location:
        if _is_union(annotation):  # then pydantic's next part says which kind it has tried
            union = ".".join(parts)
            annotation = _kind_tried(annotation, str(part))
            continue
        models = _models(_plain(annotation))
        tagged = [
            candidate for candidate in models if len(models) > 1 and tag_of(candidate) == part
        ]
        if tagged:
            annotation = tagged[0]
            continue
        parts.append(str(part))
        siblings = sorted(fields_by_key(models[0])) if len(models) == 1 else []
        named = _keys_below_a_name(annotation)
        annotation = _below(_plain(annotation), models, part)
    return ErrorPlace(".".join(parts), siblings, union, named, annotation)


def _is_union(annotation: Any) -> bool:
    members = [one for one in _members(_plain(annotation)) if one is not type(None)]
    return len(members) > 1 and not _models(_plain(annotation))


def _kind_tried(annotation: Any, label: str) -> Any:
    """The member of a union with pydantic's label of it, as far as anything lies below it."""
    lists = (one for one in _members(_plain(annotation)) if get_origin(one) is tuple)
    return next(lists, None) if label.startswith("tuple[") else None


def _keys_below_a_name(annotation: Any) -> tuple[str, ...]:
    """The keys of the tables in a table of free names; empty for another."""
    models = _models_by_name(annotation)
    return tuple(dict.fromkeys(key for model in models for key in fields_by_key(model)))


def _models_by_name(annotation: Any) -> list[type[BaseModel]]:
    if get_origin(_plain(annotation)) is not dict:
        return []
    return _models(_plain(get_args(_plain(annotation))[1]))


def has_named_tables(annotation: Any) -> bool:
    """Whether a key takes a table of tables with free names."""
    return bool(_models_by_name(annotation))


def has_tables(annotation: Any) -> bool:
    """Whether a key takes a table of known keys."""
    return bool(_models(_plain(annotation)))


def is_key(path: str, model: type[BaseModel]) -> bool:
    """Whether it is a key of the schema, a table of it, or below a key that takes any table."""
    parts = path.split(".")
    return any(
        (len(known) >= len(parts) or "table" in kind)
        and all(name in ("NAME", part) for name, part in zip(known, parts, strict=False))
        for known, kind in _keys_by_table(model).get(parts[0], ())
    )


@cache
def _keys_by_table(model: type[BaseModel]) -> dict[str, list[tuple[list[str], str]]]:
    """The names on the way to each key, and its kind, by the first name."""
    found: dict[str, list[tuple[list[str], str]]] = {}
    for key in all_keys(model):
        names = key.path.replace("[]", "").split(".")
        found.setdefault(names[0], []).append((names, key.kind))
    assert "NAME" not in found
    return found


def _below(annotation: Any, models: list[type[BaseModel]], part: str | int) -> Any:
    if len(models) == 1:
        field = fields_by_key(models[0]).get(str(part))
        return field.annotation if field else None
    if get_origin(annotation) is tuple and _models(_plain(get_args(annotation)[0])):
        return get_args(annotation)[0]
    return get_args(annotation)[-1] if get_origin(annotation) is dict else None


def _plain(annotation: Any) -> Any:
    return get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation


def _members(annotation: Any) -> tuple[Any, ...]:
    members = (
        get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
    )
    return tuple(_plain(member) for member in members)


def _models(annotation: Any) -> list[type[BaseModel]]:
    return [
        member
        for member in _members(annotation)
        if isinstance(member, type) and issubclass(member, BaseModel)
    ]


def _kind_text(annotation: Any) -> str:
    """What a key takes: ``int``, ``fp8 | bf16``, ``list of str``, ``table``."""
    members = [member for member in _members(annotation) if member is not type(None)]
    if len(members) > 1:
        return " | ".join(_kind_text(member) for member in members)
    kind, arguments = members[0], get_args(members[0])
    if get_origin(kind) is Literal:
        return " | ".join(map(str, arguments))
    if get_origin(kind) is tuple:
        return f"list of {_kind_text(arguments[0])}"
    if kind is NaiveDatetime:
        return "date"
    if get_origin(kind) is dict:
        return "table"
    return getattr(kind, "__name__", str(kind)).lower()


def _default_text(field: FieldInfo) -> str:
    if field.is_required() or field.default is None:
        return ""
    if isinstance(field.default, bool):
        return str(field.default).lower()
    return str(list(field.default)) if isinstance(field.default, tuple) else str(field.default)
