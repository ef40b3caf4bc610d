from isobit.config.keys import all_keys, locate
from isobit.config.run import RunConfig
from isobit.config.training import TrainingConfig


def test_every_setting_is_listed_once_with_what_it_takes():
    keys = {key.path: key for key in all_keys(RunConfig)}
    assert len(keys) == len(list(all_keys(RunConfig)))
    assert {f"training.{name}" for name in TrainingConfig.model_fields} <= set(keys)
    assert (keys["training.steps"].kind, keys["training.steps"].default) == ("int", "20")
    assert keys["precision.wgrad"].kind == "fp8 | bf16"
    assert keys["rollout.stop_strings"].kind == "list of str"
    assert keys["data.shuffle"].default == "true"
    assert keys["threads"].default == ""
    assert keys["threads"].description.startswith("CPU threads")


def test_a_choice_of_models_is_merged_under_one_path_and_free_names_show_as_name():
    keys = {key.path: key for key in all_keys(RunConfig)}
    assert keys["data.train.type"].kind == "reasoning_gym | jsonl | csv | parquet | hf | hub | rows"
    assert {"data.eval.NAME.task", "data.eval.NAME.path", "data.eval.NAME.split"} <= set(keys)


def test_a_location_leaves_out_the_type_and_knows_the_keys_of_its_table():
    path, siblings = locate(RunConfig, ("data", "eval", "held", "jsonl", "limt"))
    assert path == "data.eval.held.limt"
    assert siblings == ["limit", "path", "prompt", "system", "type"]


def test_a_location_inside_a_free_table_or_a_list_has_no_known_keys():
    assert locate(RunConfig, ("data", "train", "reasoning_gym", "options", "x")) == (
        "data.train.options.x",
        [],
    )
    assert locate(RunConfig, ("rollout", "stop_strings", 1)) == ("rollout.stop_strings.1", [])
