"""What a host loads, and an episode's process runs (``isobit.environments.worker``): a class in
the form of TRL's ``environment_factory``, whose public methods are the tools.
"""

import importlib
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from types import MethodType
from typing import Any, Protocol

from isobit.rewards.outcome import Failure, Outcome, failure_of, outcome_of
from isobit.util.errors import ToolError
from isobit.util.user_code import describe_missing, run_file

_NOT_TOOLS = ("reset", "get_reward")


@dataclass(frozen=True, slots=True)
class Call:
    name: str
    positional: Sequence[Any]
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Turn:
    """What the model has said in one turn."""

    calls: Sequence[Call]
    text: str = ""
    """Without its calls."""
    is_cut: bool = False
    """Whether the length limit ended it."""


@dataclass(frozen=True, slots=True)
class Start:
    """The first message to a host."""

    place: str
    options: Mapping[str, Any]
    deadline_s: float
    """For the calls of a turn, with ``reset`` before the first."""
    memory_bytes: int
    most_characters: int
    """Of a result; the rest is cut off."""


class Session(Protocol):
    """One episode in its process.  Where a method raises ToolError, the run ends."""

    def begin(self, columns: Mapping[str, Any]) -> dict[str, Any]:
        """Begin with the columns of the row; what is said of the prompt."""
        ...

    def answer(self, turns: Sequence[Turn], wants_reward: bool) -> dict[str, Any]:
        """Take ``turns``; what is said of the last, with the reward where it is wanted."""
        ...


class Hosted(Protocol):
    """What a host has loaded."""

    def ready(self) -> dict[str, Any]:
        """The message to the trainer."""
        ...

    def open(self) -> Session:
        """An episode, in its own process."""
        ...


def load_class(place: str) -> type:
    """The class ``path/to/file.py:Class`` or ``module:Class``.  Raises ToolError."""
    source, _, name = place.rpartition(":")
    try:
        if source.endswith(".py"):
            if not Path(source).is_file():
                raise ToolError(
                    f"there is no file {source} of an environment (looked in "
                    f"{Path(source).absolute().parent})"
                )
            module = run_file(Path(source), f"isobit_environment_{Path(source).stem}")
        else:
            module = importlib.import_module(source or place)
    except (Exception, SystemExit) as error:
        if isinstance(error, ToolError):
            raise
        what = " ".join(f"{type(error).__name__}: {error}".split())
        raise ToolError(f"the environment {place!r} fails on import: {what}") from error
    found = getattr(module, name, None)
    if not inspect.isclass(found):
        classes = describe_missing(module, name, inspect.isclass)
        raise ToolError(f"{source} has no class {name!r}; its classes are {classes}")
    return found


def tools_of(cls: type) -> dict[str, Callable[..., Any]]:
    """The public methods, by name, but for ``reset`` and ``get_reward``."""
    members = inspect.getmembers(cls, inspect.isroutine)
    return {
        name: found
        for name, found in members
        if not name.startswith("_") and name not in _NOT_TOOLS
    }


def schemas_of(cls: type) -> list[dict[str, Any]]:
    """JSON schemas of the tools, from types and docstrings.  Raises ToolError."""
    from transformers.utils.chat_template_utils import get_json_schema

    found = []
    for name, function in tools_of(cls).items():
        bound = MethodType(function, cls) if inspect.isfunction(function) else function
        if isinstance(inspect.getattr_static(cls, name), staticmethod):
            bound = function
        try:
            found.append(get_json_schema(bound))
        except Exception as error:  # of docstrings and types
            raise ToolError(
                f"the tool {name!r} of {cls.__name__} has no schema: {error}; a tool has types for "
                "its parameters and a docstring with a line for each under 'Args:'; a method that "
                "is no tool begins with an underscore"
            ) from error
    if not found:
        raise ToolError(f"{cls.__name__} has no public method that could be a tool")
    return found


class HostedClass:
    """A class whose public methods are tools."""

    def __init__(self, start: Start) -> None:
        self._class, self._start = load_class(start.place), start
        if hasattr(self._class, "_prepare"):
            self._class._prepare(**start.options)

    def ready(self) -> dict[str, Any]:
        reset = getattr(self._class, "reset", None)
        opens = reset is not None and _may_speak(reset)
        has_reward = hasattr(self._class, "get_reward")
        return {"ready": schemas_of(self._class), "has_reward": has_reward, "opens": opens}

    def open(self) -> Session:
        return Instance(self._class, self._start)


