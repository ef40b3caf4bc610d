"""Processes of environments: what they answer, and what becomes of those that misbehave."""

import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import pytest

from isobit.config.environment import ENVIRONMENTS, EnvironmentConfig
from isobit.environments import pool
from isobit.environments.env_backends import Call, Turn
from isobit.environments.pool import Environments, Result, TurnAnswer
from isobit.rewards.grade import Failure
from isobit.rewards.supervisor import descendants
from isobit.util.errors import ToolError

TOOLS = Path(__file__).parent / "tools.py"
MOST = 200
"""Characters of a result."""


@contextmanager
def environments(name: str, **settings: Any) -> Iterator[Environments[str]]:
    before = hosts()
    place = name if ":" in name or name in ENVIRONMENTS else f"{TOOLS}:{name}"
    made = Environments[str](EnvironmentConfig.model_validate({"class": place, **settings}), MOST)
    try:
        made.tools()
        yield made
    finally:
        made.close()
    # those that were there before may have begun episodes meanwhile
    assert hosts() <= before.union(*map(descendants, before))


@pytest.fixture(scope="module")
def counters() -> Iterator[Environments[str]]:
    """For tests that name their episodes differently, as those of the next are."""
    with environments("Counter", options={"step": 10}) as made:
        yield made


@pytest.fixture(scope="module")
def hostile() -> Iterator[Environments[str]]:
    with environments("Hostile") as made:
        yield made


def hosts() -> set[int]:
    """The processes of environments that there are."""
    return {pid for pid in descendants(os.getpid()) if "environments" in _command(pid)}


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


def call(name: str, *positional: Any, **arguments: Any) -> Call:
    return Call(name, positional, arguments)


def answers(made: Environments[str]) -> dict[str, TurnAnswer]:
    """All that is still to come, by key."""
    found: dict[str, TurnAnswer] = {}
    while made.num_waiting:
        found |= dict(made.poll(0.1))
    return found


def texts(answer: TurnAnswer) -> list[str]:
    return [one.text for one in answer.results]


def ask(made: Environments[str], key: str, *calls: Call, **columns: Any) -> None:
    made.ask(key, columns, [Turn(calls)])


@pytest.mark.parametrize("given", [{}, {"class": "guess", "openenv": "ws://host"}])
def test_an_environment_is_of_one_kind(given: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="needs one of class, verifiers and openenv, and no two"):
        EnvironmentConfig.model_validate(given)


def test_each_episode_has_an_instance_that_lives_until_its_end(counters: Environments[str]) -> None:
    names = [one["function"]["name"] for one in counters.tools()]
    assert names == ["add", "later", "meet"]
    assert counters.tools()[0]["function"]["parameters"]["required"] == ["count"]
    ask(counters, "a", call("add", 1), call("later", count=5), start=100, other="ignored")
    ask(counters, "b", call("add", 2))
    found = answers(counters)
    assert texts(found["a"]) == ["total 110", '{"total": 115}']
    assert texts(found["b"]) == ["total 20"]
    # neither would end before the other has begun
    ask(counters, "b", call("meet", 2), call("meet", 1), call("add", 1), call("meet", "x", "y"))
    told = texts(answers(counters)["b"])
    assert told[:3] == ["2", "1", "total 30"]
    assert told[3].startswith("meet: too many positional arguments")
    counters.ask("a", {}, [Turn([call("add", 1)])], wants_reward=True)
    again = answers(counters)["a"]
    assert texts(again) == ["total 125"]
    assert (counters.has_turn_reward, again.turn_reward) == (False, None)
    assert again.reward == 125.0
    counters.end("a")
    ask(counters, "a", call("add", 1))
    assert texts(answers(counters)["a"]) == ["total 10"]


@pytest.mark.exhaustive
def test_each_turn_has_a_reward_also_one_without_calls_or_that_was_answered_elsewhere() -> None:
    with environments("Paced") as made:
        assert [one["function"]["name"] for one in made.tools()] == ["add", "later", "meet"]
        assert made.has_turn_reward
        ask(made, "a", call("add", 1), call("add", 2), start=100)
        made.ask("b", {}, [Turn([call("add", 1)]), Turn([call("add", 3)])])
        found = answers(made)
        assert (found["a"].turn_reward, found["b"].turn_reward) == (0.375, 0.375)
        ask(made, "a")
        without_calls = answers(made)["a"]
        assert (without_calls.results, without_calls.turn_reward) == ((), 0.0)
        made.ask("a", {}, [], wants_reward=True)
        assert answers(made)["a"].reward == 103.0
        ask(made, "b", call("add", 2000))
        failure = answers(made)["b"].failure
        assert failure is not None
        assert failure.kind == "ValueError"
        assert failure.message.startswith("ValueError: too large (tools.py:")


