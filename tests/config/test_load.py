import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isobit.config.algorithm import CustomConfig, DapoConfig, GrpoConfig, RlooConfig
from isobit.config.corrections import NormaliseCorrection, TisCorrection
from isobit.config.data import JsonlData
from isobit.config.keys import all_keys
from isobit.config.load import (
    Override,
    apply_overrides,
    dump_config,
    load_config,
    nested_overrides,
    read_words,
)
from isobit.config.precision import PrecisionConfig, precision_name
from isobit.config.recipes import RunConfig, SftConfig
from isobit.config.reward import RewardConfig
from isobit.util.errors import ConfigError

MINIMAL = """
output = "runs/x"
[data.train]
type = "reasoning_gym"
task = "chain_sum"
"""


@pytest.fixture
def recipe(tmp_path):
    def write(text: str) -> Path:
        path = tmp_path / "recipe.toml"
        path.write_text(text)
        return path

    return write


def refusal(path: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    return str(caught.value)


def test_defaults_are_below_the_file_and_the_file_is_below_the_overrides(recipe):
    path = recipe(MINIMAL + "[training]\nsteps = 7\nepochs = 2\n")
    training = load_config(path, ["--training.steps", "9"]).training
    assert (training.steps, training.epochs, training.updates_per_batch) == (9, 2, 1)


def test_paths_stay_as_written_relative_to_the_current_directory(recipe):
    path = recipe('output = "runs/x"\n[data.train]\ntype = "jsonl"\npath = "data/a.jsonl"\n')
    source = load_config(path).data.train
    assert isinstance(source, JsonlData)
    assert source.path == Path("data/a.jsonl")


PATHS = ["output", "data.train.path", "data.eval.a.path", "data.eval.b.path", "data.eval.c.path"]
PATHS += ["rollout.weights_folder"]
NAMES = ["model", "reference.model", "reward.function", "reward.model", "algorithm.source"]
NAMES += ["reward.parts.a.function", "reward.parts.a.model", "teacher.model"]
HOMELESS = """
output = "out"
[data.train]
type = "jsonl"
path = "a"
[data.eval.a]
type = "csv"
path = "a"
[data.eval.b]
type = "parquet"
path = "a"
[data.eval.c]
type = "hf"
path = "a"
[algorithm]
name = "custom"
source = "a.py:A"
"""


@pytest.mark.parametrize("key", PATHS + NAMES)
def test_the_home_directory_in_every_path_and_name(key, recipe, monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")

    def value(word: str) -> str:
        found: Any = load_config(recipe(HOMELESS), [f"--{key}", word]).model_dump(mode="json")
        for part in key.split("."):
            found = found[part]
        return found

    assert value("~/x/y") == "/home/me/x/y"
    assert value("~") == "/home/me"
    assert value("./~/x") == ("./~/x" if key in NAMES else str(Path.cwd() / "~/x"))
    assert value("x/~") == "x/~"
    message = refusal(recipe(HOMELESS), f"--{key}", "~nobody-here/x")
    assert f"{key}: begins with ~nobody-here, and there is no such home directory" in message


def test_no_key_with_a_path_is_forgotten():
    """A new key of type Path must be a HomePath; names of models and functions are in NAMES."""
    for model in (RunConfig, SftConfig):
        for key in all_keys(model):
            if "path" in key.kind or key.path.rpartition(".")[2] == "output":
                part = key.path.rpartition(".")[2]
                assert part in ("output", "path") or key.path in PATHS, key
            if key.path.rpartition(".")[2] in ("model", "function", "source"):
                assert key.path.replace("NAME", "a") in NAMES, key


def test_lists_of_paths_are_expanded_and_written_back(recipe, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    path = recipe('output = "o"\n[data.train]\ntype = "jsonl"\npath = ["~/a*", "b.gz"]\n')
    config = load_config(path)
    assert isinstance(config.data.train, JsonlData)
    assert config.data.train.path == (Path("/home/me/a*"), Path("b.gz"))
    again = tmp_path / "again.toml"
    again.write_text(dump_config(config))
    assert load_config(again) == config
    for wrong in ("5", "[]", "[1]", "{}"):
        message = refusal(path, "--data.train.path", wrong)
        assert "data.train.path: should be a path or a list of paths, but it is" in message


@pytest.mark.parametrize(("value", "expected"), [("-1", 0), ("0", 0), ("7", 7)])
def test_top_k_is_switched_off_by_0_and_by_minus_1(value, expected, recipe):
    config = load_config(recipe(MINIMAL), ["--rollout.top_k", value])
    assert config.rollout.top_k == expected
    assert f"top_k = {expected}\n" in dump_config(config)
    assert "rollout.top_k: should be" in refusal(recipe(MINIMAL), "--rollout.top_k", "-2")


@pytest.mark.parametrize("text", [MINIMAL, MINIMAL.replace("\n", "\r\n")])
def test_a_byte_order_mark_is_no_part_of_a_recipe(text, tmp_path):
    path = tmp_path / "r.toml"
    path.write_bytes(b"\xef\xbb\xbf" + text.encode())
    assert load_config(path).output == Path("runs/x")
    path.write_bytes(text.encode("utf-16"))
    assert refusal(path).endswith("not a text file in UTF-8 but in UTF-16; save it as UTF-8")


@pytest.mark.parametrize(
    ("name", "text", "kind"),
    [
        ("r.yaml", "output: runs/x\n", "YAML"),
        ("r.yml", "- a\n", "YAML"),
        ("r.toml", "# mine\n\noutput: runs/x\ntraining:\n  steps: 5\n", "YAML"),
        ("r.toml", "---\noutput: runs/x\n", "YAML"),
        ("r.json", '{"output": "runs/x"}', "JSON"),
        ("recipe", '{"output": "runs/x"}', "JSON"),
    ],
)
def test_recipes_in_another_format_are_told_that_it_is_toml(name, text, kind, tmp_path):
    path = tmp_path / name
    path.write_text(text)
    message = refusal(path)
    assert "not valid TOML" in message
    assert f"This looks like {kind}; a recipe is TOML, in which" in message


def test_a_slip_in_toml_is_not_taken_for_another_format(tmp_path):
    path = tmp_path / "r.toml"
    path.write_text("[training]\nsteps: 5\n")
    assert "looks like" not in refusal(path)


def test_every_problem_is_listed_with_its_dotted_path(recipe):
    message = refusal(
        recipe(MINIMAL + "sise = 3\n[training]\nstepz = 3\nlearning_rate = -1.0\n"),
        "--rollout.top_p",
        "2",
    )
    assert "recipe.toml with its overrides: 4 settings cannot be used\n" in message
    assert "  data.train.sise: unknown key; did you mean data.train.size?" in message
    assert "  training.stepz: unknown key; did you mean training.steps?" in message
    assert "  training.learning_rate: should be greater than 0, but it is -1.0" in message
    assert "  rollout.top_p: should be less than or equal to 1, but it is 2" in message


@pytest.mark.parametrize(
    ("added", "expected"),
    [
        (
            "[data.eval.b]\npath = 'x'",
            "data.eval.b.type: missing; it says which kind this is (reasoning_gym, jsonl",
        ),
        (
            "[data.eval.b]\ntype = 'cvs'",
            "'rows' or 'mixture', but it is 'cvs'; did you mean csv?",
        ),
        ("[data.eval.b]\ntype = 'jsonl'", "with --data.eval.b.path VALUE"),
        ("[data.eval.b]\ntype = 'jsonl'\npath = 'x'\nlimt = 2", "did you mean data.eval.b.limit?"),
        ("[precision]\ndgrad = 'bf16'", "precision.dgrad: should be 'fp8' or 'int8', but it is"),
        (
            "[precision]\npreset = 'fp9'",
            "precision.preset: should be 'fp32', 'bf16', 'fp8-rollout'",
        ),
        ("[rollout]\nlearning_rate = 1.0", "unknown key; did you mean training.learning_rate?"),
        ("[reward]\nxyz = 1", "reward.xyz: unknown key; reward has deadline_s, function"),
        ("[reward.parts.'a b']\nfunction = 'math_verify'", "reward.parts.a b"),
        ("[reward]\nworkers = 0", "reward.workers: should be greater than or equal to 1"),
        ("[reward]\ndeadline_s = 0", "reward.deadline_s: should be greater than or equal to 0.01"),
        ("[reward]\nmemory_mib = 1", "reward.memory_mib: should be greater than or equal to 256"),
        ("[rollout]\ntemperature = inf", "rollout.temperature: should be a finite number"),
        ("[training]\nsteps = 'many'", "training.steps: should be a whole number"),
        ("[rollout]\nstop_strings = 'x'", "rollout.stop_strings: should be a list, but it is 'x'"),
        ("[data]\nchat = 'perhaps'", "data.chat: should be true or false, but it is 'perhaps'"),
        ("[lora]\ntargets = 'q_prj'", "lora.targets: should be some of q_proj, k_proj"),
        (
            "[lora]\ntargets = ['v_proj', 'allinear']",
            "all-linear (did you mean all-linear?), but",
        ),
        ("[lora]\ntargets = ['gate']", "(did you mean gate_proj?), but it is ['gate']"),
        ("[lora]\ntargets = []", "all-linear, but it is []"),
        ("[lora]\ntargets = ['q_proj', 'dwon_proj']", "did you mean down_proj?"),
        ("[algorithm]\nname = 'dapoo'", "'custom', but it is 'dapoo'; did you mean dapo?"),
        ("[algorithm]\nlam = 0.9", "algorithm.lam: unknown key; only ppo has it"),
        (
            "[[corrections]]\nmax = 2",
            "corrections.0.type: missing; it says which kind this is (tis",
        ),
        ("[[corrections]]\ntype = 'tis'\nmax = 0.5", "corrections.0.max: should be greater than"),
    ],
)
def test_an_error_says_what_was_expected_and_what_to_do(recipe, added, expected):
    assert expected in refusal(recipe(MINIMAL + added))


def test_a_value_for_nothing_is_left_out(recipe):
    message = refusal(recipe(MINIMAL), "--lora.rank", "null")
    assert message.endswith("lora.rank: should be a whole number; leave the key out for no value")
    assert load_config(recipe(MINIMAL), ["data.shuffle=False"]).data.shuffle is False


def test_a_precision_and_an_algorithm_are_chosen_by_name(recipe):
    assert load_config(recipe('precision = "bf16"\n' + MINIMAL)).precision.preset == "bf16"
    assert load_config(recipe(MINIMAL)).algorithm == GrpoConfig()
    assert load_config(recipe('algorithm = "dapo"\n' + MINIMAL)).algorithm == DapoConfig()
    assert load_config(recipe(MINIMAL), ["--algorithm", "rloo"]).algorithm == RlooConfig()
    table = recipe(MINIMAL + "[algorithm]\nclip_high = 0.5")
    assert load_config(table).algorithm == GrpoConfig(clip_high=0.5)
    assert load_config(table, ["--algorithm", "dapo"]).algorithm == DapoConfig(clip_high=0.5)
    own = CustomConfig(source="mine.py:Mine", options={"power": 2})
    words = ["--algorithm", "mine.py:Mine", "--algorithm.options.power", "2"]
    assert load_config(recipe(MINIMAL), words).algorithm == own


def test_corrections_are_a_list_of_tables(recipe):
    text = "[[corrections]]\ntype = 'tis'\n[[corrections]]\ntype = 'normalise'"
    config = load_config(recipe(MINIMAL + text))
    assert config.corrections == (TisCorrection(), NormaliseCorrection())
    again = load_config(recipe(dump_config(config)))
    assert again == config


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"steps = = 3", "not valid TOML"),
        (b"a = 1\na = 2", "not valid TOML"),
        (b"\xff\xfe", "not a text file in UTF-8"),
        (
            b"seed = 1\na.b = False",
            "not valid TOML: Invalid value (at line 2, column 7). False is not TOML: write true or",
        ),
    ],
)
def test_a_file_that_is_no_toml_is_refused_by_name(tmp_path, content, expected):
    path = tmp_path / "broken.toml"
    path.write_bytes(content)
    assert refusal(path).startswith(f"{path}: {expected}")


