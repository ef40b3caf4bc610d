"""Tasksets of verifiers 0.4 as they are: their rows, what is asked and told, and their rewards.

Each program is a process that imports verifiers, so these tests take a minute; they run where
verifiers 0.4 is installed, with ``uv`` on the path.
"""

from pathlib import Path
from typing import Any

import pytest

from isobit.config.data import VerifiersData
from isobit.config.environment import EnvironmentConfig
from isobit.data.sources import load_rows
from isobit.environments.env_backends import Call, Turn
from isobit.environments.pool import Environments, TurnAnswer
from isobit.environments.tasksets import is_classic
from isobit.util.errors import DataError, ToolError

pytest.importorskip("verifiers", reason="`pip install verifiers==0.4.0` elsewhere")
if is_classic():
    pytest.skip("this verifiers has classic environments", allow_module_level=True)

pytestmark = pytest.mark.timeout(600)
FOLDER = Path(__file__).parent / "tasksets"
TOOLS = {"taskset": {"task": {"tools": True}}}
MOST = 200


def made(name: str, **options: Any) -> Environments[str]:
    given = {"verifiers": str(FOLDER / f"{name}.py"), "options": options, "deadline_s": 200}
    return Environments[str](EnvironmentConfig.model_validate(given), MOST)


def rows(name: str, **options: Any) -> list[dict[str, Any]]:
    source = VerifiersData(environment=str(FOLDER / f"{name}.py"), options=options)
    return [{"prompt": [*row.prompt], **row.columns} for row in load_rows(source)]


def answers(environments: Environments[str]) -> dict[str, TurnAnswer]:
    found: dict[str, TurnAnswer] = {}
    while environments.num_waiting:
        found |= dict(environments.poll(0.1))
    return found


def test_a_single_turn_is_scored_by_the_rewards_of_the_task() -> None:
    given = rows("sums")
    assert given[3]["prompt"] == [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "3 + 1 = ?"},
    ]
    environments = made("sums")
    try:
        assert environments.tools() == []
        assert (environments.leads, environments.speaks) == (True, False)
        for key, said in (("right", "It is 4."), ("wrong", "It is 5."), ("long", "4" + "!" * 500)):
            environments.ask(key, given[3], [Turn([], said)])
        environments.ask("cut", given[3], [Turn([], "It is 4", is_cut=True)], wants_reward=True)
        environments.ask("silent", given[3], [], wants_reward=True)
        found = answers(environments)
        assert {key: (one.is_over, one.reward) for key, one in found.items()} == {
            "right": (True, 1.25),
            "wrong": (True, 0.25),
            "long": (True, 1.0),
            "cut": (True, 1.25),
            "silent": (False, 0.25),
        }
        environments.ask("other", {**given[3], "task": given[2]["task"] | {"answer": "9"}}, [])
        with pytest.raises(ToolError, match="a row's task is none of the environment's"):
            answers(environments)
    finally:
        environments.close()


def test_tools_are_called_by_the_program() -> None:
    given = rows("sums", **TOOLS)
    environments = made("sums", **TOOLS)
    try:
        (tool,) = environments.tools()
        name = tool["function"]["name"]
        assert list(tool["function"]["parameters"]["properties"]) == ["a", "b"]
        environments.ask("a", given[3], [])
        opened = answers(environments)["a"]
        assert (opened.failure, opened.opening) == (None, None)  # it shows the row's prompt
        calls = [Call(name, (3,), {"b": 1}), Call("nothing", (), {})]
        environments.ask("a", {}, [Turn(calls, "I add.")])
        told = answers(environments)["a"].results
        assert (told[0].kind, told[0].text) == ("ok", "4")
        assert len(told) == 2
        environments.ask("a", {}, [Turn([], "4")])
        over = answers(environments)["a"]
        assert (over.is_over, over.reward) == (True, 1.25)
    finally:
        environments.close()


def test_a_game_speaks_as_the_user_and_ends_itself() -> None:
    (row,) = rows("guess")
    environments = made("guess")
    try:
        environments.tools()
        assert environments.speaks
        environments.ask("a", row, [Turn([], "3"), Turn([], "5")])
        answer = answers(environments)["a"]
        assert [(one.kind, one.text) for one in answer.results] == [("user", "Not 5.")]
        environments.ask("a", {}, [Turn([], "7")])
        over = answers(environments)["a"]
        assert (over.is_over, over.reward) == (True, 1 / 3)
    finally:
        environments.close()


def test_what_cannot_be_played_is_refused() -> None:
    environments = made("sums", agent={"harness": {"id": "bash"}})
    try:
        with pytest.raises(ToolError, match="'bash' runs what the model writes on this machine"):
            environments.tools()
    finally:
        environments.close()
    with pytest.raises(DataError, match=r"cannot be read: .*there is no file"):
        load_rows(VerifiersData(environment="nowhere.py"))
