"""The published schema and page are current, take every recipe, and refuse what the configuration
refuses.
"""

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from isobit.cli.main import main
from isobit.cli.schema import configuration_page
from isobit.config.keys import all_keys, locate
from isobit.config.load import load_recipe
from isobit.config.recipes import RECIPES, RunConfig
from isobit.config.schema import json_schema
from isobit.config.training import TrainingConfig

ROOT = Path(__file__).parents[2]
FILES = {"train": "run.schema.json", "sft": "sft.schema.json"}
COMMANDS = {file: command for command, file in FILES.items()}
TOML_TYPES = {
    "string": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "object": dict,
    "array": list,
    "null": type(None),
}


def accepts(schema: dict[str, Any], value: Any, root: dict[str, Any]) -> bool:
    """As much of a validator as these schemas need."""
    if "$ref" in schema:
        return accepts(root["definitions"][schema["$ref"].rpartition("/")[2]], value, root)
    if "anyOf" in schema:
        return any(accepts(option, value, root) for option in schema["anyOf"])
    if "oneOf" in schema:
        return sum(accepts(option, value, root) for option in schema["oneOf"]) == 1
    if isinstance(value, bool) and schema.get("type") != "boolean":
        return False
    if "type" in schema and not isinstance(value, TOML_TYPES[schema["type"]]):
        return False
    if ("const" in schema and value != schema["const"]) or (
        "enum" in schema and value not in schema["enum"]
    ):
        return False
    return (
        accepts_table(schema, value, root)
        if isinstance(value, dict)
        else in_range(schema, value, root)
    )


def accepts_table(schema: dict[str, Any], value: dict[str, Any], root: dict[str, Any]) -> bool:
    properties, others = schema.get("properties", {}), schema.get("additionalProperties", True)
    if set(schema.get("required", [])) - set(value):
        return False
    parts = [(properties.get(key, others), part) for key, part in value.items()]
    return all(
        part if isinstance(part, bool) else accepts(part, item, root) for part, item in parts
    )


def in_range(schema: dict[str, Any], value: Any, root: dict[str, Any]) -> bool:
    if isinstance(value, list):
        return all(accepts(schema.get("items", {}), item, root) for item in value)
    bounds = {"minimum": lambda x, y: x >= y, "maximum": lambda x, y: x <= y}
    bounds |= {"exclusiveMinimum": lambda x, y: x > y, "exclusiveMaximum": lambda x, y: x < y}
    return all(holds(value, schema[name]) for name, holds in bounds.items() if name in schema)


@pytest.mark.parametrize("command", RECIPES)
def test_the_published_schema_is_current(command: str) -> None:
    written = json.loads((ROOT / "docs" / FILES[command]).read_text(encoding="utf-8"))
    assert written == json_schema(RECIPES[command]), "the models have changed: run make schema"


def test_the_page_of_all_keys_lists_every_key() -> None:
    page = configuration_page()
    assert all(
        f"| `{key.path.rpartition('.')[2]}` |" in page
        for model in RECIPES.values()
        for key in all_keys(model)
    )
    assert all(len(line.split(" | ")) == 4 for line in page.splitlines() if line.startswith("| `"))


@pytest.mark.few(6)
@pytest.mark.parametrize(
    "recipe", sorted((ROOT / "recipes").glob("*.toml")), ids=lambda path: path.stem
)
def test_every_recipe_names_its_schema_and_fits_it(recipe: Path) -> None:
    text = recipe.read_text(encoding="utf-8")
    first = text.splitlines()[0]
    assert first.startswith("#:schema ../docs/")
    model = RECIPES[COMMANDS[first.rpartition("/")[2]]]
    schema = json_schema(model)
    assert (recipe.parent / first.removeprefix("#:schema ")).is_file()
    assert accepts(schema, tomllib.loads(text), schema)
    assert isinstance(load_recipe(model, recipe), model)


@pytest.mark.few(5)
@pytest.mark.parametrize(
    "wrong",
    [
        {"training": {"stepz": 5}},
        {"training": {"steps": 0}},
        {"rollout": {"min_p": 1.0}},
        {"precision": "fp9"},
        {"precision": {"preset": "fp8", "wgrad": "fp4"}},
        {"data": {"train": {"task": "chain_sum"}}},
        {"data": {"train": {"type": "jsonl", "task": "chain_sum"}}},
        {"modell": "starter"},
    ],
)
def test_the_schema_refuses_what_the_configuration_refuses(wrong: dict[str, Any]) -> None:
    schema = json_schema(RunConfig)
    recipe = {
        "output": "runs/x",
        "precision": {"preset": "fp8"},
        "data": {"train": {"type": "jsonl", "path": "x.jsonl"}},
    }
    assert accepts(schema, recipe, schema)
    RunConfig.model_validate(recipe)
    assert not accepts(schema, {**recipe, **wrong}, schema)
    with pytest.raises(ValueError, match="validation error"):
        RunConfig.model_validate({**recipe, **wrong})


def test_every_setting_is_listed_once_with_what_it_takes():
    keys = {key.path: key for key in all_keys(RunConfig)}
    assert len(keys) == len(list(all_keys(RunConfig)))
    assert {f"training.{name}" for name in TrainingConfig.model_fields} <= set(keys)
    assert (keys["training.steps"].kind, keys["training.steps"].default) == ("int", "20")
    assert keys["precision.wgrad"].kind == "fp8 | int8 | bf16"
    assert keys["rollout.stop_strings"].kind == "list of str"
    assert keys["data.shuffle"].default == "true"
    assert keys["threads"].default == ""
    assert keys["threads"].description.startswith("CPU threads")


def test_a_choice_of_models_is_merged_under_one_path_and_free_names_show_as_name():
    keys = {key.path: key for key in all_keys(RunConfig)}
    kinds = "reasoning_gym | jsonl | csv | parquet | hf | hub | verifiers | rows"
    assert keys["data.train.type"].kind == f"{kinds} | mixture"
    assert keys["data.train.sources.NAME.type"].kind == kinds
    assert keys["data.train.path"].kind == "path | list of path"
    assert {"data.eval.NAME.task", "data.eval.NAME.path", "data.eval.NAME.split"} <= set(keys)


def test_a_location_leaves_out_the_type_and_knows_the_keys_of_its_table():
    place = locate(RunConfig, ("data", "eval", "held", "jsonl", "limt"))
    assert place.path == "data.eval.held.limt"
    assert place.siblings == ["limit", "path", "prompt", "system", "tools", "type"]


def test_a_location_inside_a_free_table_or_a_list_has_no_known_keys():
    for location, path in (
        (("data", "train", "reasoning_gym", "options", "x"), "data.train.options.x"),
        (("rollout", "stop_strings", 1), "rollout.stop_strings.1"),
    ):
        place = locate(RunConfig, location)
        assert (place.path, place.siblings) == (path, [])


@pytest.mark.parametrize("command", RECIPES)
def test_the_schema_of_a_recipe_is_printed(command, capsys):
    assert main(["schema", command]) == 0
    assert json.loads(capsys.readouterr().out) == json_schema(RECIPES[command])


def test_the_page_is_printed(capsys):
    assert main(["schema", "--markdown"]) == 0
    assert capsys.readouterr().out == configuration_page()
