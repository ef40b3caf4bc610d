"""The configuration as a JSON schema (draft 7, which editors of TOML know), from which editors
complete and check a recipe.

A TOML file that starts with ``#:schema PATH`` is completed by Even Better TOML, taplo and what
builds on them.  The files are ``docs/run.schema.json`` (``isobit train``) and
``docs/sft.schema.json`` (``isobit sft``).

The schema as dotted keys: which exist, what they take, and where in the models a pydantic error
lies.

A key is the path through the tables of a TOML file: ``training.steps``.  Where a table's keys are
free, the path shows ``NAME`` (``data.eval.NAME.task``), and where there is a list of tables,
``corrections[]``.  Where a table's ``type`` or ``name`` chooses between models, all their keys are
listed, with those that have a key where not all do, and pydantic's path to an error holds the
choice as an extra part, which ``locate`` leaves out.

All keys of the recipes as one page of Markdown: ``docs/configuration.md``.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import groupby
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from isobit.config.algorithm import GrpoConfig
from isobit.config.base import Strict
from isobit.config.recipes import RunConfig, SftConfig
from isobit.config.tables import Preset

TAGS = ("type", "name")
"""Keys that choose between tables."""


@dataclass(frozen=True, slots=True)
class Key:
    """One setting, as the help shows it."""

    path: str
    kind: str
    """What it takes: ``int``, ``fp8 | bf16``, ..."""
    default: str
    """Empty where the key has none: it is required then, or off."""
    description: str
    users: tuple[str, ...] = ()
    """Which tables of a choice have it, if not all do."""


def fields_by_key(model: type[BaseModel]) -> dict[str, FieldInfo]:
    """The fields of a table by the names that they have in TOML, in the order of the schema:
    ``async``, for one, is no name in Python.
    """
    return {field.alias or name: field for name, field in model.model_fields.items()}


@cache
def all_keys(model: type[BaseModel], prefix: str = "") -> tuple[Key, ...]:
    """Every setting below ``model``, in the order of the schema."""
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
    """The value of ``type`` or ``name`` that chooses this model; empty for one that nothing
    chooses.
    """
    for name in TAGS:
        field = model.model_fields.get(name)
        if field is not None and get_origin(field.annotation) is Literal:
            return str(field.default)
    return ""


def _merge(members: Mapping[str, Sequence[Key]]) -> Iterator[Key]:
    """One key a path from the keys of each member of a choice, what chooses first: every kind that
    they give it, the usual default and those that differ, and who has the key if not all do.
    """
    by_path: dict[str, dict[str, Key]] = {}
    for tag, keys in members.items():
        for key in keys:
            by_path.setdefault(key.path, {})[tag] = key
    for path in sorted(by_path, key=lambda path: path.rpartition(".")[2] not in TAGS):
        found = by_path[path]
        first = next(iter(found.values()))
        kinds = dict.fromkeys(kind for key in found.values() for kind in key.kind.split(" | "))
        yield replace(
            first,
            kind=" | ".join(kinds),
            default="" if path.rpartition(".")[2] in TAGS else _defaults(found),
            description=f"{first.description} {_users(list(found), list(members))}".strip(),
            users=tuple(found) if len(found) < len(members) else first.users,
        )


def _defaults(found: Mapping[str, Key]) -> str:
    """``0.2; dapo: 0.28``: the commonest, and whose differ."""
    tags: dict[str, list[str]] = {}
    for tag, key in found.items():
        tags.setdefault(key.default, []).append(tag)
    (usual, _), *others = sorted(tags.items(), key=lambda item: -len(item[1]))
    return "; ".join([usual, *(f"{', '.join(names)}: {value}" for value, names in others)])


def _users(found: Sequence[str], members: Sequence[str]) -> str:
    missing = [tag for tag in members if tag not in found]
    if not missing:
        return ""
    return f"({', '.join(found)})" if len(missing) >= len(found) else f"(not {', '.join(missing)})"


def choices(model: type[BaseModel], location: Sequence[str | int]) -> list[str]:
    """The values that ``type`` or ``name`` may have in the table at a pydantic error's location."""
    annotation: Any = model
    for part in location:
        models = _models(_plain(annotation))
        annotation = _below(_plain(annotation), models, part)
    return [tag_of(candidate) for candidate in _models(_plain(annotation))]


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
            candidate for candidate in models if len(models) > 1 and tag_of(candidate) == part
        ]
        if tagged:
            annotation = tagged[0]
            continue
        parts.append(str(part))
        siblings = sorted(fields_by_key(models[0])) if len(models) == 1 else []
        annotation = _below(_plain(annotation), models, part)
    return ".".join(parts), siblings


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


