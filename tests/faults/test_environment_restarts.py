"""A rollouter that draws episodes freely is killed and comes back: what tools have said is recorded
once, so that a replay and a resumed run ask them for nothing.
"""

import shutil
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from isobit.commands.replay import replay
from isobit.config.recipes import RunConfig
from isobit.observe.console import silent
from isobit.rollout import episodes
from isobit.run.loop import train
from tests.faults.test_restarts import ended
from tests.run import acting
from tests.run.test_environment import STOPS, TOOLS
from tests.run.test_free_batches import check_bounds, left_by
from tests.run.test_free_environment import ask_nothing, check_answers
from tests.tiny import json_lines
from tests.worlds import in_world

STEPS = 6


@pytest.fixture
def values(values: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The run of ``command``, with tools; few places, so that episodes begin and end apart."""
    monkeypatch.setenv("ACTS", "1")
    monkeypatch.setattr(episodes, "read_turn", acting.reading(acting.parse))
    return {
        **values,
        "environment": {"class": f"{TOOLS}:Counter", "max_turns": 6},
        "reward": {"function": "environment", "in_process": True},
        "rollout": {"max_new_tokens": 40, "stop_tokens": STOPS, "max_sequences": 7},
        "checkpoint": {"every": 2, "keep_last": 9},
        "tracking": {"completions": "all"},
    }


@pytest.fixture
def check_death(
    command: Callable[[dict[str, int]], list[str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[..., None]:
    """Runs ``command`` freely with deaths at these moments, and checks what is left: one run, which
    is repeated, whole and from its first checkpoint, without a question to a tool.
    """

    def run(
        moments: dict[str, int], size: int = 2, rollouters: int = 1, more: Sequence[str] = ()
    ) -> None:
        monkeypatch.setenv("VICTIM", str(size - rollouters))
        words, root = freely([*command(moments), *more], rollouters), tmp_path / "run"
        code, said = ended(words, tmp_path / "log", size, rollouters)
        assert code == 0, said
        assert said.count("the rollouters are started again") == len(moments)
        check_recorded_once(root)
        ask_nothing(monkeypatch)
        check_replayed(root)
        check_resumed(root, alone(tmp_path))

    return run


def freely(words: list[str], rollouters: int = 1) -> list[str]:
    words = [*words, "--cluster.rollouters", str(rollouters), "--async.lag", "0"]
    return [*words, "--async.max_staleness", "2"]


def alone(folder: Path) -> dict[str, Any]:
    """The recipe of ``command``, freely and without rollouters."""
    read = tomllib.loads((folder / "recipe.toml").read_text(encoding="utf-8"))
    return {**read, "cluster": {"rollouters": 0}, "async": {"max_staleness": 2}}


def check_recorded_once(root: Path) -> None:
    """Each step is there once in each record, each group and each answer once, and nothing
    differs.
    """
    check_bounds(root, 2, STEPS, 4)
    schedule = json_lines(root / "schedule.jsonl")
    assert [line["step"] for line in schedule] == [*range(1, STEPS + 1)]
    lines = json_lines(root / "environment.jsonl")
    versions = [
        line["weights_version"] for line in lines if line["prompts"][0][0].startswith("train")
    ]
    assert versions == [2 * step + 1 for step in range(STEPS)], "a line a step, of two updates each"
    check_answers(root)
    learnt = [name for line in schedule for name in line["learns"]]
    graded = [line["prompts"] for line in json_lines(root / "rewards.jsonl")]
    assert [name for names in graded if names[0][0].startswith("train") for name in names] == learnt
    metrics = [line for line in json_lines(root / "metrics.jsonl") if "loss" in line]
    assert sum(line["log_prob_diff/tokens_differing"] for line in metrics) == 0


def check_replayed(root: Path) -> None:
    again = replay(root, say=lambda _: None, recorded_rewards=True)
    assert again.differences == []


def check_resumed(root: Path, recipe: dict[str, Any]) -> None:
    """From its first checkpoint the run leaves the same bytes, by one process."""
    expected, answers = left_by(root), (root / "environment.jsonl").read_bytes()
    for step in range(4, STEPS + 1, 2):
        shutil.rmtree(root / "checkpoints" / f"step_{step:06}")
    train(RunConfig.model_validate(recipe), silent(), resume=True)
    assert (root / "environment.jsonl").read_bytes() == answers
    assert left_by(root) == expected


@pytest.mark.exhaustive
def test_what_tools_have_said_is_recorded_once_where_rollouters_die_twice_in_a_step(
    check_death: Callable[..., None],
) -> None:
    check_death({"learning": 3, "opening": 1})


MOMENTS: dict[str, dict[str, int]] = {
    "while a batch is drawn": {"rollout": 30},
    "before trainers learn": {"idle": 5},
    "while trainers learn": {"learning": 3},
    "when they have learnt": {"learnt": 3},
    "when they have learnt, and as it is drawn again": {"learnt": 4, "rollout": 5},
    "while weights are passed on": {"rows": 4},
    "while they compare": {"opening": 3},
    "in an evaluation": {"evaluation": 2},
    "in two steps": {"learning": 2, "learnt": 5},
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize(("size", "rollouters"), [(2, 1), (3, 2), (3, 1)], ids=str)
def test_what_tools_have_said_is_recorded_once_however_rollouters_die(
    moment: str, size: int, rollouters: int, check_death: Callable[..., None]
) -> None:
    check_death(MOMENTS[moment], size, rollouters)


@pytest.mark.exhaustive
def test_rollouters_of_a_resumed_run_die_in_the_step_in_which_all_were_killed(
    check_death: Callable[..., None], tmp_path: Path
) -> None:
    """What the tools had said in that step is recorded, and the line of its schedule is not."""
    case = {"config": alone(tmp_path), "unscheduled": 3, "counter": str(tmp_path / "counter")}
    with pytest.raises(AssertionError, match="exit -9"):
        in_world(1, "tests.run.acting:resume", case)
    assert [line["step"] for line in json_lines(tmp_path / "run" / "schedule.jsonl")] == [1, 2]
    check_death({"learning": 1}, more=["--resume"])


@pytest.mark.exhaustive
def test_tools_that_say_something_else_end_the_run_which_is_resumed(
    command: Callable[[dict[str, int]], list[str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recipe = tmp_path / "recipe.toml"
    words = freely(command({"learning": 3}))
    recipe.write_text(recipe.read_text().replace(":Counter", ":Ticking"), encoding="utf-8")
    code, said = ended(words, tmp_path / "log")
    assert code != 0
    assert "rollouters that have come back have drawn another batch" in said
    assert [line["step"] for line in json_lines(tmp_path / "run" / "schedule.jsonl")] == [1, 2]
    train(RunConfig.model_validate(alone(tmp_path)), silent(), resume=True)
    check_recorded_once(tmp_path / "run")
    ask_nothing(monkeypatch)
    check_replayed(tmp_path / "run")
