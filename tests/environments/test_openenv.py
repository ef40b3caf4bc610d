"""Episodes of OpenEnv servers: what is asked and told, and what becomes of servers that misbehave.

The servers are ``tests.environments.servers``, and at the end a real one of openenv-core.
"""

import json
import math
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from isobit.config.environment import EnvironmentConfig
from isobit.environments.env_backends import Call, Turn
from isobit.environments.openenv import _objection, _observed, _result, _tools
from isobit.environments.pool import Environments, TurnAnswer
from isobit.util.errors import ToolError
from tests.environments.servers import Count, Message, Tools, serving

pytestmark = pytest.mark.timeout(60)
MOST = 200
"""Characters of a result."""


@contextmanager
def environments(address: str, **settings: Any) -> Iterator[Environments[str]]:
    made = Environments[str](
        EnvironmentConfig.model_validate({"openenv": address, "deadline_s": 2, **settings}), MOST
    )
    try:
        made.tools()
        yield made
    finally:
        made.close()


def answers(made: Environments[str]) -> dict[str, TurnAnswer]:
    found: dict[str, TurnAnswer] = {}
    while made.num_waiting:
        found |= dict(made.poll(0.1))
    return found


def step(*positional: Any, **arguments: Any) -> Turn:
    return Turn([Call("step", positional, arguments)])


def told(answer: TurnAnswer) -> list[tuple[str, str]]:
    return [(one.kind, one.text) for one in answer.results]


def test_a_server_without_tools_has_the_tool_step_and_its_rewards_are_those_of_turns() -> None:
    with (
        serving(Count) as (address, server, _),
        environments(address.replace("ws://", "http://") + "/", options={"goal": 9}) as made,
    ):
        (tool,) = made.tools()
        assert tool["function"] == {
            "name": "step",
            "description": "Count on.",
            "parameters": {
                "type": "object",
                "properties": {"by": {"type": "integer"}},
                "required": ["by"],
            },
        }
        assert (made.opens, made.leads, made.has_reward, made.has_turn_reward) == (
            True,
            False,
            False,
            True,
        )
        made.ask("a", {"start": 2, "seed": 7, "prompt": "Count."}, [])
        made.ask("b", {}, [step(1), step(by=2)])  # of which the record has the first answer
        found = answers(made)
        assert json.loads(str(found["a"].opening)) == {"total": 2, "seed": 7}
        assert (told(found["b"]), found["b"].turn_reward) == ([("ok", '{"total": 3}')], 0.5)
        reset = next(one["data"] for one in server.asked if one["data"].get("seed"))
        assert reset == {"goal": 9, "start": 2, "seed": 7, "prompt": "Count."}
        calls = [Call("step", (1,), {}), Call("step", (), {"to": 1}), Call("step", (-1,), {})]
        made.ask("a", {}, [Turn([*calls, Call("leap", (), {})])])
        answer = answers(made)["a"]
        assert told(answer) == [
            ("ok", '{"total": 3}'),
            ("error", "by: Field required"),
            ("error", "only up"),
            ("error", "there is no tool 'leap'; the tools are step"),
        ]
        assert answer.turn_reward == 0.25
        made.ask("a", {}, [Turn([Call("step", (4,), {}), Call("step", (2,), {}), calls[0]])])
        over = answers(made)["a"]
        assert (over.is_over, over.reward, over.turn_reward) == (True, 1.5, None)
        assert [text for _, text in told(over)] == ['{"total": 7}', '{"total": 9}']


@pytest.mark.exhaustive
def test_a_session_that_is_told_of_all_turns_has_the_time_of_each() -> None:
    def late(_: Any, message: Message) -> bool:
        time.sleep(0.6 * ("by" in message["data"]))
        return False

    with (
        serving(Count, wrong=late) as (address, _, _),
        environments(address, deadline_s=1.5) as made,
    ):
        made.ask("a", {}, [step(1), step(2), step(3)])
        answer = answers(made)["a"]
        assert (answer.failure, told(answer)) == (None, [("ok", '{"total": 6}')])


def test_tools_of_an_mcp_environment_are_those_that_it_lists() -> None:
    with serving(Tools) as (address, server, _), environments(address) as made:
        add, greet = (one["function"] for one in made.tools())
        assert (add["name"], add["description"]) == ("add", "Add two numbers.")
        assert greet["parameters"]["properties"] == {"name": {"type": "string"}}
        calls = [
            Call("add", (1,), {"b": 2}),
            Call("add", (), {"b": 2}),
            Call("greet", ("Eve",), {}),
            Call("greet", ("x" * 500,), {}),
        ]
        made.ask("a", {}, [Turn(calls)])
        answer = answers(made)["a"]
        assert answer.opening is None  # nothing was observed
        assert told(answer)[:3] == [
            ("ok", "3"),
            ("error", "a is missing"),
            ("ok", '{"hello": "Eve"}'),
        ]
        assert told(answer)[3] == ("cut", '{"hello": "' + "x" * (MOST - 11))
        assert answer.turn_reward == 3.0
        made.ask("b", {}, [])
        assert answers(made)["b"].turn_reward is None
        assert server.open == 2
        for key in ("a", "b"):
            made.end(key)
        until = time.monotonic() + 10
        while server.open and time.monotonic() < until:
            time.sleep(0.01)
        assert server.open == 0


