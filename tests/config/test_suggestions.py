"""A misspelt key or table of any recipe is refused with the right name, whatever tables are
added.
"""

import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from isobit.algorithms.registry import ALGORITHMS
from isobit.config.base import Strict
from isobit.config.commands import GenerationConfig
from isobit.config.foreign import foreign_answer, foreign_rows, foreign_values
from isobit.config.keys import all_keys, fields_by_key
from isobit.config.load import build, build_with
from isobit.config.recipes import RECIPES, RunConfig, SftConfig
from isobit.config.refusals import config_error
from isobit.util.errors import ConfigError
from tests.suites import evenly_spaced, examples

MINIMAL: Mapping[str, Any] = {"output": "x", "data": {"train": {"type": "jsonl", "path": "x"}}}
FOREIGN: Mapping[str, list[str]] = tomllib.loads(
    Path(__file__).with_name("foreign_recipes.toml").read_text(encoding="utf-8")
)
"""Names of keys in published recipes of other frameworks."""
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


@pytest.mark.few(1)
@pytest.mark.parametrize("command", RECIPES)
def test_every_misspelt_key_is_answered_with_the_right_one(command: str) -> None:
    model = RECIPES[command]
    keys = all_keys(model)
    for key in (keys[place] for place in evenly_spaced(len(keys), examples(len(keys)))):
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


@pytest.mark.exhaustive  # those of published recipes are below
def test_every_name_of_another_framework_is_answered() -> None:
    for row in (row for rows in foreign_rows().values() for row in rows):
        for framework, names in row.names.items():
            for name in names:
                prefixes = ["", "actor_rollout_ref."] if framework == "verl" else [""]
                for prefix in prefixes:
                    message = answered(f"{prefix}{name.replace('*', 'any')} = 1")
                    found = row.key or f"{name.removesuffix('.*')}): {row.say}"
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


def test_values_of_other_programs_are_answered_and_none_is_ours() -> None:
    for (key, value), said in foreign_values().items():
        model = RunConfig if key in {one.path for one in all_keys(RunConfig)} else SftConfig
        for written in (value, value.upper().replace("_", "-")):
            with pytest.raises(ConfigError) as error:
                build_with(model, MINIMAL, [f"--{key}", written], "my.toml")
            assert str(error.value).endswith(f"but it is {written!r}; {said}")
    for key in {key for key, _ in foreign_values()}:
        assert any(key in {one.path for one in all_keys(model)} for model in RECIPES.values())


@pytest.mark.parametrize(
    ("model", "key", "value", "answer"),
    [
        (RunConfig, "algorithm.name", "DPO", "; no loss of pairs trains a policy here: `isobit"),
        (SftConfig, "objective", "dpo", "; no loss of pairs trains a policy here: `isobit sft`"),
        (SftConfig, "objective", "Supervised", "; did you mean supervised?"),
        (RunConfig, "algorithm.name", "GRPO", "; did you mean grpo?"),
        (RunConfig, "precision", "bfloat16", "; did you mean bf16?"),
        (RunConfig, "training.schedule", "Cosine", "; did you mean cosine?"),
        (RunConfig, "rollout.special_tokens", "shown", "; did you mean show?"),
        (RunConfig, "rollout.engine", "zz", "but it is 'zz'"),
    ],
)
def test_a_word_that_a_key_does_not_take_is_answered(
    model: type[Strict], key: str, value: str, answer: str
) -> None:
    with pytest.raises(ConfigError) as error:
        build_with(model, MINIMAL, [f"--{key}", value], "my.toml")
    assert answer in str(error.value)
    assert "did you mean" in answer or "did you mean" not in str(error.value)


def refused(words: Sequence[str], values: Mapping[str, Any] = MINIMAL) -> str:
    with pytest.raises(ConfigError) as error:
        build_with(RunConfig, values, words, "my.toml")
    return str(error.value)


