"""The JSON schema of a recipe (draft 7), from which editors of TOML complete and check it."""

from typing import Any, get_args

from pydantic import BaseModel

from isobit.config.algorithm import GrpoConfig
from isobit.config.keys import TAGS
from isobit.config.precision import Preset


def json_schema(model: type[BaseModel]) -> dict[str, Any]:
    schema = model.model_json_schema(ref_template="#/definitions/{model}")
    schema["definitions"] = schema.pop("$defs")
    preset = {"type": "string", "enum": list(get_args(Preset)), "description": "A preset alone."}
    precision = schema["properties"]["precision"]
    precision["anyOf"] = [preset, {"$ref": precision.pop("$ref")}]
    if "algorithm" in schema["properties"]:
        algorithm = schema["properties"]["algorithm"]
        algorithm.pop("discriminator")
        algorithm["anyOf"] = [
            {"type": "string", "description": "An algorithm's name alone, or FILE.py:CLASS."},
            {"oneOf": algorithm.pop("oneOf")},
        ]
    for definition in schema["definitions"].values():
        for tag in TAGS:  # required, except for the default
            value = definition.get("properties", {}).get(tag, {}).get("const")
            if value not in (None, GrpoConfig().name):  # of a table that gives none
                definition["required"] = sorted({*definition.get("required", []), tag})
    return {"$schema": "http://json-schema.org/draft-07/schema#", **_plain_text(schema)}


def _plain_text(part: Any) -> Any:
    """Descriptions without markup and line ends, at any depth."""
    if isinstance(part, dict):
        return {
            key: " ".join(value.replace("``", "`").split())
            if key == "description" and isinstance(value, str)
            else _plain_text(value)
            for key, value in part.items()
        }
    return [_plain_text(item) for item in part] if isinstance(part, list) else part
