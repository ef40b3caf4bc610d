"""Damaged checkpoints are named and passed over; leftovers are removed; what is no checkpoint is
ignored; never in silence.
"""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from isobit.config.recipes import RunConfig
from isobit.run.loop import train
from isobit.store import checkpoint as checkpoint_format
from isobit.util.errors import CheckpointError

MakeConfig = Callable[..., RunConfig]


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) * 2 // 3] ^= 0x10
    path.write_bytes(content)


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size * 2 // 3)


def newer(path: Path) -> None:
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, "format": checkpoint_format.FORMAT + 1}))


def of_another_step(path: Path) -> None:
    shutil.copyfile(path.parents[1] / "step_000004" / path.name, path)


FILES = ("masters.safetensors", "optimiser.safetensors", "state.json", "manifest.json")
DAMAGES: list[tuple[str, Callable[[Path], None], str]] = [
    *((name, flip, "have changed|cannot be read|no manifest") for name in FILES),
    *((name, cut, "was cut") for name in FILES[:3]),
    *((name, Path.unlink, "is missing") for name in FILES),
    ("manifest.json", cut, "cannot be read"),
    ("manifest.json", lambda path: os.truncate(path, 0), "cannot be read"),
    ("manifest.json", newer, "format 4, and this Isobit reads 3"),
    ("manifest.json", of_another_step, "is of step 4"),
    ("state.json", of_another_step, "have changed|was cut"),
]


@pytest.mark.few(1)
@pytest.mark.parametrize(("name", "damage", "reason"), DAMAGES)
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_used(
    name: str,
    damage: Callable[[Path], None],
    reason: str,
    uninterrupted: Path,
    make_config: MakeConfig,
    expected: dict[str, Any],
    outcome: Callable[[Path], dict[str, Any]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = make_config()
    shutil.copytree(uninterrupted, config.output)
    path = config.output / "checkpoints" / "step_000006" / name
    damage(path)
    train(config, resume=True)
    lines = capsys.readouterr().out.splitlines()
    said = next(line for line in lines if line.startswith("checkpoint step_000006 cannot be used"))
    assert str(path) in said
    assert any(part in said for part in reason.split("|"))
    assert "using the one before it: step_000004" in lines
    assert (path.parent.with_name("step_000006.unusable")).is_dir()
    assert outcome(config.output) == expected


def test_a_file_of_the_run_shorter_than_the_checkpoint_says_rules_that_checkpoint_out(
    uninterrupted: Path,
    make_config: MakeConfig,
    expected: dict[str, Any],
    outcome: Callable[[Path], dict[str, Any]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = make_config()
    shutil.copytree(uninterrupted, config.output)
    os.truncate(
        config.output / "metrics.jsonl", (config.output / "metrics.jsonl").stat().st_size - 5
    )
    train(config, resume=True)
    assert "metrics.jsonl has" in capsys.readouterr().out
    assert outcome(config.output) == expected


def test_none_usable_is_an_error_that_lists_them_and_changes_nothing(
    uninterrupted: Path, make_config: MakeConfig
) -> None:
    config = make_config()
    shutil.copytree(uninterrupted, config.output)
    for step in ("step_000004", "step_000006"):
        flip(config.output / "checkpoints" / step / "masters.safetensors")
    with pytest.raises(CheckpointError) as error:
        train(config, resume=True)
    for part in (
        "no checkpoint",
        "step_000004",
        "step_000006",
        "masters.safetensors",
        "begin again at step 1",
    ):
        assert part in str(error.value)
    assert {path.name for path in (config.output / "checkpoints").iterdir()} == {
        "step_000004",
        "step_000006",
    }


def test_leftovers_go_with_a_line_and_other_names_are_ignored_with_one(
    uninterrupted: Path,
    make_config: MakeConfig,
    expected: dict[str, Any],
    outcome: Callable[[Path], dict[str, Any]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = make_config()
    shutil.copytree(uninterrupted, config.output)
    checkpoints = config.output / "checkpoints"
    (checkpoints / ".step_000008.partial").mkdir()
    (checkpoints / ".step_000002.deleted").mkdir()
    (checkpoints / "step_abc").mkdir()
    (checkpoints / "step_10.tmp").mkdir()
    (checkpoints / "step_000099").symlink_to(checkpoints)
    (checkpoints / "step_000098").symlink_to("step_000098")
    train(config, resume=True)
    shown = capsys.readouterr().out
    assert shown.count("removed what an interrupted write left") == 2
    assert shown.count("(no checkpoint)") == 1
    assert "step_000098, step_000099, step_10.tmp, step_abc" in shown
    shutil.rmtree(checkpoints / "step_abc")
    (checkpoints / "step_000098").unlink()
    (checkpoints / "step_000099").unlink()
    shutil.rmtree(checkpoints / "step_10.tmp")
    assert outcome(config.output) == expected


def test_a_lost_run_json_is_written_again(uninterrupted: Path, make_config: MakeConfig) -> None:
    config = make_config()
    shutil.copytree(uninterrupted, config.output)
    (config.output / "run.json").unlink()
    train(config, resume=True)
    assert json.loads((config.output / "run.json").read_text())["config"]["seed"] == config.seed


@pytest.mark.parametrize("line", ["{}", '{"step": 7, "update": "12", "old": 64, "new": 32}'])
def test_a_damaged_change_of_the_budget_is_said_and_goes(
    line: str,
    uninterrupted: Path,
    make_config: MakeConfig,
    expected: dict[str, Any],
    outcome: Callable[[Path], dict[str, Any]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = make_config()
    shutil.copytree(uninterrupted, config.output)
    path = config.output / "budget.jsonl"
    path.write_text(f"{line}\n")
    train(config, resume=True)
    assert f"{path} has a damaged line: the changes from there on" in capsys.readouterr().out
    assert outcome(config.output) == expected and path.read_bytes() == b""
