"""What is said of values, tables and recipes in the wrong place."""

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from isobit.config.base import Strict
from isobit.config.foreign import common_names
from isobit.config.keys import all_keys
from isobit.config.load import build, load_recipe
from isobit.config.recipes import RECIPES, RunConfig, SftConfig
from isobit.util.errors import ConfigError

BEGIN = "output = 'x'\n"
DATA = "data.train = { type = 'jsonl', path = 'x' }\n"


def refused(text: str, model: type[Strict] = RunConfig) -> list[str]:
    with pytest.raises(ConfigError) as error:
        build(model, tomllib.loads(text), "recipe")
    return [line.strip().removeprefix("recipe: ") for line in str(error.value).splitlines()]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("tracking.completions = 'some'", "completions: should be a whole number or 'all', but"),
        (
            "tracking.completions = -1",
            "should be greater than or equal to 0 or 'all', but it is -1",
        ),
        ("tracking.wandb = 3", "tracking.wandb: should be true or false or text, but it is 3"),
        ("checkpoint.on_save = 3", "checkpoint.on_save: should be text or a list, but it is 3"),
        ("checkpoint.on_save = ['a', 3]", "checkpoint.on_save.1: should be text, but it is 3"),
        (
            "check.on_mismatch = 'x'",
            "check.on_mismatch: should be 'auto', 'warn', 'stop' or 'ignore', but it is 'x'",
        ),
        (
            "data.eval.a = { type = 'csv', path = 3 }",
            "data.eval.a.path: should be a path or a list of paths, but it is 3",
        ),
    ],
)
def test_a_key_of_several_kinds_is_named_once_without_them(text: str, said: str) -> None:
    (line,) = refused(f"{BEGIN}{DATA}{text}")
    assert said in line


@pytest.mark.parametrize(
    ("text", "name", "keys"),
    [
        ("data.eval = { type = 'jsonl', path = 'held.jsonl' }", "data.eval", "type and path"),
        ("data.eval = { task = 'gcd' }", "data.eval", "task"),
        ("reward.parts = { model = 'a/b', weight = 2 }", "reward.parts", "model and weight"),
        (
            "data.eval.a = { type = 'mixture', sources = { type = 'jsonl', path = 'x' } }",
            "data.eval.a.sources", "type and path",
        ),
    ],
)  # fmt: skip
def test_a_table_that_lacks_its_name_is_answered_with_it(text: str, name: str, keys: str) -> None:
    (line,) = refused(f"{BEGIN}{DATA}{text}")
    assert line == (
        f"{name}.NAME: missing; {keys} cannot stand in {name} itself: choose a name, and write "
        f"[{name}.NAME] above them"
    )


def test_a_value_in_the_place_of_named_tables_is_told_of_the_name() -> None:
    (line,) = refused(f"{BEGIN}{DATA}data.eval = 'held.jsonl'")
    assert line == (
        "data.eval: should be a table with a table data.eval.NAME in it, but it is 'held.jsonl'"
    )


def test_a_table_in_the_place_of_text_leaves_what_is_missing_alone() -> None:
    model, missing = sorted(refused(f"{BEGIN}[model]\npath = 'starter'")[1:], reverse=True)
    assert model == "model.path: unknown key; use model (verl: model.path)"
    assert missing == "data: missing; set it in the file, as a table [data]"
    assert [line for line in refused("[model]\npath = 'x'")[1:] if "data.model" in line] == []
    only = [line for line in refused("lr = 3") if ": missing" in line]
    assert len(only) == 2 and "output: missing; set it in the file or with --output VALUE" in only


@pytest.mark.parametrize("command", RECIPES)
@pytest.mark.parametrize("table", ["", "training."])
def test_common_names_of_other_trainers_are_answered_in_every_table(
    command: str, table: str
) -> None:
    model = RECIPES[command]
    keys = {key.path for key in all_keys(RunConfig)} | {key.path for key in all_keys(SftConfig)}
    for name, key in common_names(model).items():
        assert key in keys, key
        if f"{table}{name}" in {ours.path for ours in all_keys(model)}:
            continue
        lines = refused(f"{BEGIN}{DATA}{table}{name} = 3", model)
        said = re.escape(f"{table}{name}: unknown key; ") + f".*use {re.escape(key)}"
        assert any(re.search(said, line) for line in lines), lines


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("training.lr = 3", "training.learning_rate"),
        ("[optimizer]\nlr = 3", "training.learning_rate"),
        ("batch_size = 3", "training.prompts_per_step"),
        ("rollout.max_tokens = 3", "rollout.max_new_tokens"),
        ("algorithm.name = 'grpo'\nalgorithm.kl_coeff = 3", "algorithm.kl_coefficient"),
        ("training.num_epochs = 3", "data.epochs"),
        ("num_gpus = 3", "cluster.processes"),
        ("training.save_every = 3", "checkpoint.every"),
    ],
)
def test_a_common_name_is_answered_with_our_key(text: str, key: str) -> None:
    (line,) = refused(f"{BEGIN}{DATA}{text}")
    assert f"unknown key; use {key}" in line and len(line) < 120


def read(command: str, text: str, folder: Path) -> str:
    path = folder / "recipe.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as error:
        load_recipe(RECIPES[command], path)
    return str(error.value)


RL: dict[str, Any] = {
    "train": f"{BEGIN}{DATA}training.samples_per_prompt = 8\nasync.lag = 1",
    "sft": f"{BEGIN}{DATA}objective = 'preference'\ndata.max_tokens = 100",
}


@pytest.mark.parametrize(("command", "other"), [("sft", "train"), ("train", "sft")])
def test_a_recipe_of_the_other_command_is_said_to_be(
    command: str, other: str, tmp_path: Path
) -> None:
    message = read(command, RL[other], tmp_path)
    assert message.count(f"unknown key; only a recipe of `isobit {other}` has it") == 2
    assert f"isobit {other} takes this recipe as it is" in message
    assert "training has" not in message and "a run has" not in message
    message = read(command, f"{RL[other]}\nstepz = 3", tmp_path)
    assert "as it is" not in message and f"only a recipe of `isobit {other}`" in message
