"""What new users typed, and what they read then (issue 16, U3, U12 and U13)."""

import json
import sys
from pathlib import Path

import pytest
import torch

from isobit.cli.main import main
from isobit.config.recipes import RunConfig
from isobit.models.adapter_folder import write_adapters
from isobit.models.config import Lora
from isobit.models.saving import copy_tokenizer
from isobit.run.resolved import resolve
from isobit.run.rl_run import read_rl
from isobit.starter import starter_folder

SMALL = ["--max-new-tokens", "8", "--threads", "1", "--precision", "fp32"]
DATA = {"train": {"type": "jsonl", "path": "starter:train.jsonl", "limit": 8}}


def error_of(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    try:
        code = main(list(words))
    except SystemExit as end:  # of argparse
        code = end.code
    assert code == 2
    return capsys.readouterr().err


def test_one_sample_is_greedy_and_shows_what_was_learnt(capsys: pytest.CaptureFixture[str]) -> None:
    def printed(*words: str) -> str:
        assert main(["rollout", "starter", "--prompt", "3+8+2+9=", *SMALL, *words]) == 0
        return capsys.readouterr().out

    greedy = printed("--seed", "1")
    assert printed("--seed", "2") == greedy
    drawn = {printed("--seed", seed, "--top-p", "0.99") for seed in "12"}
    assert len(drawn) == 2, "who says how to draw gets what is drawn"
    assert printed("--seed", "1", "--top-p", "0.0001") == greedy


@pytest.mark.parametrize("command", ["rollout", "eval", "verify"])
def test_the_directory_of_a_run_is_no_model_and_says_where_it_is(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, command: str
) -> None:
    words = {"rollout": ["--prompt", "1+1="], "eval": ["--data", "starter:held_out.jsonl"]}
    (tmp_path / "run.json").write_text("{}")
    said = error_of(capsys, command, str(tmp_path), *words.get(command, []))
    assert f"isobit export {tmp_path} --to FOLDER" in said
    (tmp_path / "model").mkdir()
    for name in ("config.json", "adapter_config.json"):
        (tmp_path / "model" / name).write_text("{}")
        said = error_of(capsys, command, str(tmp_path), *words.get(command, []))
        assert f"is the directory of a run: its model is {tmp_path / 'model'}" in said
        (tmp_path / "model" / name).unlink()


@pytest.mark.parametrize(
    "words",
    [["inspect"], ["inspect", "--weights", "--gpu", "h100"], ["inspect", "--precision", "fp8"]],
    ids=len,
)
def test_adapters_alone_are_no_model_to_look_at(
    words: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    adapters = adapters_of_the_starter(tmp_path)
    said = error_of(capsys, words[0], str(adapters), *words[1:])
    assert f"{adapters} holds adapters of LoRA alone" in said
    assert f"isobit export {adapters} --to FOLDER --merge" in said


@pytest.mark.exhaustive
@pytest.mark.parametrize("recipe", ["train quickstart", "sft fine_tune", "train kl", "train ppo"])
def test_a_dry_run_begins_from_adapters_as_the_run_does(
    recipe: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    command, name = recipe.split()
    words = [f"recipes/{name}.toml", "--output", str(tmp_path / "x"), "--dry-run"]
    words += ["--model", str(adapters_of_the_starter(tmp_path))]
    words += ["--reference.refresh_every", "0"] if name == "kl" else []
    assert main([command, *words]) == 0
    assert "870,016 parameters" in (said := capsys.readouterr().out) and "1.66 MiB" in said


def adapters_of_the_starter(folder: Path) -> Path:
    tensors = {
        f"base_model.model.model.layers.{layer}.self_attn.q_proj.lora_{part}.weight": zeros
        for layer in range(4)
        for part, zeros in (("A", torch.zeros(2, 128)), ("B", torch.zeros(128, 2)))
    }
    adapters = folder / "adapters"
    write_adapters(adapters, Lora(2, 4.0, ("q_proj",)), starter_folder(), tensors)
    copy_tokenizer(starter_folder(), adapters)
    return adapters


def test_an_empty_name_is_no_model(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert "the name is empty" in error_of(capsys, "rollout", "", "--prompt", "1+1=")
    words = ["--output", str(tmp_path / "x"), "--model", "", "--dry-run"]
    assert "model's name is empty" in error_of(capsys, "train", "recipes/quickstart.toml", *words)


def test_a_dry_run_asks_for_the_packages_that_the_run_needs(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    words = ["--output", str(tmp_path / "x"), "--tracking.wandb", "true", "--dry-run"]
    for command, recipe in (("train", "quickstart"), ("sft", "fine_tune")):
        said = error_of(capsys, command, f"recipes/{recipe}.toml", *words)
        assert "pip install wandb, or leave it out of tracking" in said


def test_more_prompts_a_step_than_there_are_are_said(tmp_path: Path) -> None:
    training = {"prompts_per_step": 20}
    values = {"output": tmp_path, "data": DATA, "training": training}
    values["reward"] = {"function": "isobit.starter.tasks:correct_answer"}
    values["rollout"] = {"max_new_tokens": 16}
    config = RunConfig.model_validate(values)
    assert "a step takes 20 prompts" in read_rl(resolve(config)).learning[0]
    assert "same prompt up to 3 times" in read_rl(resolve(config)).learning[0]
    enough = config.model_copy(
        update={"training": config.training.model_copy(update={"prompts_per_step": 8})}
    )
    assert "warning" not in read_rl(resolve(enough)).learning[0]


@pytest.mark.exhaustive
def test_an_evaluation_names_its_split_where_there_are_several(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    from datasets import Dataset, DatasetDict

    rows = Dataset.from_list([{"prompt": "1+1=", "answer": "2"}])
    two = Dataset.from_list([{"prompt": "2+1=", "answer": "3"}] * 2)
    DatasetDict({"train": rows, "test": two}).save_to_disk(str(tmp_path / "two"))
    rows.save_to_disk(str(tmp_path / "one"))
    words = ["--reward", "isobit.starter.tasks:correct_answer", "--json", *SMALL]
    data = ["eval", "starter", "--data", str(tmp_path / "two")]
    said = error_of(capsys, *data, *words)
    assert "has the splits 'train', 'test'; say which (--split NAME)" in said
    assert main([*data, "--split", "test", *words]) == 0
    assert json.loads(capsys.readouterr().out)["two"]["problems"] == 2
    assert main(["eval", "starter", "--data", str(tmp_path / "one"), *words]) == 0
    assert json.loads(capsys.readouterr().out)["one"]["problems"] == 1


def test_csv_and_parquet_files_are_named_by_their_ending(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "sums.csv"
    path.write_text("prompt,answer\n1+1=,2\n")
    words = ["--reward", "isobit.starter.tasks:correct_answer", "--json", *SMALL]
    assert main(["eval", "starter", "--data", str(path), *words]) == 0
    assert json.loads(capsys.readouterr().out)["sums"]["problems"] == 1
    assert main(["rollout", "starter", "--data", str(path), *SMALL]) == 0
    assert capsys.readouterr().out.startswith("[prompt/0, sample 0")


@pytest.mark.parametrize("command", ["train", "sft"])
def test_what_is_missing_is_the_recipe_alone(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    said = error_of(capsys, command)
    assert said.endswith(
        f"isobit {command}: error: the following arguments are required: RECIPE.toml\n"
    )


def test_the_home_directory_in_words_of_a_command_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shell leaves ``~`` as it is in ``--out=~/x`` and in quotes."""
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(tmp_path)
    (home / "rows.jsonl").write_text('{"prompt": "1+2+3+4=", "answer": "10"}\n')
    (home / "m").symlink_to(starter_folder())
    words = ["--data", "~/rows.jsonl", *SMALL]
    assert main(["rollout", "~/m", "--out=~/out.jsonl", *words]) == 0
    assert (home / "out.jsonl").is_file()
    reward = ["--reward", "isobit.starter.tasks:correct_answer"]
    assert main(["eval", "~/m", *reward, *words]) == 0
    assert main(["inspect", "~/m", "--out=~/page.html"]) == 0
    assert (home / "page.html").is_file()
    assert not (tmp_path / "~").exists()
    capsys.readouterr()
    said = error_of(capsys, "rollout", "~nobody-here/m", "--prompt", "1+1=")
    assert "begins with ~nobody-here, and there is no such home directory" in said
