"""A resumed run reads what it read before: edits are refused with a table, in a dry run too, or
allowed by name and journalled.

Found at 12131fc: edits of the reward's file, of an evaluation's JSONL and of
``generation_config.json`` went unnoticed.
"""

import json
import shutil
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from isobit.cli.main import main
from isobit.commands.dry_run import plan_training
from isobit.config.recipes import RunConfig, SftConfig
from isobit.models.folder import model_folder
from isobit.run.digests import digests
from isobit.run.loop import train
from isobit.run.rl_run import read_rl
from isobit.run.sft import read_sft, sft
from isobit.starter import starter_folder
from isobit.util.errors import ConfigError

REWARD = "def reward(prompt, completion):\n    return float(len(completion.token_ids) % {})\n"


@pytest.fixture(scope="module")
def inputs(place: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Everything that a run reads, in a folder of its own."""
    folder = tmp_path_factory.mktemp("inputs")
    shutil.copytree(place / "model", folder / "model")
    for name in ("train", "held_out"):
        lines = (starter_folder() / f"{name}.jsonl").read_text().splitlines()[:4]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "reward.py").write_text(REWARD.format(3))
    (folder / "model" / "generation_config.json").write_text('{"eos_token_id": 1}')
    return folder


@pytest.fixture(scope="module")
def shared_values(inputs: Path) -> dict[str, Any]:
    """A step of four samples."""
    return {
        "model": str(inputs / "model"),
        "output": str(inputs / "run"),
        "threads": 1,
        "data": {
            "train": {"type": "jsonl", "path": str(inputs / "train.jsonl")},
            "eval": {"held_out": {"type": "jsonl", "path": str(inputs / "held_out.jsonl")}},
        },
        "reward": {"function": f"{inputs / 'reward.py'}:reward", "in_process": True},
        "rollout": {"max_new_tokens": 4},
        "training": {
            "steps": 2,
            "prompts_per_step": 2,
            "samples_per_prompt": 2,
            "schedule": "constant",
        },
        "checkpoint": {"every": 1},
    }


@pytest.fixture(scope="module")
def finished(shared_values: dict[str, Any]) -> RunConfig:
    config = RunConfig.model_validate(shared_values)
    train(config)
    return config


def with_row(path: Path) -> None:
    row = json.loads(path.read_text().splitlines()[-1])
    path.write_text(path.read_text() + json.dumps({**row, "more": 1}) + "\n")


def set_key(key: str, value: Any) -> Callable[[Path], object]:
    return lambda path: path.write_text(json.dumps({**json.loads(path.read_text()), key: value}))


def written(output: Path) -> dict[str, int]:
    """When each file was."""
    return {path.name: path.stat().st_mtime_ns for path in output.glob("[!.]*")}


EDITS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "reward.function.source": ("reward.py", lambda path: path.write_text(REWARD.format(2))),
    "data.train.content": ("train.jsonl", with_row),
    "data.eval.held_out.content": ("held_out.jsonl", with_row),
    "model.generation": ("model/generation_config.json", set_key("eos_token_id", [1, 5])),
    "model.tokenizer": ("model/tokenizer_config.json", set_key("model_max_length", 77)),
    "model.config": ("model/config.json", set_key("rms_norm_eps", 1e-5)),
}


@pytest.fixture
def edited(inputs: Path, request: pytest.FixtureRequest) -> Any:
    """What is edited while the run stands still; mended again after the test."""
    name, edit = EDITS[request.param]
    before = (inputs / name).read_bytes()
    edit(inputs / name)
    yield request.param
    (inputs / name).write_bytes(before)


@pytest.mark.few(4)
@pytest.mark.parametrize("edited", EDITS, indirect=True)
def test_an_edited_input_is_refused_with_a_table(edited: str, finished: RunConfig) -> None:
    before = written(finished.output)
    for attempt in (
        lambda: train(finished, resume=True),
        lambda: plan_training(finished, read_rl, resume=True),
    ):
        with pytest.raises(ConfigError) as refused:
            attempt()
        lines = str(refused.value).splitlines()
        assert len(lines) == 3
        assert lines[1].startswith(f"  {edited}: SHA-256 ")
        assert f"--allow-change {edited}" in lines[2]
    assert written(finished.output) == before


def test_nothing_edited_is_nothing_refused(finished: RunConfig) -> None:
    lines = plan_training(finished, read_rl, resume=True).describe(None)
    assert "--resume would go on after step 2 of 2" in lines


def test_files_that_options_name_are_inputs(
    values: dict[str, Any], inputs: Path, tmp_path: Path
) -> None:
    rubric, document = tmp_path / "rubric.md", tmp_path / "documents" / "a.txt"
    document.parent.mkdir()
    judge = {"rubric": str(rubric), "base_url": "http://127.0.0.1:9/v1", "model": "judge"}
    config = RunConfig.model_validate(
        values
        | {"environment": {"class": "search", "options": {"folder": str(document.parent)}}}
        | {"reward": {"parts": {"said": {"function": "llm_judge", "options": judge}}}}
    )

    def found() -> dict[str, str]:
        made = digests(config, inputs / "model", False, {})
        return {name: made[name] for name in ("environment.documents", "reward.parts.said.rubric")}

    states = list[dict[str, str]]()
    for text in ("one", "another"):
        for path in (rubric, document):
            path.write_text(text)
            states.append(found())
    (document.parent / "b.txt").write_text("more")
    states.append(found())
    assert all(before != after for before, after in pairwise(states))
    changed = [[name for name in a if a[name] != b[name]] for a, b in pairwise(states[1:])]
    documents, of_rubric = states[0]
    assert changed == [[of_rubric], [documents], [documents]]


@pytest.mark.parametrize("edited", ["reward.function.source"], indirect=True)
def test_a_change_that_is_allowed_is_journalled_and_in_force_at_once(
    edited: str, finished: RunConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "run"
    shutil.copytree(finished.output, output)
    shutil.rmtree(output / "checkpoints" / "step_000002")  # whose rewards are recorded
    words = ["train", str(output), "--resume", "--checkpoint.keep_last", "3"]
    assert main([*words, "--allow-change", edited, "--dry-run"]) == 0
    assert f"changed since the run began, and may: {edited}" in capsys.readouterr().out
    assert main([*words, "--allow-change", "nonsense"]) == 2
    assert "no such key or input" in capsys.readouterr().err
    assert (
        main(
            [
                *words,
                "--allow-change",
                "reward,training.learning_rate",
                "--training.learning_rate=3e-3",
            ]
        )
        == 0
    )
    assert f"note: {edited} has changed" in capsys.readouterr().out
    manifest = json.loads((output / "run.json").read_text())
    journal = manifest["resumed"][-1]
    old, new = journal["changed"][edited]
    assert old == json.loads((finished.output / "run.json").read_text())["inputs"][edited]
    assert new == manifest["inputs"][edited] != old
    assert journal["changed"]["training.learning_rate"][1] == 3e-3
    assert journal["allowed"] == ["reward", "training.learning_rate"]
    graded = [json.loads(line)["rewards"] for line in (output / "rewards.jsonl").open()]
    assert {reward for groups in graded[2] for reward in groups} <= {0.0, 1.0}, "the new reward's"
    assert main(words) == 0, "what was allowed now is the run's"


def test_what_may_change_has_to_be_a_resume_s(
    values: dict[str, Any], finished: RunConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", str(finished.output), "--allow-change", "seed"]) == 2
    assert "--allow-change is for --resume" in capsys.readouterr().err


@pytest.mark.parametrize("edited", ["data.train.content"], indirect=True)
def test_other_prompts_that_are_allowed_begin_an_epoch(
    edited: str, finished: RunConfig, tmp_path: Path
) -> None:
    output = tmp_path / "run"
    shutil.copytree(finished.output, output)
    longer = finished.model_copy(
        update={
            "output": output,
            "training": finished.training.model_copy(update={"steps": 3}),
        }
    )
    train(longer, resume=True, allowed=["data"])
    last = json.loads((output / "rewards.jsonl").read_text().splitlines()[-2])
    assert {visit for _, visit in last["prompts"]} == {1}


@pytest.mark.parametrize("edited", ["data.eval.held_out.content"], indirect=False)
def test_fine_tuning_knows_what_it_resumes(
    edited: str, values: dict[str, Any], tmp_path: Path
) -> None:
    path, target = tmp_path / "held_out.jsonl", model_folder("starter") / "held_out.jsonl"
    lines = target.read_text().splitlines()[:2]
    path.write_text("\n".join(lines) + "\n")
    source = {"type": "jsonl", "prompt": "prompt", "completion": "answer"}
    config = SftConfig.model_validate(
        {
            "model": values["model"],
            "output": str(tmp_path / "run"),
            "threads": 1,
            "data": {
                "train": {**source, "path": "starter:train.jsonl", "limit": 4},
                "eval": {"held_out": {**source, "path": str(path)}},
            },
            "training": {"steps": 1, "prompts_per_step": 2},
        }
    )
    sft(config)
    path.write_text(lines[0] + "\n" + json.dumps({**json.loads(lines[1]), "answer": "7"}) + "\n")
    for attempt in (
        lambda: sft(config, resume=True),
        lambda: plan_training(config, read_sft, resume=True),
    ):
        with pytest.raises(ConfigError, match=r"data\.eval\.held_out\.content: SHA-256"):
            attempt()