def test_a_missing_table_file_or_a_directory_is_refused_by_name(recipe, tmp_path):
    assert "data: missing" in refusal(recipe('output = "runs/x"'))
    assert refusal(tmp_path / "none.toml").startswith(f"{tmp_path / 'none.toml'}: no such file")
    assert refusal(tmp_path / "recipe.toml" / "x").endswith("cannot be read: Not a directory")


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ([], "name a recipe, which is a TOML file"),
        (["run.json", "config.json"], "it is that of a run, with which --resume goes on"),
        (["config.json"], "it is a model's: name a recipe, and --model {}"),
        (["adapter_config.json"], "it is a model's: name a recipe, and --model {}"),
        (["b.toml", "a.toml", "c.py"], "name a recipe in it: a.toml, b.toml"),
    ],
)
def test_a_directory_is_no_recipe_and_says_what_it_is(files, said, tmp_path):
    for name in files:
        (tmp_path / name).write_text("")
    assert refusal(tmp_path).startswith(f"{tmp_path}: a directory; {said.format(tmp_path)}")


def test_a_dumped_configuration_holds_every_default_and_loads_to_an_equal_one(recipe):
    config = load_config(
        recipe(MINIMAL + "[data.eval.held]\ntype = 'jsonl'\npath = 'a.jsonl'\nlimit = 5\n"),
        ["precision=fp8-linear"],
    )
    dumped = dump_config(config)
    assert tomllib.loads(dumped)["training"]["adam_epsilon"] == config.training.adam_epsilon
    assert load_config(recipe(dumped)) == config


