"""Environments that are passed from Python, as ``isobit.train(environment=Shop)``: a class, or a
list of functions that are the tools, with TRL's rewards of them.

A class that a new process can import is named ``module:Class``.  Any other one (of a script or
notebook), and functions, are named ``python:NAME@DIGEST`` as rewards are
(``isobit.rewards.python_rewards``), and the host of the environment gets a copy.
"""

import inspect
import pickle
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import FunctionType
from typing import Any, TypeAlias, get_type_hints
from weakref import WeakValueDictionary

from isobit.rewards.behaviour_digest import digest_of
from isobit.rewards.python_rewards import PREFIX, place_of
from isobit.util.errors import ConfigError, ToolError

Tools: TypeAlias = "type | tuple[Callable[..., Any], ...]"
EnvironmentReward: TypeAlias = Callable[..., Any]
"""``(environments, **columns) -> list of float``, which TRL calls with the objects of episodes."""
_DIGITS = 16
_TAKEN = ("reset", "get_reward", "get_turn_reward")


class GivenEnvironment:
    """Tools that are found by their name as long as this object exists."""

    def __init__(self, tools: Tools, rewards: Sequence[EnvironmentReward], name: str) -> None:
        self.tools, self.rewards, self.name = tools, tuple(rewards), name


_GIVEN: WeakValueDictionary[str, GivenEnvironment] = WeakValueDictionary()


def is_environment(value: Any) -> bool:
    """Whether ``value`` is an environment that no file can hold: a class, an object, or
    functions.
    """
    if isinstance(value, list | tuple):
        return bool(value) and any(map(callable, value))
    return isinstance(value, type) or callable(value)


def takes_environments(function: Any) -> bool:
    """Whether ``function`` is a reward in TRL's form of environments."""
    try:
        names = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return False
    return "environments" in names


def give_environment(value: Any, rewards: Sequence[EnvironmentReward] = ()) -> GivenEnvironment:
    """The environment with its name for the configuration; the caller must hold it during the
    run.  Raises ConfigError for what is neither a class nor functions.
    """
    for reward in rewards:
        _check_reward(reward)
    tools = value if isinstance(value, type) else _functions(value)
    place = place_of(tools) if isinstance(tools, type) and not rewards else None
    if place is not None:
        return GivenEnvironment(tools, (), place)
    label = re.sub(r"\W", "", tools.__name__) if isinstance(tools, type) else "tools"
    digest = digest_of([tools, list(rewards)])[:_DIGITS]
    environment = GivenEnvironment(tools, rewards, f"{PREFIX}{label}@{digest}")
    return _GIVEN.setdefault(environment.name, environment)


def _functions(value: Any) -> tuple[Callable[..., Any], ...]:
    functions = tuple(value) if isinstance(value, list | tuple) else (value,)
    names = [getattr(function, "__name__", "") for function in functions]
    for one, name in zip(functions, names, strict=True):
        if not inspect.isroutine(one) or not name.isidentifier():
            raise ConfigError(
                f"environment is {value!r:.80}; expected a class whose public methods are the "
                "tools, or a list of functions that have names (def f(..))"
            )
        if name.startswith("_") or name in _TAKEN:
            raise ConfigError(
                f"the function {name!r} cannot be a tool: names that begin with '_' and "
                f"{', '.join(_TAKEN)} have another meaning; rename it"
            )
    if len({*names}) < len(names):
        raise ConfigError(f"two tools have one name; the names are {', '.join(names)}")
    return functions


def _check_reward(function: EnvironmentReward) -> None:
    parameters = inspect.signature(function).parameters
    if known := {"completions", "prompts", "completion_ids"} & parameters.keys():
        raise ConfigError(
            f"the reward {getattr(function, '__name__', function)!r} takes environments and "
            f"{', '.join(sorted(known))}; here the objects of episodes are in processes of their "
            "own, which know no completion: make two rewards, reward=[of_environments, of_text]"
        )


def packed_environment(name: str) -> bytes:
    """The copy for a host; empty for a name that it can load by itself.  Raises ToolError where
    nothing of the name is held, or it cannot be copied.
    """
    if not name.startswith(PREFIX):
        return b""
    given = _GIVEN.get(name)
    if given is None:
        raise ToolError(
            f"the environment {name} was given from Python; give the same one again with "
            "isobit.train(.., environment=.., resume=True), or name it 'path/to/file.py:Class'"
        )
    import dill

    try:
        return dill.dumps((given.tools, given.rewards, _types(given.tools)), recurse=True)
    except Exception as error:  # objects that cannot be pickled raise anything
        raise ToolError(
            f"the environment {name} cannot be handed to its process: {type(error).__name__}: "
            f"{error}; make clients and open files in __init__ or reset, or name it "
            "'path/to/file.py:Class'"
        ) from error


def unpacked_environment(packed: bytes) -> tuple[type, tuple[EnvironmentReward, ...]]:
    """The class in a host, and rewards of it.  Raises whatever unpickling raises."""
    tools, rewards, types = pickle.loads(packed)  # noqa: S301  the trainer's own
    for name, function in _routines(tools).items():
        function.__annotations__ = types.get(name, function.__annotations__)
    if isinstance(tools, type):
        return tools, rewards
    return type("Tools", (), {tool.__name__: staticmethod(tool) for tool in tools}), rewards


def _routines(tools: Tools) -> dict[str, FunctionType]:
    """The functions that have parameters of tools, by name."""
    if isinstance(tools, type):
        pairs = inspect.getmembers(tools)
    else:
        pairs = [(tool.__name__, tool) for tool in tools]
    return {
        name: function
        for name, function in pairs
        if isinstance(function, FunctionType) and name not in _TAKEN
    }


def _types(tools: Tools) -> dict[str, dict[str, Any]]:
    """The types of parameters that are written as text, as ``from __future__ import annotations``
    makes them: a copy of a function does not have the names that stand in them alone.
    """
    types_of = dict[str, dict[str, Any]]()
    for name, function in _routines(tools).items():
        if any(isinstance(annotation, str) for annotation in function.__annotations__.values()):
            with suppress(Exception):  # the schema says what is wrong with them
                types_of[name] = get_type_hints(function)
    return types_of
