"""A run whose ranks share engines (``cluster.rollout_tp``) leaves the bytes of one without."""

import itertools
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from isobit.config.recipes import SftConfig
from isobit.parallel.world import ALONE, World
from isobit.rollout import episodes
from isobit.rollout.native import NativeEngine
from isobit.run.sft import sft
from isobit.util.errors import ConfigError
from tests.run import acting
from tests.run.test_environment import STOPS, TOOLS
from tests.run.test_ranks import left_by, run, write_model
from tests.tiny import json_lines
from tests.worlds import in_world


def shared(ranks: int, size: int) -> dict[str, Any]:
    return {"cluster": {"rollout_tp": ranks, "processes": size}}


def case_of(folder: Path, precision: str, **more: Any) -> dict[str, Any]:
    return {
        "folder": str(folder),
        "model": "dense",
        "moments": "bf16",
        "precision": precision,
        **more,
    }


def check_equal(folder: Path, one: str, other: str) -> None:
    expected, found = left_by(folder / one), left_by(folder / other)
    assert found.keys() == expected.keys()
    assert [name for name in expected if found[name] != expected[name]] == []


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("size", "ranks", "precision"), [(4, 2, "int8"), (2, 2, "fp8"), (2, 2, "bf16")]
)
def test_the_bytes_of_a_run_do_not_depend_on_who_shares_an_engine(
    size: int, ranks: int, precision: str, tmp_path: Path
) -> None:
    write_model(tmp_path, "dense")
    case = case_of(tmp_path, precision)
    run(ALONE, {**case, "output": "one"})
    several = {**case, "output": "several", "settings": shared(ranks, size)}
    in_world(size, "tests.run.test_ranks:run", several)
    check_equal(tmp_path, "one", "several")


def die_in_step_three(world: World, case: dict[str, Any]) -> None:
    """A run whose ranks are killed while they draw for its third step."""
    step, steps = NativeEngine.step, itertools.count()
    world.board.post(f"test {world.rank}", str(os.getpid()).encode())

    def dying(engine: NativeEngine) -> Any:
        if engine._policy.version == 3 and next(steps) == 2:
            notes = [world.board.read(f"test {rank}") for rank in range(world.size)]
            others = {int(note) for note in notes if note is not None} - {os.getpid()}
            for process in [*others, os.getpid()]:
                os.kill(process, signal.SIGKILL)
        return step(engine)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(NativeEngine, "step", dying)
        run(world, case)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("killed", "resumed"), [((2, 2), (2, 1)), ((2, 1), (2, 2))])
def test_a_run_is_resumed_to_the_same_bytes_where_others_share_its_engines(
    killed: tuple[int, int], resumed: tuple[int, int], tmp_path: Path
) -> None:
    write_model(tmp_path, "dense")
    case = case_of(tmp_path, "fp8", output="killed")
    run(ALONE, {**case, "output": "one"})
    for (size, ranks), target, is_resumed in (
        (killed, f"{__name__}:die_in_step_three", False),
        (resumed, "tests.run.test_ranks:run", True),
    ):
        told = {**case, "settings": shared(ranks, size), "resume": is_resumed}
        if is_resumed:
            in_world(size, target, told)
        else:
            with pytest.raises(AssertionError, match=rf"rank 0 \(exit {-signal.SIGKILL}\)"):
                in_world(size, target, told)
    check_equal(tmp_path, "one", "killed")