_UNNAMED = GrpoConfig().name
"""What a table is that gives no name."""

RECIPES: dict[str, type[Strict]] = {"train": RunConfig, "sft": SftConfig}
"""The commands that take a recipe, and what it holds."""


def json_schema(model: type[BaseModel]) -> dict[str, Any]:
    """The schema of a recipe, ready for JSON."""
    schema = model.model_json_schema(ref_template="#/definitions/{model}")
    schema["definitions"] = schema.pop("$defs")
    preset = {"type": "string", "enum": list(get_args(Preset)), "description": "A preset alone."}
    precision = schema["properties"]["precision"]
    precision["anyOf"] = [
        preset,
        {"$ref": precision.pop("$ref")},
    ]  # a name stands for the table with that preset
    if "algorithm" in schema["properties"]:
        algorithm = schema["properties"]["algorithm"]
        algorithm.pop("discriminator")
        algorithm["anyOf"] = [
            {"type": "string", "description": "An algorithm's name alone, or FILE.py:CLASS."},
            {"oneOf": algorithm.pop("oneOf")},
        ]
    for definition in schema["definitions"].values():
        for tag in TAGS:  # it chooses between tables, so it has to be written, unless left out for
            value = definition.get("properties", {}).get(tag, {}).get("const")  # the default
            if value is not None and value != _UNNAMED:
                definition["required"] = sorted({*definition.get("required", []), tag})
    return {"$schema": "http://json-schema.org/draft-07/schema#", **_plain_text(schema)}


def _plain_text(part: Any) -> Any:
    """Descriptions without the marks and line ends of docstrings, at any depth."""
    if isinstance(part, dict):
        return {
            key: _one_line(value)
            if key == "description" and isinstance(value, str)
            else _plain_text(value)
            for key, value in part.items()
        }
    return [_plain_text(item) for item in part] if isinstance(part, list) else part


def _one_line(text: str) -> str:
    return " ".join(text.replace("``", "`").split())


_HEAD = """# Configuration

<!-- Written by `make schema` from src/isobit/config; change the models there. -->

A recipe is a TOML file. `isobit train RECIPE.toml --training.steps 5` overrides any key of it;
`--print-config` prints what comes out, and `--dry-run` what the run would use and take. An unknown
key is an error that suggests the right one. `precision = "fp8"` is short for the table with that
preset, and `algorithm = "dapo"` for the one with that name ([algorithms](algorithms.md)). Where not
all kinds of a table have a key or a default, those are named. Relative paths are relative to the
directory in which the command runs. NAME is yours to choose.

An editor with Even Better TOML or taplo completes and checks a recipe whose first line names the
schema:

```toml
#:schema ../docs/run.schema.json
```

The path is relative to the recipe; `isobit schema > run.schema.json` writes the schema anywhere.
"""
_TITLES = {"train": "isobit train (run.schema.json)", "sft": "isobit sft (sft.schema.json)"}


def configuration_page() -> str:
    """The page: a table of keys for each table of each kind of recipe."""
    return _HEAD + "".join(
        f"\n## {_TITLES[command]}\n{_tables(model)}" for command, model in RECIPES.items()
    )


def _tables(model: type[BaseModel]) -> str:
    places = {name: place for place, name in enumerate(fields_by_key(model))}

    def order(
        key: Key,
    ) -> tuple[
        bool, int, int
    ]:  # keys of no table come first, and a table before those inside it, as in TOML
        parts = key.path.replace("[]", "").split(".")
        return len(parts) > 1, places[parts[0]] if len(parts) > 1 else 0, len(parts)

    sections = []
    for table, members in groupby(
        sorted(all_keys(model), key=order), key=lambda key: key.path.rpartition(".")[0]
    ):
        title = f"[[{table[:-2]}]]" if table.endswith("[]") else f"[{table}]"
        head = f"\n### {title}\n" if table else ""
        sections.append(
            "\n".join([head, "| key | takes | default | |", "|---|---|---|---|", *_rows(members)])
            + "\n"
        )
    return "".join(sections)


def _rows(keys: Iterator[Key]) -> Iterator[str]:
    for key in keys:
        name, kind, default = (
            key.path.rpartition(".")[2],
            key.kind.replace("|", "or"),
            f"`{key.default}`" if key.default else "",
        )
        yield f"| `{name}` | {kind} | {default} | {key.description.replace('|', 'or')} |"