class Instance:
    """An instance of such a class."""

    def __init__(self, cls: type, start: Start) -> None:
        self._class, self._most = cls, start.most_characters
        self._instance: Any = cls(**start.options)

    def begin(self, columns: Mapping[str, Any]) -> dict[str, Any]:
        """What ``reset`` returns is text for the prompt."""
        reset = getattr(self._instance, "reset", None)
        if reset is None:
            return {}
        said = _awaited(reset(**_taken(reset, columns)))
        if said is None or said == "":
            return {}
        if not isinstance(said, str) or not _may_speak(reset):
            raise ToolError(
                f"reset() of {self._class.__name__} returned {said!r:.60}; it returns text, which "
                "is put behind the prompt's last message, or None, and says so in its annotation "
                "(-> str | None)"
            )
        return {"opening": _text_of(said)[: self._most]}

    def answer(self, turns: Sequence[Turn], wants_reward: bool) -> dict[str, Any]:
        results = [self._results(turn.calls) for turn in turns]
        answer: dict[str, Any] = {"results": results[-1] if results else []}
        return answer | (self._reward() if wants_reward else {})

    def _results(self, calls: Sequence[Call]) -> list[list[str]]:
        """In the order of the calls; of tools that are coroutines, those in a row run at once."""
        found: list[list[str]] = []
        for is_async, some in groupby(calls, self._is_async):
            if is_async:
                found += _awaited(self._at_once(list(some)))
            else:
                found += map(self._result, some)
        return found

    def _is_async(self, call: Call) -> bool:
        return inspect.iscoroutinefunction(tools_of(self._class).get(call.name))

    async def _at_once(self, calls: Sequence[Call]) -> list[list[str]]:
        import asyncio

        async def result(call: Call) -> list[str]:
            try:
                return told(await self._called(call), self._most)
            except BaseException as error:
                return _error_of(error)

        return await asyncio.gather(*map(result, calls))

    def _result(self, call: Call) -> list[str]:
        try:
            return told(_awaited(self._called(call)), self._most)
        except BaseException as error:
            return _error_of(error)

    def _called(self, call: Call) -> Any:
        """What the tool returns, which may be awaitable.  Raises ToolError for an impossible
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

    def _reward(self) -> dict[str, Any]:
        try:
            outcome = outcome_of(_awaited(self._instance.get_reward()))
        except (MemoryError, SystemExit):
            raise
        except BaseException as error:
            outcome = failure_of(error)
        return rewarded(outcome)


def rewarded(outcome: Outcome) -> dict[str, Any]:
    """A reward, or why there is none, for an answer."""
    if isinstance(outcome, Failure):
        return {"failed": outcome.kind, "message": outcome.message}
    return {"reward": outcome}


def told(value: Any, most: int) -> list[str]:
    """A result with its kind, cut to ``most`` characters."""
    text = _text_of(value)
    return ["cut", text[:most]] if len(text) > most else ["ok", text]


def _may_speak(reset: Callable[..., Any]) -> bool:
    """Whether ``reset`` may return text, by its annotation: only then it is asked before the model
    draws.
    """
    return inspect.signature(reset).return_annotation not in (None, "None")


def _taken(function: Callable[..., Any], columns: Mapping[str, Any]) -> dict[str, Any]:
    """The columns that ``reset`` takes."""
    parameters = inspect.signature(function).parameters.values()
    if any(one.kind is one.VAR_KEYWORD for one in parameters):
        return dict(columns)
    names = {one.name for one in parameters}
    return {name: value for name, value in columns.items() if name in names}


def _awaited(value: Any) -> Any:
    import asyncio

    async def result() -> Any:
        return await value

    return asyncio.run(result()) if inspect.isawaitable(value) else value


def _error_of(error: BaseException) -> list[str]:
    """What the model is told of an error; raises one that ends the process."""
    if isinstance(error, MemoryError | SystemExit):
        raise error
    return ["error", str(error) if isinstance(error, ToolError) else failure_of(error).message]


def _text_of(value: Any) -> str:
    """Text as it is, without halves of characters; anything else as JSON."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return str.encode(text, "utf-8", "replace").decode()
