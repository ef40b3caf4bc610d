"""The process that hosts environments: ``python -m isobit.environments.worker``, started by
``isobit.environments.pool`` and supervised like one that grades (``isobit.rewards.worker``).

It imports the user's class once and forks a process for each episode, which makes the instance,
calls ``reset`` and then the tools.  So an episode that hangs, dies or floods ends alone, and what a
tool leaves in globals is not seen by another episode.

    trainer  --frames-->  host  --frames-->  episode
    trainer  <--lines---  host  <--lines---  episode

To the host: ``Start``, then ``("ask", episode, columns, turns, wants_reward)``, which begins the
episode if it is new, runs the calls of all ``turns`` and answers those of the last; and
``("end", episode)``.  ``get_turn_reward``, where the class has it, is asked behind the calls of
each turn.  From the host, as JSON:

    {"ready": [schemas of the tools], ..} or {"refused": message} or {"fatal": message}
    {"episode": 7, "results": [["ok", text], ["error", text], ["cut", text]], "seconds": 0.1}
    {"episode": 7, "reward": 1.0, "turn_reward": 0.5, ...} where one was asked for
    {"episode": 7, "failed": kind, "message": text, ..}: ``deadline``, ``crash``, ``memory``,
        ``flood`` or ``reset``; the episode is no more

The host runs no code of the class after the import and its class method ``_prepare``, where it has
one: with the options, once, for what all episodes share and none changes.  It ends an episode that
takes longer than the deadline with all processes below it.
"""

import importlib
import inspect
import json
import os
import resource
import select
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from time import monotonic, sleep
from types import MethodType
from typing import Any, NoReturn

from isobit.rewards.outcome import Failure, failure_of, frame, outcome_of, read_frame, write_all
from isobit.rewards.worker import descendants, leave_to_trainer, limit_memory, supervised
from isobit.util.errors import ToolError
from isobit.util.user_code import describe_missing, run_file

_END_S = 0.3
"""How long a process that closed its pipe is given to end, so that its exit code can be told."""
_GLANCE_S = 0.2
"""Seconds between looks for episodes that ended or took too long."""
_FORM = 6
"""Bytes that JSON takes for a character, at most."""
_NOT_TOOLS = ("reset", "get_reward", "get_turn_reward")


@dataclass(frozen=True, slots=True)
class Call:
    name: str
    positional: Sequence[Any]
    arguments: Mapping[str, Any]


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
    """The public methods, by name, but for ``reset`` and those that give rewards."""
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


# The process of an episode.


class EpisodeProcess:
    """Makes one instance and answers requests until its pipe ends."""

    def __init__(self, cls: type, start: Start, requests: int, replies: int) -> None:
        self._class, self._start = cls, start
        self._requests, self._replies = requests, replies
        self._instance: Any = None

    def run(self) -> NoReturn:
        try:
            columns, *rest = read_frame(self._requests)
            self._begin(columns)
            while True:
                turns, wants_reward = rest
                answer: dict[str, Any] = {"results": []}
                for calls in turns:
                    answer = {"results": self._results(calls)}
                    if hasattr(self._class, "get_turn_reward"):
                        answer |= self._reward("turn_reward", self._instance.get_turn_reward)
                if wants_reward:
                    answer |= self._reward("reward", self._instance.get_reward)
                self._reply(answer)
                _, *rest = read_frame(self._requests)
        except EOFError:
            os._exit(0)
        except MemoryError:
            self._fail("memory", "it took more than environment.memory_mib allows")
        except SystemExit as error:
            self._fail("crash", f"it called sys.exit({error.code!r:.40})")
        except BaseException as error:  # of a tool's destructors, or a closed descriptor
            self._fail("crash", failure_of(error).message)

    def _begin(self, columns: Mapping[str, Any]) -> None:
        try:
            self._instance = self._class(**self._start.options)
            reset = getattr(self._instance, "reset", None)
            said = _awaited(reset(**_taken(reset, columns))) if reset is not None else None
        except (MemoryError, SystemExit):
            raise
        except BaseException as error:
            self._fail("reset", failure_of(error).message)
        if said:
            self._fail(
                "fatal",
                f"reset() of {self._class.__name__} returned {said!r:.60}, which no prompt shows; "
                "return None, and write into the prompts what the model is to know",
            )

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
                return self._told(await self._called(call))
            except BaseException as error:
                return _error_of(error)

        return await asyncio.gather(*map(result, calls))

    def _result(self, call: Call) -> list[str]:
        try:
            return self._told(_awaited(self._called(call)))
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

    def _told(self, value: Any) -> list[str]:
        text, most = _text_of(value), self._start.most_characters
        return ["cut", text[:most]] if len(text) > most else ["ok", text]

    def _reward(self, name: str, get: Callable[[], Any]) -> dict[str, Any]:
        try:
            outcome = outcome_of(_awaited(get()))
        except (MemoryError, SystemExit):
            raise
        except BaseException as error:
            outcome = failure_of(error)
        if isinstance(outcome, Failure):
            return {"failed": outcome.kind, "message": outcome.message}
        return {name: outcome}

    def _fail(self, kind: str, message: str) -> NoReturn:
        with suppress(OSError):
            self._reply({"failed": kind, "message": message[:2000]})
        os._exit(1)

    def _reply(self, content: Mapping[str, Any]) -> None:
        write_all(self._replies, (json.dumps(content, allow_nan=False) + "\n").encode())


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


# The host.


@dataclass(slots=True)
class Episode:
    pid: int
    requests: int
    replies: int
    began: float | None = None
    """When it was asked; None while nothing is asked."""
    unread: bytearray = field(default_factory=bytearray)


