"""Environments in the form of TRL's ``environment_factory``: classes whose public methods are the
tools (an environment backend, ``isobit.environments.env_backends``).
"""

import asyncio
import importlib
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from types import MethodType
from typing import Any

from isobit.environments.env_backends import (
    Call,
    HostStart,
    Turn,
    rewarded,
    text_of,
    truncated_result,
)
from isobit.environments.python_environments import EnvironmentReward, unpacked_environment
from isobit.rewards.grade import failure_of, outcome_of
from isobit.util.errors import ToolError
from isobit.util.user_code import describe_missing, run_file

_NOT_TOOLS = ("reset", "get_reward", "get_turn_reward")


def load_class(place: str) -> type:
    """The class ``path/to/file.py:Class`` or ``module:Class``.  Raises ToolError."""
    source, _, name = place.rpartition(":")
    source = source or place
    try:
        if source.endswith(".py"):
            if not Path(source).is_file():
                raise ToolError(
                    f"there is no file {source} of an environment (looked in "
                    f"{Path(source).absolute().parent})"
                )
            module = run_file(Path(source), f"isobit_environment_{Path(source).stem}")
        else:
            module = importlib.import_module(source)
    except (Exception, SystemExit) as error:
        if isinstance(error, ToolError):
            raise
        what = " ".join(f"{type(error).__name__}: {error}".split())
        raise ToolError(f"the environment {place!r} fails on import: {what}") from error
    cls = getattr(module, name, None)
    if not inspect.isclass(cls):
        classes = describe_missing(module, name, inspect.isclass)
        if place == source:
            raise ToolError(
                f"the environment {place!r} names no class of the file; expected {place}:Class, "
                f"and its classes are {classes}"
            )
        raise ToolError(f"{source} has no class {name!r}; its classes are {classes}")
    return cls


def tools_of(cls: type) -> dict[str, Callable[..., Any]]:
    """The public methods, by name, but for ``reset`` and those that give rewards."""
    return {
        name: found
        for name, found in inspect.getmembers(cls, inspect.isroutine)
        if not name.startswith("_") and name not in _NOT_TOOLS
    }


def schemas_of(cls: type) -> list[dict[str, Any]]:
    """JSON schemas of the tools, from types and docstrings.  Raises ToolError."""
    from transformers.utils import chat_template_utils as utils

    utils.__dict__["is_torch_available"] = lambda: "torch" in sys.modules  # it imports slowly
    schemas = []
    for name, function in tools_of(cls).items():
        bound = MethodType(function, cls) if inspect.isfunction(function) else function
        if isinstance(inspect.getattr_static(cls, name), staticmethod):
            bound = function
        try:
            schemas.append(utils.get_json_schema(bound))
        except Exception as error:  # of docstrings and types
            raise ToolError(
                f"the tool {name!r} of {cls.__name__} has no schema: {error}; a tool has types for "
                "its parameters and a docstring with a line for each under 'Args:'; a method that "
                "is no tool begins with an underscore"
            ) from error
    if not schemas:
        raise ToolError(f"{cls.__name__} has no public method that could be a tool")
    return schemas


def _check_options(cls: type, options: Mapping[str, Any]) -> None:
    """Raise ToolError for options that the class or its ``_prepare`` cannot be called with."""
    for called in [cls, *([cls._prepare] if hasattr(cls, "_prepare") else [])]:
        try:
            signature = inspect.signature(called)
        except ValueError:  # of a class in C
            continue
        try:
            signature.bind(**options)
        except TypeError as error:
            raise ToolError(
                f"environment.options do not fit {called.__qualname__}{signature}: {error}; given "
                f"are {', '.join(map(repr, options)) or 'none'}"
            ) from None


class HostedClass:
    """A class whose public methods are tools."""

    def __init__(self, start: HostStart) -> None:
        self._start, self._rewards = start, ()
        if start.packed:
            self._class, self._rewards = unpacked_environment(start.packed)
        else:
            self._class = load_class(start.place)
        _check_options(self._class, start.options)
        said = self._class._prepare(**start.options) if hasattr(self._class, "_prepare") else None
        self._note = said if isinstance(said, str) else ""

    def ready(self) -> dict[str, Any]:
        reset = getattr(self._class, "reset", None)
        opens = reset is not None and _may_speak(reset)
        rewards = ("reward", "turn_reward")
        gives = {f"has_{name}": hasattr(self._class, f"get_{name}") for name in rewards}
        gives["has_reward"] |= bool(self._rewards)
        return {"ready": schemas_of(self._class), **gives, "opens": opens, "note": self._note}

    def open(self) -> "Instance":
        return Instance(self._class, self._start, self._rewards)


