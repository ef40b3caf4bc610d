"""A run with scales of Q, K and V a tensor leaves the same bytes whether it is interrupted or not,
and by however many processes, and no log-probability of an exact flow differs.
"""

from pathlib import Path
from typing import Any

import pytest

from isobit.config.precision import KvCalibration
from isobit.parallel.world import ALONE, World
from isobit.run.rollouter_process import train_by_ranks
from tests.run.test_ranks import left_by, write_model
from tests.run.test_rollouters import config_of
from tests.tiny import json_lines
from tests.worlds import in_world


def work(world: World, case: dict[str, Any]) -> None:
    """The run of a case up to each of its ``stops``."""
    for place, steps in enumerate(case["stops"]):
        precision = {
            "preset": "fp8",
            "kv_scales": "per_tensor",
            "kv_calibration": case["calibration"],
        }
        more = {"precision": precision}
        config = config_of({**case, "steps": steps, "algorithm": {"name": "grpo"}, "more": more})
        allowed = ["training.steps"] if place else []
        train_by_ranks(config, place > 0, world, allowed)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("calibration", "lag", "rollouters", "stops"),
    [("trainer", 0, 0, [3]), ("never", 0, 0, [3]), ("engine", 1, 1, [2, 3])],
)
def test_interruptions_and_processes_change_no_byte(
    calibration: KvCalibration, lag: int, rollouters: int, stops: list[int], tmp_path: Path
) -> None:
    write_model(tmp_path, "dense")
    case = {"folder": str(tmp_path), "lag": lag, "calibration": calibration}
    work(ALONE, {**case, "output": "one", "stops": stops})
    several = {**case, "output": "several", "rollouters": rollouters, "stops": [2, 3]}
    in_world(2, "tests.run.test_kv_scales:work", several)
    expected, found = left_by(tmp_path / "one"), left_by(tmp_path / "several")
    assert found.keys() == expected.keys()
    assert [name for name in expected if found[name] != expected[name]] == []
    steps = [line for line in json_lines(tmp_path / "one" / "metrics.jsonl") if "loss" in line]
    assert [line["log_prob_diff/tokens_differing"] for line in steps] == [0] * 3
    assert all(line["log_prob_diff/tokens_compared"] for line in steps)
    assert steps[0]["kv_scales/largest_ratio"] > 0
    timed = [line["step"] for line in steps if "time/calibration_s" in line]
    assert bool(timed) == (calibration == "engine")
