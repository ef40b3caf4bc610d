"""``isobit replay RUN``: its lines, its exit codes, and that it starts processes."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from isobit.cli.main import main
from isobit.config.recipes import RunConfig
from isobit.run.loop import train
from tests.forked import ran


@pytest.fixture
def run(make_config: Callable[..., RunConfig]) -> Path:
    """Of two steps, without a checkpoint of the first."""
    config = make_config(threads=1)
    train(config)
    return config.output


def change_reward(run: Path) -> None:
    path = run / "rewards.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    graded = [line for line in lines if line["prompts"][0][0].startswith("train")]
    graded[1]["rewards"][0][1] = 0.5
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_equal_is_0_and_every_step_has_a_line(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    assert main(["replay", str(run)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"replaying steps 1 to 2 of {run} from the start",
        "step 1: all equal in digests.jsonl",
        "step 2: all equal in digests.jsonl",
        "digests.jsonl: 2 lines equal",
        "rewards.jsonl: 4 lines equal",
        "completions.jsonl: 12 lines equal",
        "metrics.jsonl: 4 lines equal",
        "model: every file equal",
        f"{run}: steps 1 to 2 done again: all equal",
    ]
    assert main(["replay", str(run), "--step", "1"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"{run}: step 1 done again: all equal"


def test_a_difference_is_1_and_names_the_step(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    change_reward(run)
    assert main(["replay", str(run), "--step", "2"]) == 1
    said = capsys.readouterr().out.splitlines()
    assert said[-2].startswith("rewards.jsonl differs: step 2: rewards[0][1] of train/")
    assert said[-2].endswith(" is 0.5 and 0.0")
    assert said[-1] == (
        f"{run}: steps 1 to 2 done again: the runs differ, first step 2: rewards.jsonl"
    )
    assert main(["replay", str(run), "--step", "1"]) == 0


def test_what_cannot_be_replayed_is_2(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    for words in ([str(run), "--step", "3"], [str(tmp_path)], [str(run), "--seed", "1"]):
        assert main(["replay", *words]) == 2
        assert capsys.readouterr().err.startswith("error: ")
    with pytest.raises(SystemExit) as exit_:
        main(["replay", str(run), "--step", "0"])
    assert exit_.value.code == 2


def test_a_fault_is_no_difference(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import isobit.commands.replay

    monkeypatch.setattr(isobit.commands.replay, "take_step", lambda *_: 1 / 0)
    assert main(["replay", str(run)]) == 2
    assert "ZeroDivisionError" in capsys.readouterr().err


@pytest.mark.exhaustive
def test_several_processes_say_once_what_they_found(run: Path, tmp_path: Path) -> None:
    words = ["replay", str(run), "--processes", "2"]
    assert ran("isobit.cli.main:main", tmp_path, words).returncode == 0
    change_reward(run)
    done = ran("isobit.cli.main:main", tmp_path, words)
    assert done.returncode == 1
    assert (done.stdout + done.stderr).count("is 0.5 and 0.0") == 1


@pytest.mark.exhaustive
def test_the_second_run_stays_where_it_is_wanted(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    again = tmp_path / "again"
    assert main(["replay", str(run), "--output", str(again)]) == 0
    assert main(["diff", str(run), str(again)]) == 0
    assert main(["replay", str(run), "--output", str(again)]) == 2
    assert "already holds files of a run" in capsys.readouterr().err