def test_no_more_sessions_are_open_than_episodes_may_be_and_a_full_server_is_told() -> None:
    with (
        serving(Count, capacity=2) as (address, server, _),
        environments(address, at_once=2) as made,
    ):
        keys = [f"episode {number}" for number in range(5)]
        for key in keys:
            made.ask(key, {}, [])
        found: dict[str, TurnAnswer] = {}
        for _ in range(600):  # those that have begun are not held up by those that wait
            if len(found) == 2:
                break
            found |= made.poll(0.1)
        assert len(found) == 2
        for key in found:
            made.ask(key, {}, [step(1)])
        while made.num_waiting:
            for key, answer in made.poll(0.1):
                if key not in found:
                    made.ask(key, {}, [step(1)])
                else:
                    made.end(key)
                found[key] = answer
        assert [found[key].turn_reward for key in keys] == [0.25] * 5
        assert server.most_open == 2
    with serving(Count, capacity=1) as (address, _, _), environments(address) as made:
        for key in ("a", "b"):
            made.ask(key, {}, [])
        failures = [one.failure for one in answers(made).values() if one.failure is not None]
        assert [one.kind for one in failures] == ["capacity"]
        assert "set environment.at_once = 1" in failures[0].message


def closes(socket: Any, message: Message) -> bool:
    socket.close()
    return True


def hangs(socket: Any, message: Message) -> bool:
    return True


def answers_with(text: str) -> Callable[[Any, Message], bool]:
    def answer(socket: Any, message: Message) -> bool:
        socket.send(text)
        return True

    return answer


def observed(**data: Any) -> Callable[[Any, Message], bool]:
    return answers_with(json.dumps({"type": "observation", "data": data}))


WRONG = {
    90: (closes, "connection", "no answer from the OpenEnv server at ws://127"),
    91: (hangs, "deadline", "took longer than environment.deadline_s = 1"),
    92: (answers_with("[1, 2"), "protocol", "answers step with no observation: '[1, 2'"),
    93: (observed(), "protocol", "answers step with no observation"),
    94: (observed(observation={}, reward="much"), "protocol", "with no observation"),
    95: (observed(observation={}, reward=math.nan), "not finite", "nan"),
    96: (
        answers_with('{"type": "error", "data": {"code": "SESSION_ERROR", "message": "no"}}'),
        "server",
        "says SESSION_ERROR: no",
    ),
}
"""What a server does wrong, by the action; and the failure of the episode."""


def test_an_episode_whose_server_misbehaves_fails_by_kind() -> None:
    def wrong(socket: Any, asked: Message) -> bool:
        number = asked["data"].get("by")
        return number in WRONG and WRONG[number][0](socket, asked)

    with (
        serving(Count, wrong=wrong) as (address, _, _),
        environments(address, deadline_s=1) as made,
    ):
        for number in WRONG:
            made.ask(str(number), {}, [step(number)])
        made.ask("reset", {"start": -1}, [])
        made.ask("good", {}, [step(1)])
        found = answers(made)
    assert found.pop("good").turn_reward == 0.25
    reset = found.pop("reset").failure
    assert reset is not None
    assert (reset.kind, reset.message) == ("reset", "a start below 0")
    for number, (_, kind, message) in WRONG.items():
        failure = found[str(number)].failure
        assert failure is not None
        assert (failure.kind, message in failure.message) == (kind, True), failure


def test_a_server_that_is_gone_fails_episodes_and_in_the_end_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("isobit.environments.pool._MOST_UNANSWERED", 3)
    with serving(Count) as (address, _, server), environments(address, deadline_s=0.5) as made:
        made.ask("open", {}, [])
        assert answers(made)["open"].failure is None
        server.shutdown()
        made.ask("open", {}, [step(1)])
        made.ask("new", {}, [])
        found = answers(made)
        kinds = [one.failure.kind for one in found.values() if one.failure is not None]
        assert kinds == ["connection"] * 2
        made.ask("third", {}, [])
        with pytest.raises(ToolError, match=r"3 episodes in a row had; start the server again"):
            answers(made)


def test_the_start_says_what_is_wrong() -> None:
    for given in ("127.0.0.1:8000", "ftp://host", "ws://"):
        with pytest.raises(ValueError, match="openenv is an address such as"):
            EnvironmentConfig.model_validate({"openenv": given})
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"ws://127.0.0.1:{free.getsockname()[1]}"
        nobody = f"no answer from the OpenEnv server at {address}.*start the server, and give its"
        with pytest.raises(ToolError, match=nobody), environments(address, deadline_s=0.4):
            pass
    with (
        serving(Tools, wrong=observed(observation={"tools": [{"name": 1}]})) as (address, _, _),
        pytest.raises(ToolError, match="lists a tool without a name or schema"),
        environments(address),
    ):
        pass


