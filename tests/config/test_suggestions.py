"""A misspelt key or table of any recipe is refused with the right name, whatever tables are
added.
"""

from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from isobit.algorithms.registry import ALGORITHMS
from isobit.config.load import config_error
from isobit.config.schema import RECIPES, all_keys, fields_by_key

CHOICES = {
    "data": ("type", ("reasoning_gym", "jsonl", "csv", "parquet", "hf", "hub", "rows", "mixture")),
    "algorithm": ("name", (*ALGORITHMS, "custom")),
    "corrections[]": ("type", ("tis", "mis", "icepop", "k3", "normalise")),
}


def refusal(model: type[BaseModel], path: list[str]) -> str:
    """What is said of a recipe that sets this one key, in a table of each kind."""
    source: dict[str, Any] = {}
    table = source
    for part in path[:-1]:
        if part.endswith("[]"):
            table = table.setdefault(part[:-2], [{}])[0]
        else:
            if part == "sources":
                table["type"] = "mixture"
            table = table.setdefault("held_out" if part == "NAME" else part, {})
    table[path[-1]] = "x"
    messages = []
    key, kinds = CHOICES.get(path[0], ("", ("",)))
    for kind in kinds:
        if key and path[:-1] != ["data"]:
            table[key] = kind
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
        right = key.path.replace("NAME", "held_out").replace("[]", ".0")
        message = refusal(model, [*path[:-1], misspelt])
        wrong = ".".join([*path[:-1], misspelt]).replace("NAME", "held_out").replace("[]", ".0")
        assert f"{wrong}: unknown key; did you mean {right}?" in message


@pytest.mark.parametrize("command", RECIPES)
def test_every_misspelt_table_is_answered_with_the_right_one(command: str) -> None:
    model = RECIPES[command]
    for name in fields_by_key(model):
        assert f"{name}s: unknown key; did you mean {name}?" in refusal(model, [f"{name}s", "x"])


def test_a_key_of_another_choice_is_answered_with_those_that_have_it() -> None:
    message = refusal(RECIPES["train"], ["algorithm", "gamma"])
    assert "algorithm.gamma: unknown key; only reinforce_pp and ppo have it" in message
    message = refusal(RECIPES["train"], ["corrections[]", "level"])
    assert "corrections.0.level: unknown key; only tis, mis and k3 have it" in message
    message = refusal(RECIPES["train"], ["data", "train", "path"])
    assert "data.train.path: unknown key; only jsonl, csv, parquet and hf have it" in message
