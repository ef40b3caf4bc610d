"""A run that learns nothing says so, and can stop."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from isobit.config.check import CheckConfig
from isobit.config.run import RunConfig
from isobit.errors import NoSignalError
from isobit.run.rl.loop import train
from isobit.run.rl.signal_watch import SignalWatch
from isobit.store.checkpoint.format import folder_name

ZERO = {"reward/mean": 0.0}


def notes(watch: SignalWatch, *signals: bool) -> list[int]:
    """The steps that something is printed about."""
    said = []
    for step, has_signal in enumerate(signals, start=1):
        watch.count(has_signal)
        if watch.notes(ZERO):
            said.append(step)
    return said


def test_a_line_after_each_so_many_steps_in_a_row() -> None:
    assert notes(SignalWatch(CheckConfig(no_signal_steps=2)), *[False] * 5) == [2, 4]
    row = (False, True, False, False, False)
    assert notes(SignalWatch(CheckConfig(no_signal_steps=3)), *row) == [5]
    ignored = CheckConfig(no_signal_steps=1, on_no_signal="ignore")
    assert notes(SignalWatch(ignored), *[False] * 3) == []


def test_the_line_says_what_the_rewards_were() -> None:
    watch = SignalWatch(CheckConfig(no_signal_steps=1))
    watch.count(has_signal=False)
    assert "the last step had no signal" in watch.notes(ZERO)[0]
    assert "the mean is 0.25" in watch.notes({"reward/mean": 0.25})[0]
    assert "every reward failed" in watch.notes({})[0]


def test_a_run_without_a_signal_changes_no_byte_counts_it_and_can_stop(
    make_config: Callable[..., RunConfig], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Seen before: exit 0, an update by momentum in each step and no word of it."""
    reward = tmp_path / "nothing.py"
    reward.write_text("def nothing(prompt, completion):\n    return 0.0\n")
    config = make_config(
        f"{reward}:nothing",
        training={"steps": 9, "without_signal": "skip"},
        check={"on_no_signal": "stop", "no_signal_steps": 2},
    )
    with pytest.raises(NoSignalError, match=r"the last 2 steps had no signal.*the mean is 0\)"):
        train(config)
    said = capsys.readouterr().out
    assert said.count("no signal") == 3, "in each step's line, and a note about the first"
    metrics = (config.output / "metrics.jsonl").read_text().splitlines()
    lines = [json.loads(line) for line in metrics]
    steps = [line for line in lines if "updates/taken" in line]
    assert [line["updates/taken"] for line in steps] == [0, 0]
    assert [line["updates/without_signal"] for line in steps] == [1, 1]
    assert (config.output / "checkpoints" / folder_name(2)).is_dir()
    assert weights(config.output / "model") == weights(Path(config.model))


def weights(model: Path) -> bytes:
    return (model / "model.safetensors").read_bytes()
