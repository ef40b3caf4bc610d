"""A rank of two dies in a phase (in that of a checkpoint: test_ranks.py), hangs, or is asked to
stop: the other ends with it, the reason is said, and what is resumed, on however many processes,
leaves the files of a run that nothing happened to.
"""

import signal
import time
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from isobit.config.recipes import RunConfig
from isobit.run.loop import train
from tests.forked import Launched, command
from tests.run.test_ranks import write_model

PROGRAM = str(Path(__file__).with_name("rank.py"))
OF_THE_MACHINE = ("memory/", "rollout/", "waiting/")
"""Figures that depend on how many processes there are."""


@pytest.fixture
def recipe(values: dict[str, Any], tmp_path: Path, place: Path) -> Path:
    (place / "hook.py").unlink(missing_ok=True)
    path = tmp_path / "recipe.toml"
    run = {**values, "output": str(tmp_path / "run"), "checkpoint": {"every": 1}}
    path.write_text(tomli_w.dumps(run), encoding="utf-8")
    return path


def interrupted(recipe: Path, where: str, call: int, number: signal.Signals, *options: str) -> str:
    """What is said of a run, begun or resumed, whose rank 1 meets its end there."""
    words = [PROGRAM, where, str(call), str(int(number)), "train", str(recipe), "--resume"]
    words += options
    end = Launched(words, recipe.with_suffix(".log")).end()
    assert end is not None and end.exit_code == 137
    return str(end)


def without_the_machine(outcome: dict[str, Any]) -> dict[str, Any]:
    lines = [
        {name: value for name, value in line.items() if not name.startswith(OF_THE_MACHINE)}
        for line in outcome["metrics"]
    ]
    return {**outcome, "metrics": lines}


@pytest.mark.exhaustive
def test_rank_1_dies_in_phases_and_hangs_and_one_process_ends_the_run(
    recipe: Path,
    expected: dict[str, Any],
    outcome: Callable[[Path], dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = recipe.parent / "run"
    for where, call in {"rollout": 15, "grading": 1, "training": 3}.items():
        said = interrupted(recipe, where, call, signal.SIGKILL)
        assert f"was killed by SIGKILL in {where} after" in said
    assert len(list((run / "checkpoints").glob("step_??????"))) > 0
    monkeypatch.setenv("ISOBIT_SILENCE_S", "8")
    said = interrupted(recipe, "training", 2, signal.SIGSTOP)
    assert said.startswith("rank 1 (")
    assert "has been silent in" in said
    train(RunConfig.model_validate(_values(recipe)), resume=True)
    assert without_the_machine(outcome(run)) == without_the_machine(expected)


@pytest.mark.exhaustive
def test_ranks_that_share_an_engine_end_together(
    recipe: Path, outcome: Callable[[Path], dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_model(recipe.parent, "dense")
    values = {**_values(recipe), "model": str(recipe.parent / "dense")}
    recipe.write_text(tomli_w.dumps(values), encoding="utf-8")
    shared = ["--cluster.rollout_tp", "2"]
    said = interrupted(recipe, "rollout", 15, signal.SIGKILL, *shared)
    assert "was killed by SIGKILL in rollout after" in said
    monkeypatch.setenv("ISOBIT_SILENCE_S", "8")
    said = interrupted(recipe, "rollout", 15, signal.SIGSTOP, *shared)
    assert said.startswith("rank 1 (") and "has been silent in" in said
    train(RunConfig.model_validate(values), resume=True)
    alone = recipe.parent / "alone"
    train(RunConfig.model_validate({**values, "output": alone}))
    found = outcome(recipe.parent / "run")
    assert without_the_machine(found) == without_the_machine(outcome(alone))


@pytest.mark.exhaustive
def test_a_signal_to_the_launcher_leaves_a_checkpoint_of_both(
    recipe: Path, expected: dict[str, Any], outcome: Callable[[Path], dict[str, Any]]
) -> None:
    words = ["train", str(recipe), "--resume", "--cluster.processes", "2"]
    run, shown, errors = (recipe.parent / name for name in ("run", "shown", "errors"))
    first = command(words, shown, errors)
    while not (run / "checkpoints" / "step_000002").exists():
        assert first.is_alive(), shown.read_text() + errors.read_text()
        time.sleep(0.01)
    first.terminate()
    first.join()
    assert first.exitcode == 143
    assert errors.read_text().count("SIGTERM: stopping where it is safe") == 1
    assert errors.read_text().count("stopped by SIGTERM") == 1
    assert "go on with --resume" in shown.read_text()
    second = command(words, shown)
    second.join()
    assert second.exitcode == 0
    assert "after step 6" in shown.read_text()
    assert without_the_machine(outcome(run)) == without_the_machine(expected)


def _values(recipe: Path) -> dict[str, Any]:
    return tomllib.loads(recipe.read_text(encoding="utf-8"))