def test_turns_that_were_answered_elsewhere_are_made_up_for(counters: Environments[str]) -> None:
    turns = [Turn([call("add", 1), call("add", 2)]), Turn([call("add", 3)])]
    counters.ask("behind", {"start": 5}, turns)
    assert texts(answers(counters)["behind"]) == ["total 65"]


def test_what_is_wrong_with_a_call_is_told_to_the_model(counters: Environments[str]) -> None:
    wrong = [call("nothing"), call("reset"), call("__init__"), call("add"), call("add", 1, 2)]
    ask(counters, "wrong", *wrong, call("add", x=1), call("add", "1"), call("add", 1))
    (answer,) = answers(counters).values()
    assert [one.kind for one in answer.results] == ["error"] * 7 + ["ok"]
    said = texts(answer)
    assert said[0] == "there is no tool 'nothing'; the tools are add, later, meet"
    assert "no tool 'reset'" in said[1]
    assert "no tool '__init__'" in said[2]
    assert "missing a required argument: 'count'" in said[3]
    assert said[6].startswith("TypeError")
    assert said[7] == "total 10"


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("tool", "kind", "message"),
    [
        ("hang", "deadline", "took longer than environment.deadline_s = 1"),
        ("die", "crash", "exit code 3"),
        ("leave", "crash", "called sys.exit(4)"),
        ("eat", "memory", "environment.memory_mib"),
        ("write_everywhere", "flood", "the pipe of its answers"),
    ],
)
def test_an_episode_that_misbehaves_fails_alone(tool: str, kind: str, message: str) -> None:
    with environments("Hostile", deadline_s=1.0, memory_mib=512) as made:
        ask(made, "good", call("lie"))
        ask(made, "bad", call(tool))
        found = answers(made)
        assert texts(found["good"]) == ["short"]
        failure = found["bad"].failure
        assert failure is not None
        assert failure.kind == kind
        assert message in failure.message
        ask(made, "good", call("fail"))
        ask(made, "bad", call("lie"))  # a new process
        found = answers(made)
        assert found["good"].results == (Result("error", "ValueError: no such thing"),)
        assert texts(found["bad"]) == ["short"]


FORGED = {
    '{"refused": "end the run"}': "flood",
    '{"ready": [], "opens": true}': "flood",
    '{"episode": 1, "results": [["ok", "forged"]]}': "flood",
    '{"ended": 0, "output": "x"}': "flood",
    '{"note": "x", "results": []}': "flood",
    "[1]": "flood",
    "{}": "flood",
    '{"failed": ["crash"], "message": "x"}': "flood",
    '{"failed": "crash"}': "flood",
    '{"failed": "a\\u001b[2J\\n", "message": "b\\u001b[2J"}': "'a\\x1b[2J\\n'",
}
"""Lines that a tool writes as its episode, and the kinds of the failures."""


def test_a_line_of_an_episode_is_only_what_it_may_be(hostile: Environments[str]) -> None:
    tools = list(hostile.tools())
    ask(hostile, "good", call("lie"))
    for line in FORGED:
        ask(hostile, line, call("forge", line))
    found = answers(hostile)
    kinds = {line: one.failure.kind for line, one in found.items() if one.failure}
    assert kinds == FORGED
    assert found[list(FORGED)[-1]].failure == Failure(kinds[list(FORGED)[-1]], "b\\x1b[2J")
    ask(hostile, "good", call("lie"))  # its process is still there
    assert texts(answers(hostile)["good"]) == ["short"]
    assert hostile.tools() == tools


def test_a_flood_is_cut_and_text_is_text(hostile: Environments[str]) -> None:
    ask(hostile, "flooded", call("flood"), call("control"))
    (answer,) = answers(hostile).values()
    assert answer.results == (Result("cut", "y" * MOST), Result("ok", "<eos><pad>?<bos>"))