def test_all_flags_of_another_framework_are_answered_at_once() -> None:
    """Those without a value and those with two, with all keys of the file that are wrong."""
    words = (
        "odd --use_vllm --training.steps --colocate_all_models --eps_clip_low_high 0.2 0.27 "
        "--actor.eps_clip_low_high 0.2 0.27 +trainer.val_before_train=False --num_episodes 3"
    )
    message = refused(words.split(), {**MINIMAL, "training": {"stepz": 1}})
    assert message.startswith("my.toml: 9 settings cannot be used\n"), message
    for line in (
        "--training.steps has no value; write --training.steps VALUE",
        "use_vllm: unknown key; use rollout.engine (TRL: use_vllm): the native",
        "colocate_all_models: unknown key; use cluster.rollouters (OpenRLHF: col",
        "eps_clip_low_high: unknown key; use algorithm.clip_high (OpenRLHF: eps_clip_low_high): "
        "OpenRLHF's pair is algorithm.clip_low and algorithm.clip_high",
        "actor.eps_clip_low_high: unknown key; use algorithm.clip_high (OpenRLHF: actor.eps_clip_",
        "trainer.val_before_train: unknown key; leave it out (verl",
        "num_episodes: unknown key; use data.epochs (OpenRLHF",
        "training.stepz: unknown key; did you mean training.steps?",
    ):
        assert line in message, message


def test_a_second_value_of_a_key_of_ours_is_refused() -> None:
    assert "'0.27' is not an override" in refused(["--algorithm.clip_low", "0.2", "0.27"])
    words = ["--reward.options.strict", "--reward.options.names", "a", "b"]
    message = refused([*words, "--algorithm", "--corrections"])  # below a table of anything
    for line in (
        "--reward.options.strict has no value",
        "'b' is not an override",
        "--algorithm has no value",
        "--corrections has no value",
    ):
        assert line in message, message


@pytest.mark.parametrize(
    ("key", "table"),
    [
        ("algorithm.foo", '{name = "dapo"}'),
        ("precision.zap", '{preset = "bf16"}'),
        ("data.train.x", '{type = "jsonl", path = "b.jsonl"}'),
    ],
)
def test_a_flag_without_a_value_is_refused_though_a_later_table_replaces_it(
    key: str, table: str
) -> None:
    message = refused([f"--{key}", f"--{key.rpartition('.')[0]}", table])
    assert f"--{key} has no value; write --{key} VALUE" in message


def test_the_keys_of_a_table_are_listed_once() -> None:
    message = refused(
        ["--qqq", "1", "--zzz", "2", "--data.zzz", "3", "--data.qqq", "4", "--lr", "5"]
    )
    assert message.count("; a run has algorithm, async, ") == 1
    assert message.count("; data has chat, ") == 1
    assert "zzz: unknown key\n" in message and "lr: unknown key" in message.splitlines()[-1]


def test_a_list_of_answers_is_not_cut_and_says_each_reason_once() -> None:
    names = [name for rows in foreign_rows().values() for row in rows for name in row.all_names()]
    words = [f"--{name.removesuffix('.*')}=1" for name in names if "." not in name]
    message = refused(words)
    assert len(words) > 150 and len(message) > 10_000 and "left out]" not in message
    lines = message.splitlines()
    reasons = [line.partition("): ")[2] for line in lines if "): as for" not in line]
    long = [reason for reason in reasons if len(reason) > 20]
    assert len(long) > 40 and len(long) == len(set(long))


@pytest.mark.parametrize(
    "path",
    [
        "actor_rollout_ref.model.use_shn",
        "myframework.optim.lr",
        "trainer.model.lora.ranks",
        "inner.config.trainer.logger",
        "settings.num_generations",
        "n",
        "eps",
        "x.data.train_files",
        "outer.ref.model",
    ],
)
def test_nothing_is_said_of_the_end_of_a_strangers_key(path: str) -> None:
    assert foreign_answer(path, RunConfig) is None