def overrides_of(*words: str) -> list[Override]:
    read = read_words(words, RunConfig)
    assert read.faults == []
    return read.overrides


def value_of(text: str):
    [(_, value)] = overrides_of("--key", text)
    return value


def test_the_three_ways_to_write_an_override_are_equal():
    expected = [(("training", "steps"), 5)]
    assert overrides_of("--training.steps", "5") == expected
    assert overrides_of("--training.steps=5") == expected
    assert overrides_of("training.steps=5") == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("-1", -1),
        ("1e-4", 1e-4),
        ("true", True),
        ("True", True),
        ("False", False),
        ("None", "None"),
        ("fp8-linear", "fp8-linear"),
        ("runs/a b", "runs/a b"),
        ('"5"', "5"),
        ('["a", "b"]', ["a", "b"]),
        ('{type = "jsonl", path = "x"}', {"type": "jsonl", "path": "x"}),
        ("2026-01-31", "2026-01-31"),
        ("1\nb = 2", "1\nb = 2"),
        ("", ""),
    ],
)
def test_a_value_is_toml_where_it_is_a_toml_value_and_text_otherwise(text, expected):
    value = value_of(text)
    assert value == expected
    assert type(value) is type(expected)


@given(st.text())
def test_any_text_is_read_without_an_error(text):
    [(parts, _)] = overrides_of(f"key={text}")
    assert parts == ("key",)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--training.steps"], "--training.steps has no value"),
        (["--data.shuffle", "--seed", "1"], "--data.shuffle has no value"),
        (["5"], "'5' is not an override"),
        (["--training..steps", "5"], "'--training..steps' is not a dotted key"),
        (["=5"], "'=5' is not a dotted key"),
    ],
)
def test_what_is_no_override_is_refused_by_name(words, expected):
    (fault,) = read_words(words, RunConfig).faults
    assert fault.startswith(expected)