class Host:
    def __init__(self, requests: int, replies: int) -> None:
        self._requests, self._replies = requests, replies
        self._episodes: dict[int, Episode] = {}

    def run(self) -> NoReturn:
        """Load the class and serve until the trainer closes the pipe."""
        try:
            self._start: Start = read_frame(self._requests)
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            self._class = self._load()
            while True:
                self._serve()
        except EOFError:
            os._exit(0)
        except BaseException as error:
            sys.excepthook(type(error), error, error.__traceback__)
            sys.stderr.flush()
            os._exit(1)

    def _load(self) -> type:
        try:
            found = load_class(self._start.place)
            if hasattr(found, "_prepare"):
                found._prepare(**self._start.options)
            gives = {
                "has_reward": hasattr(found, "get_reward"),
                "has_turn_reward": hasattr(found, "get_turn_reward"),
            }
            self._say({"ready": schemas_of(found), **gives})
            return found
        except ToolError as error:
            self._say({"refused": str(error)})
        except BaseException as error:
            self._say({"refused": f"the environment cannot be loaded: {failure_of(error).message}"})
        os._exit(1)

    def _serve(self) -> None:
        poller = select.poll()
        poller.register(self._requests, select.POLLIN)
        by_descriptor = {one.replies: key for key, one in self._episodes.items()}
        for descriptor in by_descriptor:
            poller.register(descriptor, select.POLLIN)
        for descriptor, _ in poller.poll(_GLANCE_S * 1000):
            if descriptor == self._requests:
                self._take(read_frame(self._requests))
            elif by_descriptor[descriptor] in self._episodes:
                self._hear(by_descriptor[descriptor])
        late = monotonic() - self._start.deadline_s
        for key, episode in list(self._episodes.items()):
            if episode.began is not None and episode.began < late:
                seconds = f"{self._start.deadline_s:g}"
                self._drop(key, "deadline", f"took longer than environment.deadline_s = {seconds}")

    def _take(self, message: tuple[Any, ...]) -> None:
        match message:
            case ("ask", int(key), columns, turns, bool(wants_reward)):
                if key not in self._episodes:
                    self._episodes[key] = self._fork()
                episode = self._episodes[key]
                episode.began = monotonic()
                with suppress(OSError):  # it has ended, which its pipe tells
                    write_all(episode.requests, frame((columns, turns, wants_reward)))
            case ("end", int(key)):
                self._end(key)

    def _fork(self) -> Episode:
        (to_read, requests), (replies, to_write) = os.pipe(), os.pipe()
        pid = os.fork()
        if pid:
            os.close(to_read)
            os.close(to_write)
            os.set_blocking(replies, False)
            return Episode(pid, requests, replies)
        leave_to_trainer()
        others = [fd for one in self._episodes.values() for fd in (one.requests, one.replies)]
        for descriptor in (self._requests, self._replies, requests, replies, *others):
            os.close(descriptor)
        limit_memory(self._start.memory_bytes)
        EpisodeProcess(self._class, self._start, to_read, to_write).run()

    def _hear(self, key: int) -> None:
        episode = self._episodes[key]
        try:
            chunk = os.read(episode.replies, 1 << 16)
        except BlockingIOError:
            return
        if not chunk:
            self._drop(key, "crash", self._how_it_ended(episode))
            return
        episode.unread += chunk
        line, end, rest = bytes(episode.unread).partition(b"\n")
        most = (self._start.most_characters + 4096) * _FORM * 32
        if len(episode.unread) > most or rest:
            self._drop(key, "flood", "it wrote into the pipe of its answers")
        elif end:
            episode.unread.clear()
            self._answer(key, line)

    def _answer(self, key: int, line: bytes) -> None:
        episode = self._episodes[key]
        try:
            content = json.loads(line)
        except (ValueError, RecursionError):
            content = None
        if not isinstance(content, dict) or episode.began is None:
            self._drop(key, "flood", "it wrote into the pipe of its answers")
            return
        seconds = monotonic() - episode.began
        episode.began = None
        self._say({**content, "episode": key, "seconds": seconds})
        if "failed" in content:
            self._end(key)

    def _drop(self, key: int, kind: str, message: str) -> None:
        """End an episode; whoever waits for it is told."""
        began = self._episodes[key].began
        self._end(key)
        if began is not None:
            told = {"failed": kind, "message": message, "seconds": monotonic() - began}
            self._say({"episode": key, **told})

    def _end(self, key: int) -> None:
        episode = self._episodes.pop(key, None)
        if episode is None:
            return
        os.close(episode.requests)
        os.close(episode.replies)
        for pid in [*descendants(episode.pid), episode.pid]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with suppress(ChildProcessError):
            os.waitpid(episode.pid, 0)

    def _how_it_ended(self, episode: Episode) -> str:
        until = monotonic() + _END_S
        with suppress(ChildProcessError):
            pid, status = os.waitpid(episode.pid, os.WNOHANG)
            while not pid and monotonic() < until:
                sleep(0.002)
                pid, status = os.waitpid(episode.pid, os.WNOHANG)
            if pid:
                code = os.waitstatus_to_exitcode(status)
                with suppress(ValueError):
                    return f"its process was killed by {signal.Signals(-code).name}"
                return f"its process ended with exit code {code}"
        return "its process closed the pipe of its answers"

    def _say(self, content: Mapping[str, Any]) -> None:
        write_all(self._replies, (json.dumps(content) + "\n").encode())


if __name__ == "__main__":
    supervised(lambda requests, replies: Host(requests, replies).run())