@pytest.mark.parametrize("form", sorted(FOREIGN))
def test_every_key_of_a_published_recipe_is_answered(form: str) -> None:
    keys = FOREIGN[form]
    lines = dict(
        line.strip().split(": ", 1) for line in refused([f"--{key}=x" for key in keys]).splitlines()
    )
    for key in keys:
        said = lines.get(key, "should be: a key of ours")
        assert re.search(r"use |not here|leave it out|did you mean|only .* have|should be", said), (
            key
        )
    assert len(keys) > 10


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("actor_rollout_ref.model.use_shm", "leave it out (verl: model.use_shm)"),
        ("actor_rollout_ref.rollout.load_format", "leave it out (verl: rollout.load_format)"),
        ("checkpointing.keep_top_k", "use checkpoint.keep_best (NeMo RL: checkpointing.keep_top_k"),
        ("trainer.optim.lr", "use training.learning_rate (prime-rl: trainer.optim.lr)"),
        ("trainer.model.lora.rank", "use lora.rank (prime-rl: trainer.model.lora.rank)"),
        ("logger.gpu_monitoring.flush_interval", "leave it out (NeMo RL: logger.gpu_monitoring)"),
        ("inference.vllm.tool_call_parser", "use environment.format (prime-rl: inference.vllm.to"),
        ("inference.vllm.safetensors_load_strategy", "use rollout.engine_options (prime-rl: infe"),
        ("trl.beta", "use algorithm.kl_coefficient (TRL: beta)"),
        ("kl_loss_coef", "use algorithm.kl_coefficient (verl: actor.kl_loss_coef)"),
        ("ckpt", "use checkpoint.every (prime-rl: ckpt)"),
        ("ckpt.keep_last", "use checkpoint.keep_last (prime-rl: ckpt.keep_last)"),
        ("optim.lr_warmup_steps", "use training.warmup_updates (verl: optim.lr_warmup_steps)"),
        ("actor.megatron.seed", "not here (verl: actor.megatron): training is data-parallel"),
    ],
)
def test_a_name_is_matched_whole_or_by_its_table(name: str, answer: str) -> None:
    assert str(foreign_answer(name, RunConfig)).startswith(answer)


def test_a_table_in_the_place_of_a_key_of_ours_is_answered_by_its_keys() -> None:
    message = answered('model = { name = "a", lora = { rank = 8 } }')
    assert "model.name: unknown key; use model (prime-rl: model.name)" in message
    assert "model.lora.rank: unknown key; use lora.rank (verl and prime-rl: model.lora." in message
    assert "should be text" not in message
    message = answered("[data.train]\ndataset_name = 'a'\nsplit_validation_size = 0.05")
    assert "data.train.dataset_name: unknown key; use data.train.path (NeMo RL: data.tr" in message
    assert "data.train.split_validation_size: unknown key; not here (NeMo RL: data.train" in message
    message = answered('model = { nom = "a" }')
    assert "model: should be text, but it is {'nom': 'a'}" in message
    message = refused(["--model.name", "x"], {**MINIMAL, "model": "starter"})
    assert "model.name cannot be set: model is 'starter', not a table; use model (pri" in message


def test_each_key_of_a_list_of_tables_is_answered_once() -> None:
    message = answered(
        "[[orchestrator.train.source]]\nname = 'a'\n[[orchestrator.train.source]]\nname = 'b'\n"
        "ratio = 2.0"
    )
    assert message.count("orchestrator.train.source[].name: unknown key; use environment.ver") == 1
    assert "orchestrator.train.source[].ratio: unknown key; use data.train.weights" in message


def test_a_flag_with_dashes_is_answered_with_the_key_as_a_flag() -> None:
    with pytest.raises(ConfigError) as refused:
        build(GenerationConfig, {"top-k": 5, "max-sequences": 8, "lora-rank": 4}, "command line")
    message = str(refused.value)
    assert "top-k: unknown key; did you mean --rollout.top_k?" in message
    assert "max-sequences: unknown key; did you mean --rollout.max_sequences?" in message
    assert "lora-rank: unknown key; use lora.rank (isobit train) (OpenRLHF: lora_rank)" in message


@pytest.mark.parametrize(
    "name", ["source.group_size", "rollouts_per_example", "max_tokens_per_gpu", "num_workers"]
)
def test_the_end_of_names_that_mean_two_things_is_answered_by_neither(name: str) -> None:
    assert foreign_answer(name, RunConfig) is None