class Instance:
    """An instance of such a class."""

    def __init__(
        self, cls: type, start: HostStart, rewards: Sequence[EnvironmentReward] = ()
    ) -> None:
        """``rewards`` are asked in place of ``get_reward``, and added up."""
        self._class, self._most, self._rewards = cls, start.most_characters, rewards
        self._columns: Mapping[str, Any] = {}
        self._instance: Any = cls(**start.options)

    def begin(self, columns: Mapping[str, Any]) -> dict[str, Any]:
        """Reset the instance; the text that ``reset`` returns is for the prompt."""
        self._columns = columns
        reset = getattr(self._instance, "reset", None)
        said = None if reset is None else _awaited(reset(**_taken(reset, columns)))
        if reset is None or said is None or said == "":
            return {}
        if not isinstance(said, str) or not _may_speak(reset):
            raise ToolError(
                f"reset() of {self._class.__name__} returned {said!r:.60}; it returns text, which "
                "is put behind the prompt's last message, or None, and says so in its annotation "
                "(-> str | None)"
            )
        return {"opening": text_of(said)[: self._most]}

    def answer(self, turns: Sequence[Turn], wants_reward: bool) -> dict[str, Any]:
        answer: dict[str, Any] = {"results": []}
        for turn in turns:
            answer = {"results": self._results(turn.calls)}
            if hasattr(self._class, "get_turn_reward"):
                answer |= self._reward("turn_reward", self._instance.get_turn_reward)
        get = self._total if self._rewards else getattr(self._instance, "get_reward", None)
        return answer | (self._reward("reward", get) if wants_reward and get else {})

    def _total(self) -> Any:
        lists = {name: [value] for name, value in self._columns.items() if name != "environments"}
        found = [
            _awaited(reward(environments=[self._instance], **_taken(reward, lists)))
            for reward in self._rewards
        ]
        values = [value for (value,) in found]
        return values[0] if len(values) == 1 else sum(values)

    def _results(self, calls: Sequence[Call]) -> list[list[str]]:
        """Results in the order of the calls; calls in a row whose tools are coroutines run at
        once.
        """
        results: list[list[str]] = []
        for is_async, some in groupby(calls, self._is_async):
            if is_async:
                results += _awaited(self._at_once(list(some)))
            else:
                results += map(self._result, some)
        return results

    def _is_async(self, call: Call) -> bool:
        return inspect.iscoroutinefunction(tools_of(self._class).get(call.name))

    async def _at_once(self, calls: Sequence[Call]) -> list[list[str]]:
        async def result(call: Call) -> list[str]:
            try:
                return truncated_result(await self._called(call), self._most)
            except BaseException as error:
                return _error_of(error)

        return await asyncio.gather(*map(result, calls))

    def _result(self, call: Call) -> list[str]:
        try:
            return truncated_result(_awaited(self._called(call)), self._most)
        except BaseException as error:
            return _error_of(error)

    def _called(self, call: Call) -> Any:
        """The result of a tool, which may be awaitable.  Raises ToolError for an impossible
        call.
        """
        tools = tools_of(self._class)
        if call.name not in tools:
            raise ToolError(f"there is no tool {call.name!r:.60}; the tools are {', '.join(tools)}")
        tool = getattr(self._instance, call.name)
        try:
            bound = inspect.signature(tool).bind(*call.positional, **call.arguments)
        except TypeError as error:
            raise ToolError(f"{call.name}: {error}") from error
        return tool(*bound.args, **bound.kwargs)

    def _reward(self, name: str, get: Callable[[], Any]) -> dict[str, Any]:
        try:
            outcome = outcome_of(_awaited(get()))
        except (MemoryError, SystemExit):
            raise
        except BaseException as error:
            outcome = failure_of(error)
        return rewarded(outcome, name)


def _may_speak(reset: Callable[..., Any]) -> bool:
    """Whether ``reset`` may return text, by its annotation: only then it is asked before the model
    draws.
    """
    return inspect.signature(reset).return_annotation not in (None, "None")


def _taken(function: Callable[..., Any], columns: Mapping[str, Any]) -> dict[str, Any]:
    """The columns that ``reset`` takes."""
    parameters = inspect.signature(function).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return dict(columns)
    names = {parameter.name for parameter in parameters}
    return {name: value for name, value in columns.items() if name in names}


def _awaited(value: Any) -> Any:
    async def result() -> Any:
        return await value

    return asyncio.run(result()) if inspect.isawaitable(value) else value


def _error_of(error: BaseException) -> list[str]:
    """The result that the model sees for an error; raises one that ends the process."""
    if isinstance(error, MemoryError | SystemExit):
        raise error
    is_told = isinstance(error, ToolError)
    return ["error", str(error) if is_told else failure_of(error, with_place=False).message]
