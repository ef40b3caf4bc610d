"""``isobit diff RUN RUN``: its lines, its exit codes, and the first difference of each file."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from isobit.cli.main import main
from isobit.run.loop import train
from isobit.store.lock import locked
from tests.tiny import small_run


@pytest.fixture(scope="module")
def done(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the same recipe twice, three steps with a checkpoint each; the second has lost
    its last checkpoint and was resumed after two steps.
    """
    folder = tmp_path_factory.mktemp("diff")

    def run(output: Path, resume: bool = False) -> None:
        checkpoint = {"every": 1, "keep_last": 3}
        config = small_run(tiny_folder, output, checkpoint=checkpoint, training={"steps": 3})
        train(config, resume=resume)

    run(folder / "whole")
    run(folder / "again")
    shutil.rmtree(folder / "again" / "checkpoints" / "step_000003")
    run(folder / "again", resume=True)
    return folder


@pytest.fixture
def runs(done: Path, tmp_path: Path) -> tuple[Path, Path]:
    """Copies of both, to be changed."""
    shutil.copytree(done, tmp_path, dirs_exist_ok=True)
    return tmp_path / "whole", tmp_path / "again"


def change_lines(path: Path, change: Callable[[dict[str, Any]], None], step: int) -> None:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    change(next(line for line in lines if line["step"] == step))
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def said(capsys: pytest.CaptureFixture[str], code: int, *words: Path) -> list[str]:
    capsys.readouterr()
    assert main(["diff", *map(str, words)]) == code
    return capsys.readouterr().out.splitlines()


def test_a_resumed_run_is_equal_and_each_file_has_a_line(
    runs: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    lines = said(capsys, 0, *runs)
    assert lines[0] == "digests.jsonl: 3 lines equal"
    assert [line.partition(":")[0] for line in lines[1:-1]] == [
        "rewards.jsonl",
        "completions.jsonl",
        "metrics.jsonl",
        "checkpoints",
        "model",
    ]
    assert lines[-1] == "the runs are equal"


def test_the_first_step_and_file_that_differ_are_named(
    runs: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    whole, other = runs
    change_lines(other / "metrics.jsonl", lambda line: line.update({"loss": 7.5}), step=2)
    change_lines(other / "digests.jsonl", lambda line: line.update(masters="0" * 16), step=2)
    change_lines(other / "completions.jsonl", lambda line: line.update(text="none"), step=3)
    lines = said(capsys, 1, whole, other)
    assert lines[-4:-2] == [
        lines[-4],
        lines[-3],
    ]
    assert lines[-4].startswith("digests.jsonl differs: step 2: masters is ")
    assert lines[-3].startswith("metrics.jsonl differs: step 2: loss is ")
    assert lines[-3].endswith(" and 7.5")
    assert lines[-2].startswith("completions.jsonl differs: step 3: text of train/")
    assert lines[-2].endswith(" is None and 'none'")
    assert lines[-1] == "the runs differ, first step 2: digests.jsonl"
    change_lines(other / "metrics.jsonl", lambda line: line.update({"loss": 0}), step=1)
    assert said(capsys, 1, whole, other)[-1] == "the runs differ, first step 1: metrics.jsonl"


def test_speed_and_memory_are_no_difference(
    runs: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    names = ("time/rollout_s", "tokens_per_s/rollout", "memory/peak_gib", "waiting/max_s")
    slower: dict[str, float] = dict.fromkeys(names, 99.0)
    change_lines(runs[1] / "metrics.jsonl", lambda line: line.update(slower), step=1)
    assert said(capsys, 0, *runs)[-1] == "the runs are equal"


def test_tensors_are_compared_byte_by_byte(
    runs: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    places = {"model/model": "after the last step", "checkpoints/step_000002/masters": "step 2"}
    for place, first in places.items():
        path = runs[1] / f"{place}.safetensors"
        tensors = load_file(path)
        name = min(tensors)
        tensors[name].view(-1)[0] *= 2
        tensors[name].view(-1)[1] += 1
        save_file(tensors, path)
        lines = said(capsys, 1, *runs)
        folder = path.parent.relative_to(runs[1])
        assert lines[-1] == f"the runs differ, first {first}: {folder}"
        assert any(f"{path.name} differs, {name} first" in line for line in lines)


def test_the_state_of_a_checkpoint_counts_but_not_its_seconds(
    runs: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    path = runs[1] / "checkpoints" / "step_000001" / "state.json"
    state = json.loads(path.read_text())
    path.write_text(json.dumps({**state, "log": {}, "files": {}}))
    assert said(capsys, 0, *runs)[-1] == "the runs are equal"
    path.write_text(json.dumps({**state, "weights_version": 9}))
    lines = said(capsys, 1, *runs)
    assert lines[-2] == (
        "checkpoints/step_000001 differs: step 1: state.json: weights_version is 2 and 9"
    )


def test_steps_of_one_run_alone_are_a_difference(
    runs: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    whole, other = runs
    path = other / "digests.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:2]))
    for runs in ((whole, other), (other, whole)):
        assert said(capsys, 1, *runs)[-2] == (
            f"digests.jsonl differs: step 3: {path} has no such line"
        )
    shutil.rmtree(other / "model")
    assert f"{other / 'model'}" in said(capsys, 1, other, whole)[-2]


def test_settings_that_differ_are_a_note(
    runs: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    path = runs[1] / "run.json"
    manifest = json.loads(path.read_text())
    manifest["config"] |= {"seed": 5, "back_end": "triton"}
    path.write_text(json.dumps(manifest))
    lines = said(capsys, 0, *runs)
    assert lines[0] == "note: back_end is 'auto' and 'triton'"
    assert lines[1].startswith("note: seed is ") and lines[1].endswith(" and 5")


def test_what_cannot_be_compared_is_2(
    runs: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for words in ([runs[0], tmp_path], [tmp_path, runs[0]]):
        capsys.readouterr()
        assert main(["diff", *map(str, words)]) == 2
        assert "run.json" in capsys.readouterr().err
    with locked(runs[1]):
        capsys.readouterr()
        assert main(["diff", *map(str, runs)]) == 2
        assert "is in use by" in capsys.readouterr().err
    (runs[1] / "run.json").write_text("{")
    assert main(["diff", *map(str, runs)]) == 2
    assert "cannot be read" in capsys.readouterr().err
