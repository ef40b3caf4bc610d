"""A misspelt key or table of any recipe is refused with the right name, whatever tables are
added.
"""

import re
import tomllib
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from isobit.algorithms.registry import ALGORITHMS
from isobit.config.base import Strict
from isobit.config.load import build, config_error, foreign_rows, parse_overrides
from isobit.config.recipes import (
    RECIPES,
    GenerationConfig,
    RunConfig,
    SftConfig,
    all_keys,
    fields_by_key,
)
from isobit.util.errors import ConfigError

CHOICES = {
    "data": (
        "type",
        ("reasoning_gym", "jsonl", "csv", "parquet", "hf", "hub", "verifiers", "rows", "mixture"),
    ),
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


def answered(text: str, model: type[Strict] = RunConfig) -> str:
    with pytest.raises(ConfigError) as refused:
        build(model, {"output": "x", "data": {}} | tomllib.loads(text), "recipe")
    return str(refused.value)


def test_every_name_of_another_framework_is_answered() -> None:
    for row in (row for rows in foreign_rows().values() for row in rows):
        for framework, names in row.names.items():
            for name in names:
                prefixes = ["", "actor_rollout_ref."] if framework == "verl" else [""]
                for prefix in prefixes:
                    message = answered(f"{prefix}{name} = 1")
                    found = row.key or f"{name}): {row.say}"
                    taken = f"{prefix}{name}".partition(".")[0] in RunConfig.model_fields
                    assert found in message or taken, message


def test_each_name_in_an_unknown_table_is_answered() -> None:
    message = answered(
        "[actor_rollout_ref.rollout]\nn = 8\nfoo = 1\n[actor_rollout_ref.actor.optim]\nlr = 1e-6\n"
        "[lora]\nr = 16\nrank = 3"
    )
    for line in (
        "actor_rollout_ref.rollout.n: unknown key; use training.samples_per_prompt (verl: rollout",
        "actor_rollout_ref.rollout.foo: unknown key\n",
        "actor_rollout_ref.actor.optim.lr: unknown key; use training.learning_rate (verl: ",
        "lora.r: unknown key; use lora.rank (TRL: r)",
    ):
        assert line in message


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("beta = 0.1", "beta: unknown key; use algorithm.kl_coefficient (TRL: beta)"),
        (
            "[training]\nwarmup_steps = 10",
            "use training.warmup_updates (TRL: warmup_steps)",
        ),
        (
            "use_vllm = true",
            "use_vllm: unknown key; use rollout.engine (TRL: use_vllm): the native",
        ),
        ("[algorithm]\nepsilon = 0.2", "algorithm.epsilon: unknown key; use algorithm.clip_low"),
        ("[training]\ntemperature = 1", "training.temperature: unknown key; did you mean rollout."),
        ("[algorithm]\nname = 'grpo'\ngamma = 1", "only reinforce_pp and ppo have it"),
        ("[training]\nstepz = 1", "training.stepz: unknown key; did you mean training.steps?"),
        ("[rollout]\ntensor_model_parallel_size = 2", "share an engine with cluster.rollout_tp"),
        ("[hub]\nrepo = 'a/b'", "hub.repo: unknown key; not here (TRL: hub): no key pushes"),
        ("[tracking]\nentity = 'me'", "tracking.entity: unknown key; not here (NeMo RL: logger.w"),
        ("[tracking]\nmlflow = true", 'mlflow: unknown key; write tracking.to = ["mlflow"]'),
        ("[tracking]\ntensorboard = true", 'unknown key; write tracking.to = ["tensorboard"]'),
        (
            "[data.train]\ntype = 'mixture'\n[data.train.sources.a]\ntype = 'jsonl'\npath = 'x'\n"
            "weight = 3",
            "data.train.sources.a.weight: unknown key; did you mean data.train.weights?",
        ),
        (
            "[data.train]\ntype = 'mixture'\n[data.train.sets.a]\ntype = 'jsonl'\npath = 'x'",
            "data.train.sets: unknown key; data.train has ",
        ),
    ],
)
def test_names_are_answered_where_they_stand(text: str, answer: str) -> None:
    assert answer in answered(text)


def test_a_name_of_our_own_in_an_unknown_table_is_not_taken_for_another_frameworks() -> None:
    """``type`` is the last part of verl's ``algorithm.kl_ctrl.type`` too."""
    listed = {
        name
        for rows in foreign_rows().values()
        for row in rows
        for names in row.names.values()
        for name in names
    }
    for name in {key.path.rpartition(".")[2] for key in all_keys(RunConfig)} - listed:
        message = answered(f"[mine.below]\n{name.removesuffix('[]')} = 1")
        assert not re.search(r"not here|leave it out", message), message


def test_a_name_without_a_key_of_this_command_says_of_which() -> None:
    message = answered("num_generations = 8", SftConfig)
    assert "use training.samples_per_prompt (isobit train) (TRL: num_generations)" in message


def test_a_flag_of_another_framework_without_a_value_is_answered() -> None:
    with pytest.raises(ConfigError, match=r"--use_vllm has no value; use rollout\.engine \(TRL"):
        parse_overrides(["--use_vllm"])
    with pytest.raises(
        ConfigError, match=r"--training.steps has no value; write --training.steps V"
    ):
        parse_overrides(["--training.steps"])


def test_a_flag_with_dashes_is_answered_with_the_key_as_a_flag() -> None:
    with pytest.raises(ConfigError) as refused:
        build(GenerationConfig, {"top-k": 5, "max-sequences": 8, "lora-rank": 4}, "command line")
    message = str(refused.value)
    assert "top-k: unknown key; did you mean --rollout.top_k?" in message
    assert "max-sequences: unknown key; did you mean --rollout.max_sequences?" in message
    assert "lora-rank: unknown key; use lora.rank (isobit train) (OpenRLHF: lora_rank)" in message