FORMS: dict[str, dict[str, Any]] = {
    "lag": {"async": {"lag": 1}, "rollout": {"max_new_tokens": 6, "speculation": 2}},
    "greedy baselines": {"algorithm": "remax"},
    "refilled groups": {"algorithm": {"name": "grpo", "dynamic_sampling": True}},
    "reference": {
        "algorithm": {"name": "grpo", "kl_coefficient": 0.1},
        "reference": {"refresh_every": 2},
    },
    "values, slots, computed again": {
        "algorithm": "ppo",
        "training": {
            "steps": 4,
            "prompts_per_step": 3,
            "samples_per_prompt": 4,
            "tokens_per_microbatch": 96,
            "learning_rate": 1e-2,
            "recompute": "full",
            "slots": 2,
            "shared_prefix": True,
        },
    },
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("form", FORMS)
def test_so_are_those_of_other_forms_of_a_run(form: str, tmp_path: Path) -> None:
    write_model(tmp_path, "dense")
    case = case_of(tmp_path, "fp8")
    run(ALONE, {**case, "output": "one", "settings": FORMS[form]})
    settings = FORMS[form] | shared(2, 4)
    in_world(4, "tests.run.test_ranks:run", {**case, "output": "several", "settings": settings})
    check_equal(tmp_path, "one", "several")


ACTING: dict[str, Any] = {
    "environment": {"class": f"{TOOLS}:Counter", "max_turns": 4},
    "reward": {"function": "environment"},
    "rollout": {"max_new_tokens": 60, "stop_tokens": STOPS},
}


def act(world: World, case: dict[str, Any]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(episodes, "read_turn", acting.reading(acting.parse))
        run(world, case)


@pytest.mark.exhaustive
def test_so_are_those_of_a_run_with_an_environment(tmp_path: Path) -> None:
    write_model(tmp_path, "dense")
    case = case_of(tmp_path, "fp8")
    act(ALONE, {**case, "output": "one", "settings": ACTING})
    settings = ACTING | shared(2, 4)
    in_world(4, f"{__name__}:act", {**case, "output": "several", "settings": settings})
    check_equal(tmp_path, "one", "several")
    steps = json_lines(tmp_path / "one" / "metrics.jsonl")
    assert max(line.get("episode/turns", 0) for line in steps) > 1


def tune(world: World, case: dict[str, Any]) -> None:
    """Fine-tuning whose completions of held-out prompts are graded."""
    folder, held_out = Path(case["folder"]), "starter:held_out.jsonl"
    table = {"completion": "answer"}
    config = {
        "model": str(folder / "dense"),
        "output": folder / case["output"],
        "precision": "fp8",
        "threads": 1,
        "reward": {"function": f"{folder / 'reward.py'}:reward", "in_process": True},
        "data": {
            "train": {"type": "jsonl", "path": "starter:train.jsonl", "limit": 12, **table},
            "eval": {"held_out": {"type": "jsonl", "path": held_out, "limit": 5, **table}},
        },
        "rollout": {"max_new_tokens": 6},
        "training": {"steps": 3, "prompts_per_step": 4, "learning_rate": 1e-2},
        "evaluation": {"every": 1},
        **case.get("settings", {}),
    }
    sft(SftConfig.model_validate(config), world=world)


@pytest.mark.exhaustive
def test_so_are_those_of_fine_tuning(tmp_path: Path) -> None:
    write_model(tmp_path, "dense")
    case = {"folder": str(tmp_path)}
    tune(ALONE, {**case, "output": "one"})
    in_world(2, f"{__name__}:tune", {**case, "output": "two", "settings": shared(2, 2)})
    left = ("completions.jsonl", "rewards.jsonl", "model/model.safetensors")
    for name in left:
        assert (tmp_path / "two" / name).read_bytes() == (tmp_path / "one" / name).read_bytes()


def refuse(world: World, case: dict[str, Any]) -> str:
    try:
        run(world, case)
    except ConfigError as error:
        return str(error)
    return "nothing"


def test_ranks_that_do_not_share_engines_evenly_are_refused(tmp_path: Path) -> None:
    write_model(tmp_path, "dense")
    case = case_of(tmp_path, "fp8", output="refused")
    said = refuse(ALONE, {**case, "settings": shared(2, 1)})
    assert said.startswith("cluster.rollout_tp is 2, but the run has 1 process, which do not share")
    said = refuse(ALONE, {**case, "settings": shared(3, 3)})
    assert said.startswith("cluster.rollout_tp = 3, but the model's 2 KV heads are not shared")
    assert not (tmp_path / "refused").exists()