def test_missing_tables_are_made_and_the_given_ones_left_alone():
    given_values = {"data": {"train": {"size": 1}}}
    result = apply_overrides(
        given_values, [(("data", "eval", "held", "type"), "jsonl"), (("data", "train", "size"), 2)]
    )
    assert result == {"data": {"train": {"size": 2}, "eval": {"held": {"type": "jsonl"}}}}
    assert given_values == {"data": {"train": {"size": 1}}}
    assert apply_overrides({}, [(("seed",), 1), (("seed",), 2)]) == {"seed": 2}, "the last one wins"


def test_a_key_below_a_plain_value_is_refused():
    with pytest.raises(ConfigError, match=r"training\.steps cannot be set: training is 3"):
        apply_overrides({"training": 3}, [(("training", "steps"), 1)])


def test_a_precision_given_by_name_and_one_given_as_a_table_mix():
    assert apply_overrides({"precision": "fp8"}, [(("precision", "wgrad"), "bf16")]) == {
        "precision": {"preset": "fp8", "wgrad": "bf16"}
    }
    recorded = {"preset": "int8", "dgrad": "int8", "wgrad": "int8", "head": "int8"}
    assert apply_overrides({"precision": recorded}, [(("precision",), "fp8")]) == {
        "precision": {"preset": "fp8", "head": "int8"}
    }, "what int8 has by default is no choice"
    table = {"precision": {"preset": "fp8", "last_layers_bf16": 1}}
    assert apply_overrides(table, [(("precision",), "bf16")]) == {
        "precision": {"preset": "bf16", "last_layers_bf16": 1}
    }


