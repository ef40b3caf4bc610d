"""The configuration as a JSON schema (draft 7, which editors of TOML know), from which editors
complete and check a recipe.

A TOML file that starts with ``#:schema PATH`` is completed by Even Better TOML, taplo and what
builds on them.  The files are ``docs/run.schema.json`` (``isobit train``) and
``docs/sft.schema.json`` (``isobit sft``).
"""

from typing import Any, get_args

from pydantic import BaseModel

from isobit.config.algorithm import GrpoConfig
from isobit.config.base import Strict
from isobit.config.keys import TAGS
from isobit.config.precision import Preset
from isobit.config.run import RunConfig
from isobit.config.sft import SftConfig

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
