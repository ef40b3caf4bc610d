"""The disk that a run needs: checkpoints at once by its rules, and bytes as written."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isobit.config.data import JsonlData
from isobit.config.recipes import RunConfig
from isobit.config.training import Moments
from isobit.models.folder import read_config
from isobit.run.loop import train
from isobit.store.disk_plan import DiskPlan, most_at_once, plan_disk
from isobit.store.keeper import steps_to_keep
from isobit.util.errors import StorageError

GIB = 1 << 30


def config(steps: int, **checkpoint: object) -> RunConfig:
    data = {"train": JsonlData(path=Path("train.jsonl"))}
    return RunConfig.model_validate(
        {"output": "runs/x", "data": data, "training": {"steps": steps}, "checkpoint": checkpoint}
    )


def plan_of(config: RunConfig, on_disk: Sequence[int] = ()) -> DiskPlan:
    return plan_disk(config, read_config(Path(config.model)), on_disk)


@given(
    st.integers(1, 30), st.integers(0, 7), st.integers(1, 4), st.integers(0, 9), st.integers(0, 3)
)
def test_the_count_is_that_of_a_run_played_through(
    steps: int, every: int, keep_last: int, keep_every: int, resumed_after: int
) -> None:
    run = config(steps, every=every, keep_last=keep_last, keep_every=keep_every)
    held: set[int] = set()
    most, on_disk = 0, set[int]()
    for step in range(1, steps + 1):
        if (every and step % every == 0) or step == steps:
            most = max(most, len(held) + 1)
            held = steps_to_keep(dict.fromkeys(held | {step}), run.checkpoint)
        if step == resumed_after:
            most, on_disk = len(held), set(held)
    assert most_at_once(run.training.steps, run.checkpoint, 0, on_disk) == most


def test_the_best_may_be_one_more_and_none_is_none() -> None:
    best = {"keep_last": 1, "every": 2, "keep_best": "eval/held_out/accuracy"}
    assert [most_at_once(steps, config(steps, **best).checkpoint) for steps in (2, 4, 6)] == [
        1,
        2,
        3,
    ]
    assert most_at_once(6, config(6, keep_last=0).checkpoint) == 0


@pytest.mark.few(2)
@pytest.mark.parametrize("moments", get_args(Moments))
def test_the_bytes_are_those_that_a_run_writes(
    moments: Moments, make_config: Callable[..., RunConfig]
) -> None:
    config = make_config(training={"moments": moments})
    plan = plan_of(config)
    train(config)
    (folder,) = (config.output / "checkpoints").iterdir()
    room = 1 << 16
    assert 0 < plan.checkpoint_bytes - sum(file.stat().st_size for file in folder.iterdir()) < room
    assert (
        abs(
            plan.model_bytes
            - sum(file.stat().st_size for file in (config.output / "model").iterdir())
        )
        < room
    )
    assert plan_of(config, [2]).needed == plan.model_bytes


def test_an_8b_policy_on_a_small_disk_is_refused_with_the_figures() -> None:
    plan = DiskPlan(
        Path("runs/x"), 61 * GIB, checkpoints=3, on_disk=1, model_bytes=15 * GIB, free=137 * GIB
    )
    plan.check()
    with pytest.raises(StorageError) as error:
        replace(plan, free=136 * GIB).check()
    for part in ("137 GiB of 136 GiB free in runs/x", "61 GiB, at most 3", "keep_last", "--output"):
        assert part in str(error.value)
