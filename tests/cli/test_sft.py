import json
import tomllib
from pathlib import Path

import pytest

from isobit.cli.main import main

RECIPES = Path(__file__).parents[2] / "recipes"
TINY = [
    *(
        "--training.steps",
        "1",
        "--training.prompts_per_step",
        "2",
        "--threads",
        "1",
        "--data.eval.held_out.limit",
        "2",
    ),
    *(
        "--data.train.path",
        str(RECIPES / "fine_tune.jsonl"),
        "--data.eval.held_out.path",
        str(RECIPES / "fine_tune_held_out.jsonl"),
    ),
]


def test_a_recipe_with_overrides_fine_tunes_and_a_second_run_is_refused(tmp_path, capsys):
    words = ["sft", str(RECIPES / "fine_tune.toml"), "--output", str(tmp_path / "run"), *TINY]
    assert main(words) == 0
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["steps"] == 1
    assert summary["tokens_trained"] > 0
    assert main(words) == 2
    assert "already holds files" in capsys.readouterr().err


def test_a_key_of_training_by_reward_is_refused(tmp_path, capsys):
    output = tmp_path / "run"
    words = [
        "sft",
        str(RECIPES / "fine_tune.toml"),
        "--output",
        str(output),
        *TINY,
        "--training.samples_per_prompt",
        "4",
    ]
    assert main(words) == 2
    assert "training.samples_per_prompt: unknown key" in capsys.readouterr().err
    assert not output.exists()


def test_print_config_may_stand_after_the_recipe_and_writes_nothing(tmp_path, capsys):
    output = tmp_path / "run"
    assert (
        main(["sft", str(RECIPES / "fine_tune.toml"), "--output", str(output), "--print-config"])
        == 0
    )
    assert tomllib.loads(capsys.readouterr().out)["training"]["prompts_per_step"] == 25
    assert not output.exists()


def test_help_lists_the_keys_of_its_own_recipe(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["sft", "recipe.toml", "--help"])
    shown = capsys.readouterr().out
    assert "--from_scratch.hidden_size  (int)" in shown
    assert "--data.train.completion  (str, default completion)" in shown
    assert "samples_per_prompt" not in shown