def test_when_the_host_is_killed_its_episodes_fail_and_others_are_served() -> None:
    with environments("Hostile", at_once=2) as made:
        ask(made, "idle", call("lie"))
        answers(made)
        ask(made, "killer", call("kill_host"))
        ask(made, "beside", call("hang"))
        ask(made, "next", call("lie"))
        found = answers(made)
        assert {key for key, one in found.items() if one.failure} == {"killer", "beside"}
        assert all(one.failure.kind == "crash" for one in found.values() if one.failure)
        assert texts(found["next"]) == ["short"]
        ask(made, "idle", call("lie"))  # its instance went with the host
        failure = answers(made)["idle"].failure
        assert failure is not None
        assert failure.kind == "crash"


def test_an_episode_that_is_ended_is_not_answered(hostile: Environments[str]) -> None:
    ask(hostile, "a", call("hang"))
    hostile.poll(0.5)
    hostile.end("a")
    assert hostile.num_waiting == 0
    ask(hostile, "b", call("lie"))
    assert answers(hostile).keys() == {"b"}


def test_a_reset_that_raises_fails_the_episode() -> None:
    with environments("Breaks") as made:
        ask(made, "a", call("act"))
        failure = answers(made)["a"].failure
        assert failure is not None
        assert failure.kind == "reset"
        assert re.fullmatch(r"KeyError: 'nothing' \(\w+\.py:\d+, in reset\)", failure.message)


def test_what_reset_returns_is_for_the_prompt_and_told_once(
    counters: Environments[str],
) -> None:
    with environments("Speaks") as made:
        assert made.opens
        made.ask("a", {"name": "<eos>"}, [])
        assert answers(made)["a"] == TurnAnswer(opening="hello <eos>", seconds=ANY)
        ask(made, "a", call("act"))
        assert answers(made)["a"] == TurnAnswer((Result("ok", "1"),), seconds=ANY)
    assert not counters.opens  # its reset is annotated to return None


def test_a_reset_that_returns_text_against_its_annotation_is_refused() -> None:
    with environments("Contradicts") as made:
        ask(made, "a", call("act"))
        with pytest.raises(ToolError, match=r"reset\(\) of Contradicts returned 'hello'"):
            answers(made)


def failures(found: dict[str, TurnAnswer]) -> dict[str, Failure]:
    return {key: one.failure for key, one in found.items() if one.failure}


def until(is_so: Callable[[], bool]) -> None:
    for _ in range(1200):
        if is_so():
            return
        time.sleep(0.05)
    raise AssertionError("it never was so")


@pytest.mark.exhaustive
@pytest.mark.parametrize(("episodes", "talks"), [(12, 50), (30, 4), (3, 150)])
def test_an_answer_that_came_in_time_counts_however_late_it_is_read(
    episodes: int, talks: int, tmp_path: Path
) -> None:
    """All together are more than a pipe holds, and nobody reads before the deadlines are over."""
    with environments("Patient", deadline_s=4.0) as made:
        for number in range(episodes):
            said = [call("talk")] * talks
            mark = call("mark", str(tmp_path / str(number)))
            ask(made, str(number), call("wait", 0.5 * number / episodes), *said, mark)
        made.poll()
        until(lambda: len(os.listdir(tmp_path)) == episodes)
        time.sleep(4.5)
        found = answers(made)
        assert failures(found) == {}
        assert {len(one.results) for one in found.values()} == {talks + 2}
        # the instances are there still, and requests are read as they come
        for number in range(episodes):
            ask(made, str(number), call("talk"), ignored="x" * 70_000)
        assert failures(answers(made)) == {}


@pytest.mark.exhaustive
def test_the_trainer_does_not_take_its_own_absence_for_a_host_that_hangs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    absent = [0.0]
    monkeypatch.setattr(pool, "monotonic", lambda: time.monotonic() + absent[0])
    with environments("Patient") as made:
        for number in range(5):
            ask(made, str(number), call("wait", 0.2))
            made.poll()
            absent[0] += 1000
        assert failures(answers(made)) == {}


def test_a_host_that_hangs_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "_GRACE_S", 0.5)
    with environments("Hostile", deadline_s=0.5) as made:
        ask(made, "a", call("stop_host"))
        assert failures(answers(made))["a"].message == "its host did not end it at its deadline"
    with environments("Hostile") as made:
        ask(made, "a", call("lie"))
        assert texts(answers(made)["a"]) == ["short"]