def test_tables_override_the_keys_that_they_name_and_no_others():
    table = {
        "data": {"train": {"limit": 3, "path": "a"}},
        "precision": {"preset": "fp8", "wgrad": "bf16"},
    }
    changes = nested_overrides(
        {"data": {"train": {"limit": 9}}, "training.steps": 5, "precision": "bf16"}
    )
    assert apply_overrides(table, changes) == {
        "data": {"train": {"limit": 9, "path": "a"}},
        "training": {"steps": 5},
        "precision": {"preset": "bf16", "wgrad": "bf16"},
    }


@pytest.mark.parametrize(
    "name",
    [
        "fp8",
        "bf16",
        '{preset = "fp8", attention = "int8"}',
        '{preset = "fp8", first_layers_bf16 = 1, modules_bf16 = ["down_proj"], scales = "fp32"}',
    ],
)
def test_a_flow_is_named_as_a_recipe_names_it(name: str) -> None:
    given = tomllib.loads(f"precision = {name if name.startswith('{') else repr(name)}")
    precision = PrecisionConfig.model_validate(given["precision"])
    assert precision.name == name
    table = precision.model_dump(mode="json", exclude_defaults=True)
    without = {"preset": precision.preset, **table}
    assert precision_name(without) == name, "also without what is as by default"


@pytest.mark.parametrize(
    ("table", "words", "expected"),
    [
        (
            'reward = {function = "math_verify", options = {seconds = 1}, weight = 2}',
            ["--reward.model", "m"],
            {"model": "m", "weight": 2},
        ),
        ('reward = {model = "m"}', ["--reward.function", "f"], {"function": "f"}),
        (
            'reward.parts.a = {function = "f", options = {k = 1}, weight = 3}',
            ["--reward.parts.a.model", "m"],
            {"parts": {"a": {"model": "m", "weight": 3}}},
        ),
        (
            'reward.parts = {a = {model = "m"}, b = {model = "n"}}',
            ["--reward.parts.a.function=f"],
            {"parts": {"a": {"function": "f"}, "b": {"model": "n"}}},
        ),
        ('environment.class = "guess"', ["--environment.verifiers", "v"], {"verifiers": "v"}),
        ('environment.verifiers = "v"', ["--environment.openenv", "ws://a"], {"openenv": "ws://a"}),
        ('environment.openenv = "ws://a"', ["--environment.class", "guess"], {"class": "guess"}),
        ("training.warmup_updates = 3", ["--training.warmup_ratio=0.1"], {"warmup_ratio": 0.1}),
        ("training.warmup_ratio = 0.1", ["--training.warmup_updates=3"], {"warmup_updates": 3}),
        ("training.warmup_updates = 3", ["--training.warmup_ratio=0"], {"warmup_updates": 3}),
        ("training.steps = 3", ["--data.epochs=2"], {}),
        ("data.epochs = 3", ["--training.steps=2"], {"steps": 2}),
    ],
)
def test_an_override_replaces_the_key_that_excludes_it(table, words, expected, recipe):
    values = tomllib.loads(table)
    changed = apply_overrides(values, read_words(words, RunConfig).overrides)
    name = "training" if "epochs" in table + words[0] else next(iter(values))
    assert {key: value for key, value in changed[name].items() if value != 0} == expected
    assert values == tomllib.loads(table)


def test_two_overrides_that_exclude_one_another_are_refused_as_two_keys_of_a_file_are(recipe):
    path = recipe("reward.function = 'f'\n" + MINIMAL)
    both = load_config(path, ["--reward.model", "m", "--reward.function", "g"]).reward
    assert (both.model, both.function) == ("m", "g")
    assert load_config(path, ["--reward.model", "m"]).reward == RewardConfig(model="m")
