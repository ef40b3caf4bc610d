"""Input that cannot be used is refused by name, and nothing is written."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from isobit.commands.dry_run import plan_training
from isobit.commands.evaluate import evaluate_folder
from isobit.config.recipes import RunConfig
from isobit.config.rollout import RunRolloutConfig
from isobit.run.loop import train
from isobit.run.resolved import resolve, settled
from isobit.run.rl_run import read_rl
from isobit.util.errors import (
    ConfigError,
    DataError,
    IsobitError,
    ModelError,
    RequestError,
    RewardError,
)
from tests.tiny import save_tiny, tiny_model

MakeConfig = Callable[..., RunConfig]


def refused(config: RunConfig, kind: type[IsobitError], match: str) -> None:
    with pytest.raises(kind, match=match):
        train(config)
    assert not config.output.exists()


@pytest.mark.parametrize(
    ("sections", "kind", "match"),
    [
        (
            {"algorithm": {"kl_coefficient": 0.1, "kl_estimator": "k1"}},
            ConfigError,
            "algorithm.kl_coefficient is 0.1",
        ),
        ({"rollout": {"temperature": 0.0}}, ConfigError, "rollout.temperature is 0"),
        (
            {"rollout": {"max_new_tokens": 250}},
            DataError,
            "prompt train/0 .* has 9 tokens.*259.*context of 256.*to 247",
        ),
        ({"evaluation": {"max_new_tokens": 250}}, DataError, "prompt held_out/0 .* has 9 tokens"),
        (
            {"rollout": {"max_new_tokens": 100, "kv_pages": 1}},
            RequestError,
            "2 pages of 64 tokens, and the KV cache has 1",
        ),
        ({"rollout": {"kv_memory_gib": 1e-9}}, ConfigError, "rollout.kv_memory_gib"),
        (
            {"training": {"updates_per_batch": 3}},
            ConfigError,
            "training.updates_per_batch is 3, but a step has 2 prompts",
        ),
        (
            {"evaluation": {"samples": 4}},
            ConfigError,
            "evaluation.samples is 4, but evaluation.temperature is 0",
        ),
        (
            {"precision": {"modules_bf16": ["mlp"]}},
            ConfigError,
            "names 'mlp', which the model does not have",
        ),
        (
            {"data": {"max_prompt_tokens": 8}},
            DataError,
            "prompt train/0 .* has 9 tokens, more than data.max_prompt_tokens = 8",
        ),
        ({"checkpoint": {"keep_best": "eval/no/accuracy"}}, ConfigError, "checkpoint.keep_best"),
        ({"reward": "no_such_module:reward"}, RewardError, "no_such_module"),
        ({"model": "no/such/folder"}, ModelError, "no/such/folder is not a folder"),
    ],
)
def test_what_cannot_be_used(
    make_config: MakeConfig, sections: dict[str, Any], kind: type[IsobitError], match: str
) -> None:
    """By a run, and by its dry run."""
    config = make_config(**sections)
    refused(config, kind, match)
    with pytest.raises(kind, match=match):
        plan_training(config, read_rl)


def test_the_reward_of_other_data(make_config: MakeConfig) -> None:
    config = make_config("reasoning_gym")
    refused(config, RewardError, "16 of the 16 prompts of data.train come from none")


@pytest.mark.parametrize(
    ("function", "missing"),
    [
        ("f(completions, solution): return [0.0 for _ in completions]", "'solution'"),
        ("f(data_source, solution_str, ground_truth): return 0.0", "'data_source'"),
    ],
)
def test_a_reward_of_columns_that_the_data_lack(
    make_config: MakeConfig, tiny_folder: Path, tmp_path: Path, function: str, missing: str
) -> None:
    """Before anything is sampled, and by whatever grades."""
    file = tmp_path / "mine.py"
    file.write_text(f"def {function}\n", encoding="utf-8")
    match = f"takes {missing}, which 16 of the 16 prompts of data.train do not have"
    alone = make_config(f"{file}:f", data={"eval": {}})
    refused(alone, RewardError, match)
    with pytest.raises(RewardError, match=match):
        plan_training(alone, read_rl)
    with pytest.raises(RewardError, match=f"takes {missing}, which 5 of the 5 prompts of "):
        evaluate_folder(tiny_folder, make_config(f"{file}:f"))


def test_a_used_directory_is_refused_and_left_as_it_was(make_config: MakeConfig) -> None:
    config = make_config()
    config.output.mkdir()
    (config.output / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="already holds files"):
        train(config)
    assert [(file.name, file.read_text()) for file in config.output.iterdir()] == [
        ("notes.txt", "mine")
    ]


def test_a_dataset_without_rows(make_config: MakeConfig, tmp_path: Path) -> None:
    path = tmp_path / "empty.jsonl"
    path.touch()
    source = {"type": "jsonl", "path": path}
    for data in ({"train": source}, {"eval": {"none": source}}):
        refused(make_config(data=data), DataError, "empty.jsonl has no rows")


def test_training_prompts_that_are_all_evaluated(make_config: MakeConfig) -> None:
    source = {"type": "jsonl", "path": "starter:train.jsonl", "limit": 4}
    refused(
        make_config(data={"train": source, "eval": {"same": source}}),
        DataError,
        "also stand in an evaluation set",
    )


def test_a_prompt_longer_than_the_context(make_config: MakeConfig, tmp_path: Path) -> None:
    path = tmp_path / "long.jsonl"
    path.write_text(json.dumps({"prompt": "1+" * 200, "answer": "0"}) + "\n")
    refused(
        make_config(data={"train": {"type": "jsonl", "path": path}}),
        DataError,
        "prompt train/0 .* no room in the model's context of 256",
    )


@pytest.mark.parametrize("body", ["raise KeyError('answer')", "return float('nan')", "return None"])
def test_a_reward_that_always_fails(
    make_config: MakeConfig, write_reward: Callable[[str], str], body: str
) -> None:
    refused(make_config(write_reward(body)), RewardError, "5 of 5 rewards failed")


def test_damaged_models(make_config: MakeConfig, tiny_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_folder, folder)
    config, weights = folder / "config.json", folder / "model.safetensors"
    good_config, good_weights = config.read_text(), weights.read_bytes()
    config.write_text(good_config.replace("Qwen3ForCausalLM", "MambaForCausalLM"))
    refused(make_config(model=str(folder)), ModelError, r"MambaForCausalLM'\] is not supported")
    config.write_text(good_config)
    weights.write_bytes(good_weights[: len(good_weights) // 2])
    refused(make_config(model=str(folder)), ModelError, "model.safetensors is damaged")
    weights.unlink()
    refused(make_config(model=str(folder)), ModelError, "model.safetensors")
    tensors = load_file(tiny_folder / "model.safetensors")
    save_file(tensors | {"model.norm.weight": torch.ones(64)}, weights)
    refused(make_config(model=str(folder)), ModelError, r"model.norm.weight has the shape \(64,\)")


@pytest.mark.parametrize("context", [128, 256, 1022, 1024, 4096])
def test_completions_are_at_most_half_of_a_small_context(
    context: int, make_config: Callable[..., RunConfig], tmp_path: Path
) -> None:
    """F10: README's recipe was refused with the only model at hand, whose context is 512."""
    model = str(save_tiny(tmp_path / "model", tiny_model(max_positions=context)))
    config = make_config(model=model)
    unset = config.model_copy(update={"rollout": RunRolloutConfig()})
    said: list[str] = []
    made = settled(resolve(unset), read_rl, said.append).config
    assert made.rollout.max_new_tokens == min(512, context // 2)
    assert said == (
        [
            f"completions have at most {context // 2} tokens, half of the model's context; another "
            "limit is rollout.max_new_tokens"
        ]
        if context < 1024
        else []
    )
    assert settled(resolve(made), read_rl, said.append).config == made
    assert settled(resolve(config), read_rl).config == config, "what the recipe says stays"
    assert plan_training(unset, read_rl).plan.config == made


@pytest.mark.parametrize(("epochs", "steps"), [(0.1, 1), (1, 8), (2.5, 20), (3, 24)])
def test_epochs_are_as_many_steps_as_they_need(
    epochs: float, steps: int, make_config: Callable[..., RunConfig]
) -> None:
    config = make_config(data={"epochs": epochs})
    training = config.training.model_copy()
    training.model_fields_set.discard("steps")
    said: list[str] = []
    recipe = resolve(config.model_copy(update={"training": training}))
    recipe = settled(recipe, read_rl, said.append)
    made = recipe.config
    assert made.training.steps == steps
    assert recipe.data is not None
    assert read_rl(recipe).data is recipe.data, "read once"
    assert said == [f"data.epochs = {epochs:g} of 16 prompts: {steps} steps of 2"]
    assert settled(resolve(made), read_rl).config == made
