"""Trainers and rollouters on processes of their own leave the bytes of one process with a lag."""

from pathlib import Path
from typing import Any

import pytest

from isobit.config.run import RunConfig
from isobit.errors import ConfigError
from isobit.parallel.world import ALONE, World
from isobit.run.rl.loop import train
from isobit.run.rl.ranks import train_by_ranks
from tests.run.test_ranks import left_by, write_model
from tests.worlds import in_world


def config_of(case: dict[str, Any]) -> RunConfig:
    folder = Path(case["folder"])
    data = {"type": "jsonl", "path": "starter:train.jsonl", "limit": 20}
    return RunConfig.model_validate(
        {
            "model": str(folder / "dense"),
            "output": folder / case["output"],
            "threads": 1,
            "reward": {"function": f"{folder / 'reward.py'}:reward", "in_process": True},
            "data": {"train": data, "eval": {"held_out": {**data, "limit": 5}}},
            "rollout": {"max_new_tokens": 10},
            "training": {
                "steps": case["steps"],
                "prompts_per_step": 3,
                "samples_per_prompt": 4,
                "tokens_per_microbatch": 96,
                "updates_per_batch": 2,
                "learning_rate": 1e-2,
            },
            "algorithm": case["algorithm"],
            "evaluation": {"every": 2},
            "checkpoint": {"every": 2, "keep_last": 2},
            "async": {"lag": case["lag"]},
            "cluster": {"rollouters": case.get("rollouters", 0)},
        }
    )


def work(world: World, case: dict[str, Any]) -> None:
    """The run up to some steps, and from there to its end."""
    for steps, resume in ((3, False), (case["steps"], True)):
        train_by_ranks(config_of({**case, "steps": steps}), resume, world)


@pytest.mark.parametrize(
    ("size", "rollouters", "lag", "algorithm"),
    [
        (2, 1, 1, {"name": "grpo", "dynamic_sampling": True, "max_refills": 2}),
        (3, 1, 2, {"name": "remax"}),
        (3, 2, 1, {"name": "grpo"}),
    ],
    ids=["1 + 1, dynamic", "2 + 1, remax", "1 + 2"],
)
def test_the_bytes_do_not_depend_on_who_samples(
    size: int, rollouters: int, lag: int, algorithm: dict[str, Any], tmp_path: Path
) -> None:
    write_model(tmp_path, "dense")
    case = {"folder": str(tmp_path), "steps": 5, "lag": lag, "algorithm": algorithm}
    work(ALONE, {**case, "output": "one"})
    several = {**case, "output": "several", "rollouters": rollouters}
    in_world(size, "tests.run.rl.test_apart:work", several)
    expected, found = left_by(tmp_path / "one"), left_by(tmp_path / "several")
    waiting = {name for name in found if name.endswith("time/waiting_s")}
    assert found.keys() - waiting == expected.keys()
    assert [name for name in expected if found[name] != expected[name]] == []
    assert any(name.endswith("pending.safetensors") for name in expected)


def test_a_run_without_trainers_is_refused(tmp_path: Path) -> None:
    case = {"folder": str(tmp_path), "output": "run", "steps": 1, "lag": 1, "rollouters": 1}
    with pytest.raises(ConfigError, match=r"cluster.rollouters is 1, but the run has 1 process"):
        train_by_ranks(config_of({**case, "algorithm": "grpo"}))
    with pytest.raises(ConfigError, match=r"--cluster.processes N"):
        train(config_of({**case, "algorithm": "grpo"}))
