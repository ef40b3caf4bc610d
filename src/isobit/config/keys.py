"""The schema as dotted keys: which exist, what they take, and where in the models a pydantic error
lies.

A key is the path through the tables of a TOML file: ``training.steps``.  Where a table's keys are
free, the path shows ``NAME`` (``data.eval.NAME.task``).  Where a table's ``type`` chooses between
models, all their keys are listed, and pydantic's path to an error holds the type as an extra part,
which ``locate`` leaves out.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo


@dataclass(frozen=True, slots=True)
class Key:
    """One setting, as the help shows it."""

    path: str
    kind: str
    """What it takes: ``int``, ``fp8 | bf16``, ..."""
    default: str
    """Empty where the key has none: it is required then, or off."""
    description: str


def all_keys(model: type[BaseModel], prefix: str = "") -> Iterator[Key]:
    """Every setting below ``model``, in the order of the schema."""
    for name, field in model.model_fields.items():
        yield from _keys_of(field.annotation, field, f"{prefix}{name}")


def _keys_of(annotation: Any, field: FieldInfo, path: str) -> Iterator[Key]:
    annotation = _plain(annotation)
    models = _models(annotation)
    if models:
        yield from _merge(key for model in models for key in all_keys(model, f"{path}."))
    elif get_origin(annotation) is dict and _models(_plain(get_args(annotation)[1])):
        yield from _keys_of(get_args(annotation)[1], field, f"{path}.NAME")
    else:
        description = " ".join((field.description or "").split()).replace("``", "")
        yield Key(path, _kind_text(annotation), _default_text(field), description)


def _merge(keys: Iterable[Key]) -> Iterator[Key]:
    """One key a path, with every kind that the models of a choice give it."""
    by_path: dict[str, Key] = {}
    for key in keys:
        known = by_path.setdefault(key.path, key)
        if key.kind != known.kind:
            by_path[key.path] = replace(known, kind=f"{known.kind} | {key.kind}", default="")
    yield from by_path.values()


def locate(model: type[BaseModel], location: Sequence[str | int]) -> tuple[str, list[str]]:
    """The dotted path of a pydantic error's location, and the keys that are valid in the table that
    holds it.
    """
    annotation: Any = model
    parts: list[str] = []
    siblings: list[str] = []
    for part in location:
        models = _models(_plain(annotation))
        tagged = [
            candidate
            for candidate in models
            if len(models) > 1 and candidate.model_fields["type"].default == part
        ]
        if tagged:
            annotation = tagged[0]
            continue
        parts.append(str(part))
        siblings = sorted(models[0].model_fields) if len(models) == 1 else []
        annotation = _below(_plain(annotation), models, part)
    return ".".join(parts), siblings


def _below(annotation: Any, models: list[type[BaseModel]], part: str | int) -> Any:
    if len(models) == 1:
        field = models[0].model_fields.get(str(part))
        return field.annotation if field else None
    return get_args(annotation)[-1] if get_origin(annotation) is dict else None


def _plain(annotation: Any) -> Any:
    return get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation


def _members(annotation: Any) -> tuple[Any, ...]:
    return get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)


def _models(annotation: Any) -> list[type[BaseModel]]:
    return [
        member
        for member in _members(annotation)
        if isinstance(member, type) and issubclass(member, BaseModel)
    ]


def _kind_text(annotation: Any) -> str:
    """``int``, ``fp8 | bf16``, ``list of str``, ``table``: what a key takes, in words."""
    members = [member for member in _members(annotation) if member is not type(None)]
    if len(members) > 1:
        return " | ".join(_kind_text(member) for member in members)
    kind, arguments = members[0], get_args(members[0])
    if get_origin(kind) is Literal:
        return " | ".join(map(str, arguments))
    if get_origin(kind) is tuple:
        return f"list of {_kind_text(arguments[0])}"
    if get_origin(kind) is dict:
        return "table"
    return getattr(kind, "__name__", str(kind)).lower()


def _default_text(field: FieldInfo) -> str:
    if field.is_required() or field.default is None:
        return ""
    if isinstance(field.default, bool):
        return str(field.default).lower()
    return str(list(field.default)) if isinstance(field.default, tuple) else str(field.default)
