"""Calibrated bounds of a clip come back with their checkpoint."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from isobit.config.recipes import RunConfig
from isobit.run.loop import train
from isobit.util.errors import Interrupted

EVALUATION, STEP = 3, 16
"""Rewards asked for by an evaluation and by a step."""
IN_STEP_5 = 2 * EVALUATION + 4 * STEP + 5
TERM = "import os, signal\nif call == {call}: hook.unlink(); os.kill(os.getpid(), signal.SIGTERM)"


def test_a_run_that_stops_between_two_calibrations_goes_on_with_its_bounds(
    make_config: Callable[..., RunConfig],
    hook: Callable[[str], None],
    outcome: Callable[[Path], dict[str, Any]],
    tmp_path: Path,
) -> None:
    bounds = {"clip_low": 0.001, "clip_high": 0.001, "calibrate_every": 4}
    sections: dict[str, Any] = {"algorithm": bounds, "rollout": {"max_new_tokens": 4}, "seed": 1}
    whole = make_config(output=tmp_path / "whole", **sections)
    train(whole)
    expected = outcome(whole.output)
    found = [line["clip/low"] for line in expected["metrics"] if "clip/low" in line]
    assert found[:3] == [0.001] * 3 and found[3] == found[4] == found[5] != 0.001
    config = make_config(**sections)
    hook(TERM.format(call=IN_STEP_5))
    with pytest.raises(Interrupted):
        train(config)
    train(config, resume=True)
    assert outcome(config.output) == expected
