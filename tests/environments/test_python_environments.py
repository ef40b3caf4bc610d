"""Environments from Python: their names, their copies in a host, and TRL's rewards of them."""

import gc
from typing import Any, Literal

import pytest

from isobit.config.environment import EnvironmentConfig
from isobit.environments import shipped
from isobit.environments.env_backends import Call, HostStart, Turn
from isobit.environments.pool import Environments
from isobit.environments.python_environments import (
    give_environment,
    packed_environment,
    takes_environments,
)
from isobit.environments.tool_classes import HostedClass
from isobit.util.errors import ConfigError, ToolError


def local_class(step: int = 1) -> type:
    class Counter:
        def reset(self, start: int = 0, **columns: Any) -> None:
            self.total = start

        def add(self, count: int) -> str:
            """Add.

            Args:
                count: How many.
            """
            self.total += step * count
            return f"total {self.total}"

    return Counter


def double(number: int) -> int:
    """Double.

    Args:
        number: It.
    """
    return 2 * number


def totals(environments: list[Any], goal: list[int], **columns: Any) -> list[float]:
    """As TRL calls it, with columns as lists."""
    return [one.total / wanted for one, wanted in zip(environments, goal, strict=True)]


def start(name: str) -> HostStart:
    return HostStart("class", name, {}, 5.0, 1 << 30, 100, packed_environment(name))


def test_a_class_that_can_be_imported_has_its_name_and_no_copy() -> None:
    made = give_environment(shipped.Guess)
    assert made.name == "isobit.environments.shipped:Guess"
    assert packed_environment(made.name) == b""


def test_a_copy_says_what_the_class_says_and_is_scored_by_its_rewards() -> None:
    made = give_environment(local_class(), [totals])
    hosted = HostedClass(start(made.name))
    ready = hosted.ready()
    assert [one["function"]["name"] for one in ready["ready"]] == ["add"]
    assert ready["has_reward"] and not ready["opens"]
    episode = hosted.open()
    assert episode.begin({"start": 2, "goal": 10}) == {}
    answer = episode.answer([Turn([Call("add", (3,), {})])], wants_reward=True)
    assert answer == {"results": [["ok", "total 5"]], "reward": 0.5}
    twice = HostedClass(start((kept := give_environment(local_class(), [totals, totals])).name))
    (again := twice.open()).begin({"start": 5, "goal": 10})
    assert again.answer([], wants_reward=True)["reward"] == 1.0 and kept.rewards


def test_types_that_are_written_as_text_reach_the_copy() -> None:
    """The names in them are no part of what a function's code reads."""
    names: dict[str, Any] = {"__name__": "notebook", "Wanted": Literal["a", "b"]}
    code = '''def pick(one: "Wanted" = "a") -> "str":
        """Pick.

        Args:
            one: Which.
        """
        return one
'''
    exec(code, names)
    made = give_environment([names["pick"]])
    (schema,) = HostedClass(start(made.name)).ready()["ready"]
    assert schema["function"]["parameters"]["properties"]["one"]["enum"] == ["a", "b"]


def test_functions_are_tools_in_a_process() -> None:
    def greet(name: str) -> str:
        """Greet.

        Args:
            name: Whom.
        """
        return f"Hello, {name}!"

    made = give_environment([double, greet])
    assert made.name.startswith("python:tools@")
    config = EnvironmentConfig.model_validate({"class": made.name})
    environments = Environments[str](config, 100)
    try:
        assert [one["function"]["name"] for one in environments.tools()] == ["double", "greet"]
        calls = [Call("double", (), {"number": 4}), Call("greet", ("Eve",), {}), Call("no", (), {})]
        environments.ask("a", {}, [Turn(calls)])
        found: dict[str, Any] = {}
        while environments.num_waiting:
            found |= dict(environments.poll(0.1))
        assert [one.text for one in found["a"].results[:2]] == ["8", "Hello, Eve!"]
        assert found["a"].results[2].text.startswith("there is no tool 'no'")
    finally:
        environments.close()


def test_another_class_or_reward_has_another_name() -> None:
    kept = [
        give_environment(local_class()),
        give_environment(local_class(step=2)),
        give_environment(local_class(), [totals]),
        give_environment([double]),
    ]
    assert len({one.name for one in kept}) == 4
    assert give_environment(local_class()).name == kept[0].name


def test_what_is_held_no_more_or_cannot_be_copied_is_refused() -> None:
    name = give_environment([double]).name
    gc.collect()
    with pytest.raises(ToolError, match=r"was given from Python; give the same one again"):
        packed_environment(name)

    class Holds:
        lines = (one for one in "generators are not copied")

        def read(self) -> str:
            """Read."""
            return next(self.lines)

    held = give_environment(Holds)
    with pytest.raises(
        ToolError, match=r"cannot be handed to its process: .* in __init__ or reset"
    ):
        packed_environment(held.name)


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (shipped.Guess(), "expected a class whose public methods are the tools"),
        (5, "expected a class"),
        ([5], "a list of functions"),
        ([lambda number: number], "a list of functions that have names"),
        ([double, double], "two tools have one name"),
        ([shipped.Guess.get_reward], "'get_reward' cannot be a tool"),
        ([takes_environments, local_class()], "a list of functions"),
    ],
)
def test_what_is_no_environment_is_refused(value: Any, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        give_environment(value)


def test_a_reward_of_environments_and_texts_is_refused() -> None:
    def both(environments: Any, completions: Any) -> list[float]:
        return []

    assert takes_environments(both) and not takes_environments(double)
    with pytest.raises(
        ConfigError, match=r"'both' takes environments and completions; .* two rewar"
    ):
        give_environment(local_class(), [both])