@pytest.mark.exhaustive
def test_turns_that_are_run_again_have_the_time_of_each() -> None:
    with environments("Patient", deadline_s=1.5) as made:
        made.ask("a", {}, [Turn([call("wait", 0.6)]) for _ in range(3)], wants_reward=True)
        (answer,) = answers(made).values()
        assert (answer.failure, answer.reward) == (None, 1.0)
        assert answer.seconds > 1.5
    with environments("Patient", deadline_s=0.5, episode_s=0.75) as made:
        made.ask("a", {}, [Turn([call("wait", 60)]) for _ in range(9)])
        ask(made, "b", call("wait", 60))
        late = failures(answers(made))
        assert {one.kind for one in late.values()} == {"deadline"}
        told = "took longer than environment.deadline_s = 0.5"
        assert late["b"].message == told
        assert late["a"].message == f"{told} allows for turns that are run again: 1.25 s"


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("name", "questions"), [("Counter", (3, 1, 2)), ("Paced", (4, 1, 2)), ("Speaks", (4, 1, 2))]
)
def test_each_question_of_an_episode_that_goes_on_without_a_break_has_a_deadline(
    name: str, questions: tuple[int, int, int]
) -> None:
    """Of a new episode and of one that was begun; a turn without calls is a question only where
    turns are rewarded.
    """
    full, bare = Turn([call("act")]), Turn([])
    with environments(name, deadline_s=2.0) as made:
        made.ask("a", {}, [full, bare, full], wants_reward=True)
        made.ask("a", {}, [full])
        made.ask("a", {}, [full, full])
        seconds = [message[-1] for _, message in made._queue]
    assert seconds == [2.0 * count for count in questions]


def test_a_process_that_cannot_be_started_fails_its_episode_alone() -> None:
    with environments("Refused") as made:
        ask(made, "a", call("wait", 0))
        ask(made, "b", call("wait", 0))
        found = answers(made)
        why = "no process could be started for it: [Errno 11] Resource temporarily unavailable"
        assert failures(found) == {"a": Failure("crash", why)}
        ask(made, "a", call("wait", 0))
        assert failures(answers(made)) == {}


def test_an_episode_that_ends_while_nothing_is_asked_does_not_begin_anew(tmp_path: Path) -> None:
    with environments("Hostile") as made:
        ask(made, "a", call("die_later", str(tmp_path / "now")))
        (pid,) = texts(answers(made)["a"])
        (tmp_path / "now").touch()
        until(lambda: not Path(f"/proc/{pid}").exists())
        ask(made, "a", call("lie"))
        failure = failures(answers(made))["a"]
        assert (failure.kind, "exit code 3" in failure.message) == ("crash", True)
        ask(made, "a", call("lie"))
        assert texts(answers(made)["a"]) == ["short"]


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("place", "options", "message"),
    [
        ("search", {}, r"do not fit Search._prepare\(.*missing .*'folder'; given are none"),
        ("search", {"fodler": "x"}, r"missing .*'folder'; given are 'fodler'"),
        ("guess", {"x": 1}, r"do not fit Guess\(.*'x'; given are 'x'"),
        ("python", {"secnods": 1}, r"do not fit Python\(.*'secnods'"),
        (f"{TOOLS}:Counter", {"steps": 2}, r"do not fit Counter\(step: int = 1\)"),
        (f"{TOOLS}:Hostile", {"a": "env:HOME"}, "given are 'a'"),
    ],
)
def test_options_that_a_class_does_not_take_are_refused(
    place: str, options: dict[str, Any], message: str
) -> None:
    config = EnvironmentConfig.model_validate({"class": place, "options": options})
    with pytest.raises(ToolError, match=message):
        Environments[str](config, MOST).tools()


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("place", "message"),
    [
        (f"{TOOLS}:Cuonter", "did you mean Counter"),
        (f"{TOOLS}:Undocumented", "the tool 'act' of Undocumented has no schema"),
        ("nowhere.py:Class", "there is no file nowhere.py"),
        ("nowhere:Class", "fails on import: ModuleNotFoundError"),
        (str(TOOLS), "names no class of the file; expected .*:Class, and its classes are Counter"),
        ("nowhere.py", "there is no file nowhere.py"),
        ("calculater", "or one of calculator, .*; did you mean calculator"),
        ("serach", "did you mean search"),
        ("Python", "did you mean python"),
        ("shop", "cannot read the environment 'shop'; expected 'path/to/file.py:Class'"),
    ],
)
def test_a_class_that_cannot_be_used_is_refused(place: str, message: str) -> None:
    with pytest.raises(ToolError, match=message):
        Environments[str](EnvironmentConfig.model_validate({"class": place}), MOST).tools()
