"""A misspelt key or table of any recipe is refused with the right name, whatever tables are
added.
"""

from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from isobit.config.explain import config_error
from isobit.config.json_schema import RECIPES
from isobit.config.keys import all_keys

DATA_TYPES = ("reasoning_gym", "jsonl", "hf")


def refusal(model: type[BaseModel], path: list[str]) -> str:
    """What is said of a recipe that sets this one key."""
    source: dict[str, Any] = {}
    table = source
    for part in path[:-1]:
        table = table.setdefault("held_out" if part == "NAME" else part, {})
    table[path[-1]] = "x"
    messages = []
    for kind in DATA_TYPES:
        if path[0] == "data" and len(path) > 2:
            table["type"] = kind
        try:
            model.model_validate(source)
        except ValidationError as error:
            messages.append(str(config_error(error, model, "recipe")))
    return "\n".join(messages)


@pytest.mark.parametrize("command", RECIPES)
def test_every_misspelt_key_is_answered_with_the_right_one(command: str) -> None:
    model = RECIPES[command]
    for key in all_keys(model):
        path = key.path.split(".")
        misspelt = f"{path[-1]}z"
        right = key.path.replace("NAME", "held_out")
        message = refusal(model, [*path[:-1], misspelt])
        wrong = ".".join([*path[:-1], misspelt]).replace("NAME", "held_out")
        assert f"{wrong}: unknown key; did you mean {right}?" in message


@pytest.mark.parametrize("command", RECIPES)
def test_every_misspelt_table_is_answered_with_the_right_one(command: str) -> None:
    model = RECIPES[command]
    for name in model.model_fields:
        assert f"{name}s: unknown key; did you mean {name}?" in refusal(model, [f"{name}s", "x"])
