"""A rank that is killed while all write a checkpoint ends the run, not the checkpoint before: one
process goes on from it, to the bytes of the run that nothing happened to.
"""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from isobit.config.run import RunConfig
from isobit.models.tensor_file import FilePlan
from isobit.models.tensor_slices import Slice
from isobit.parallel.world import World
from isobit.run.rl.loop import train
from isobit.store.checkpoint import format as checkpoint_format
from tests.worlds import in_world

MakeConfig = Callable[..., RunConfig]


def train_and_be_killed(world: World, values: dict[str, Any]) -> None:
    """A run whose last rank dies between the masters and the moments of step 4's checkpoint."""
    write_slices = checkpoint_format.write_slices

    def dying(
        path: Path, plan: FilePlan, slices: dict[str, Slice], beat: Callable[[], None]
    ) -> None:
        begun = path.parent.name == ".step_000004.partial" and path.name.startswith("optimiser")
        if begun and world.rank == world.size - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        write_slices(path, plan, slices, beat)

    checkpoint_format.write_slices = dying
    train(RunConfig.model_validate(values), world=world)


def test_a_rank_killed_while_all_write(
    make_config: MakeConfig,
    expected: dict[str, Any],
    outcome: Callable[[Path], dict[str, Any]],
) -> None:
    config = make_config(cluster={"processes": 2})
    with pytest.raises(AssertionError, match=rf"rank 1 \(exit {-signal.SIGKILL}\)"):
        in_world(2, f"{__name__}:train_and_be_killed", config.model_dump(mode="json"))
    left = {path.name for path in (config.output / "checkpoints").iterdir()}
    assert left - {".step_000004.partial"} == {"step_000002"}
    train(config, resume=True)
    assert without_ranks(outcome(config.output)) == without_ranks(expected)


def without_ranks(outcome: dict[str, Any]) -> dict[str, Any]:
    """An outcome without figures of how ranks shared out the work."""
    metrics = [
        {
            name: value
            for name, value in line.items()
            if not name.startswith(("waiting/", "rollout/"))
        }
        for line in outcome["metrics"]
    ]
    return {**outcome, "metrics": metrics}
