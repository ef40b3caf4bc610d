"""TensorBoard's events where the clock runs back."""

import time
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from isobit.observe.metrics import Events


def test_a_clock_that_runs_back_changes_no_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that is resumed on a host an hour behind, whose clock is then set back further."""
    clock = iter([1000.0, 1000.0, 2000.0, 1500.0, -1600.0, -1600.0, -5000.0, -4000.0])
    monkeypatch.setattr(time, "time", lambda: next(clock) + 1e9)
    for steps in ((1, 2), (3, 4)):
        events = Events(tmp_path)
        for step in steps:
            events.write(step, {"loss": float(step)})
        events.close()
    read = EventAccumulator(str(tmp_path)).Reload().Scalars("loss")
    assert [(event.step, event.value) for event in read] == [(n, float(n)) for n in (1, 2, 3, 4)]
    first, second = sorted(tmp_path.iterdir())
    for file in (first, second):
        times = [event.wall_time for event in EventAccumulator(str(file)).Reload().Scalars("loss")]
        assert times == sorted(times)
    assert first.name.startswith("events.out.tfevents.1000001000.")
    assert second.name.startswith("events.out.tfevents.1000001001.")