def tool(name: str = "add", **others: Any) -> Message:
    return {"name": name, "description": "Add.", "input_schema": {"type": "object"}} | others


DEEP: Message = {}
for _ in range(500):
    DEEP = {"properties": {"a": DEEP}}


@pytest.mark.parametrize(
    ("tools", "told"),
    [
        *(([tool(name)], "a tool with the name") for name in ("", "a\x1b[2J", "<|im_end|>", "a b")),
        ([tool("a" * 100_000)], "a tool with the name 'aaaa"),
        ([tool(str(number)) for number in range(20_000)], "lists 20,000 tools; .* at most 256"),
        ([tool(), tool()], "the tool 'add' more than once"),
        ([tool(description=5)], "its description is no text"),
        ([tool(description="a" * (2 << 20))], "have 2,097,.* characters"),
        ([tool(input_schema={"properties": 5})], "'properties' of its schema is 5"),
        ([tool(input_schema={"properties": {"a": 5}})], "and not a table of schemas"),
        ([tool(input_schema={"required": "a"})], "'required' of its schema is 'a'"),
        ([tool(input_schema={"type": "array"})], "of the type 'array'"),
        ([tool(input_schema=DEEP)], "more than 64 levels"),
        ([tool(input_schema=None)], "without a name or schema"),
    ],
)
def test_tools_that_no_model_can_be_told_of_are_refused(tools: list[Any], told: str) -> None:
    with pytest.raises(ToolError, match=told) as error:
        _tools(tools)
    assert str(error.value).replace("\n", "").isprintable() and len(str(error.value)) < 500


def test_the_action_of_a_server_is_checked_as_its_tools_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Count, "schema", {"properties": {"by": 5}})
    refused = pytest.raises(ToolError, match=r"'step' of the OpenEnv server .* table of schemas")
    with serving(Count) as (address, _, _), refused, environments(address):
        pass


def test_numbers_places_and_parts_of_any_form_are_read_or_refused() -> None:
    assert _observed({}, {"reward": 10**400}) is None
    assert _objection({"errors": [{"loc": 5, "msg": "no"}, {"msg": "what"}]}) == "5: no; : what"
    seen = {
        "tool_name": "a",
        "result": {"content": [{"type": "text"}, {"type": "text", "text": 1}]},
    }
    assert _result(seen, 99) == ["ok", "\n1"]


def test_a_server_of_openenv_core_is_acted_in_as_the_ones_above(tmp_path: Path) -> None:
    pytest.importorskip("openenv.core", reason="`pip install openenv-core==0.3.0` elsewhere")
    for kind in ("echo", "tools"):
        with real_server(kind, tmp_path / kind) as address, environments(address) as made:
            names = [one["function"]["name"] for one in made.tools()]
            made.ask("a", {"seed": 3, "question": "?"}, [])
            opening = answers(made)["a"].opening
            if kind == "echo":
                assert (names, opening) == (["step"], '{"echoed": "seed 3"}')
                wrong = Call("step", (), {"massage": "x"})
                made.ask("a", {}, [Turn([Call("step", ("hello",), {}), wrong])])
                answer = answers(made)["a"]
                assert told(answer)[0] == ("ok", '{"echoed": "hello"}')
                assert told(answer)[1][1].startswith("message: Field required; massage: Extra")
                assert answer.turn_reward == 5.0
                made.ask("a", {}, [step("raise"), step("bye")])
                over = answers(made)["a"]
                assert (over.is_over, over.reward) == (True, 3.0)
                made.ask("b", {}, [])  # "a" has not been ended, and the server allows one session
                failure = answers(made)["b"].failure
                assert failure is not None
                assert failure.kind == "capacity"
            else:
                assert (names, opening) == (["add", "greet"], None)
                calls = [Call("add", (1, 2), {}), Call("greet", ("Eve",), {}), Call("add", (), {})]
                made.ask("a", {}, [Turn(calls)])
                answer = answers(made)["a"]
                assert told(answer)[:2] == [("ok", "3"), ("ok", "Hello, Eve!")]
                assert "Missing required argument" in told(answer)[2][1]


@contextmanager
def real_server(kind: str, log: Path) -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with log.open("w") as file:
        command = [sys.executable, str(Path(__file__).parent / "real_openenv.py"), kind, str(port)]
        process = subprocess.Popen(command, stdout=file, stderr=file)
        try:
            until = time.monotonic() + 40
            while "running on" not in log.read_text() and time.monotonic() < until:
                time.sleep(0.1)
            yield f"ws://127.0.0.1:{port}"
        finally:
            process.kill()
            process.wait()
