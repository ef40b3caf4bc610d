"""What a host loads, and an episode's process runs (``isobit.environments.worker``):

    class       in the form of TRL's ``environment_factory``: its public methods are the tools
    verifiers   an environment of the package ``verifiers``, which leads the conversation itself
                (of its version 0.4: ``isobit.environments.tasksets``)
    openenv     an OpenEnv server (``isobit.environments.openenv``)

The second has a client for a model whose answers are the turns that the engine draws.  It asks with
all messages up to there; those that are new are what it says behind the last turn.
"""

import ast
import asyncio
import importlib
import inspect
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from types import MethodType
from typing import Any, Literal

from isobit.environments.given import EnvironmentReward, unpacked_environment
from isobit.rewards.outcome import Failure, Outcome, failure_of, outcome_of
from isobit.util.errors import ToolError
from isobit.util.plain_files import read_plain
from isobit.util.user_code import describe_missing, run_file

_NOT_TOOLS = ("reset", "get_reward", "get_turn_reward")


@dataclass(frozen=True, slots=True)
class Call:
    name: str
    positional: Sequence[Any]
    arguments: Mapping[str, Any]

    def by_name(self, schema: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments, where those without a name have those of ``schema`` in turn."""
        names = schema.get("properties") or {}
        return {**dict(zip(names, self.positional, strict=False)), **self.arguments}


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

    kind: Literal["class", "verifiers", "openenv"]
    place: str
    options: Mapping[str, Any]
    deadline_s: float
    """For the calls of a turn, with ``reset`` before the first."""
    memory_bytes: int
    most_characters: int
    """Of a result; the rest is cut off."""
    packed: bytes = b""
    """The class, where it was given from Python (``isobit.environments.given``)."""


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
    return {
        name: found
        for name, found in inspect.getmembers(cls, inspect.isroutine)
        if not name.startswith("_") and name not in _NOT_TOOLS
    }


def schemas_of(cls: type) -> list[dict[str, Any]]:
    """JSON schemas of the tools, from types and docstrings.  Raises ToolError."""
    from transformers.utils import chat_template_utils as utils

    utils.__dict__["is_torch_available"] = lambda: "torch" in sys.modules  # it imports slowly
    found = []
    for name, function in tools_of(cls).items():
        bound = MethodType(function, cls) if inspect.isfunction(function) else function
        if isinstance(inspect.getattr_static(cls, name), staticmethod):
            bound = function
        try:
            found.append(utils.get_json_schema(bound))
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
        self._start, self._rewards = start, ()
        if start.packed:
            self._class, self._rewards = unpacked_environment(start.packed)
        else:
            self._class = load_class(start.place)
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

    def __init__(self, cls: type, start: Start, rewards: Sequence[EnvironmentReward] = ()) -> None:
        """``rewards`` are asked in place of ``get_reward``, and added up."""
        self._class, self._most, self._rewards = cls, start.most_characters, rewards
        self._columns: Mapping[str, Any] = {}
        self._instance: Any = cls(**start.options)

    def begin(self, columns: Mapping[str, Any]) -> dict[str, Any]:
        """What ``reset`` returns is text for the prompt."""
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
        return {"opening": _text_of(said)[: self._most]}

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
            _awaited(one(environments=[self._instance], **_taken(one, lists)))
            for one in self._rewards
        ]
        values = [value for (value,) in found]
        return values[0] if len(values) == 1 else sum(values)

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

    def _reward(self, name: str, get: Callable[[], Any]) -> dict[str, Any]:
        try:
            outcome = outcome_of(_awaited(get()))
        except (MemoryError, SystemExit):
            raise
        except BaseException as error:
            outcome = failure_of(error)
        return rewarded(outcome, name)


def rewarded(outcome: Outcome, name: str = "reward") -> dict[str, Any]:
    """A reward, or why there is none, for an answer."""
    if isinstance(outcome, Failure):
        return {"failed": outcome.kind, "message": outcome.message}
    return {name: outcome}


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


CLASSIC, TASKSET = "load_environment", "__all__"
"""What an environment of verifiers 0.2 and 0.3 defines, and a taskset of 0.4."""


def defines(place: str, name: str) -> bool:
    """Whether a file, or an installed package, defines or imports ``name``, without running it."""
    try:
        if not place.endswith(".py"):
            found = find_spec(place.replace("-", "_"))
            place = (found and found.origin) or ""
        body = ast.parse(read_plain(Path(place))).body
    except (OSError, ValueError, SyntaxError, ImportError, RecursionError):
        return False
    named = set[str]()
    for one in body:
        match one:
            case ast.FunctionDef(name=known) | ast.AsyncFunctionDef(name=known):
                named.add(known)
            case ast.ImportFrom(names=names):
                named.update(alias.asname or alias.name for alias in names)
            case ast.Assign(targets=targets):
                named.update(target.id for target in targets if isinstance(target, ast.Name))
    return name in named


def load_verifiers(place: str, options: Mapping[str, Any]) -> Any:
    """The environment of an installed package, or of a file with ``load_environment``.  Raises
    ToolError.
    """
    if place.endswith(".py") and not Path(place).is_file():
        raise ToolError(f"there is no file {place} of an environment")
    is_taskset = defines(place, TASKSET) and not defines(place, CLASSIC)
    try:
        load_environment = importlib.import_module("verifiers").load_environment
    except (ImportError, AttributeError) as error:
        extra = "verifiers-classic" if defines(place, CLASSIC) else "verifiers"
        raise ToolError(
            f"an environment of verifiers needs the package: pip install 'isobit[{extra}]' "
            f"({error})"
        ) from error
    try:
        if not place.endswith(".py"):
            return load_environment(place, **options)
        name = f"isobit_environment_{Path(place).stem}"
        return run_file(Path(place), name).load_environment(**options)
    except (Exception, SystemExit) as error:
        what = " ".join(f"{type(error).__name__}: {error}".split())
        if is_taskset:
            what += (
                "; it is a taskset of verifiers 0.4, and an older one is installed: pip install "
                "'verifiers>=0.4,<0.5'"
            )
        raise ToolError(f"the environment {place!r} cannot be loaded: {what}") from error


class HostedVerifiers:
    """An environment whose model is the engine."""

    def __init__(self, start: Start) -> None:
        self._environment = load_verifiers(start.place, start.options)
        self._most = start.most_characters
        if self._environment.requires_group_rollouts:
            raise ToolError(
                f"the rubric of {start.place!r} has a reward of a whole group, but each episode is "
                "scored by itself; leave that function out"
            )

    def ready(self) -> dict[str, Any]:
        vf = importlib.import_module("verifiers")
        names = ("name", "description", "parameters")
        tools = [
            {"type": "function", "function": {name: tool[name] for name in names}}
            for tool in self._environment.tool_defs or ()
        ]
        quiet = isinstance(self._environment, vf.SingleTurnEnv | vf.ToolEnv)
        how = {"has_reward": True, "opens": True, "leads": True, "speaks": not quiet}
        return {"ready": tools, **how}

    def open(self) -> "Conversation":
        refusal = importlib.import_module("verifiers").OverlongPromptError
        return Conversation(self._environment, self._most, refusal)


class Conversation:
    """A rollout of such an environment.  It runs up to its next question to the model, and then
    stands still until the next turn has been drawn.
    """

    def __init__(self, environment: Any, most: int, refusal: type[Exception]) -> None:
        self._environment, self._most, self._refusal = environment, most, refusal
        self._tools = {tool.name: tool.parameters for tool in environment.tool_defs or ()}
        self._loop, self._is_asked = asyncio.new_event_loop(), asyncio.Event()
        self._question: tuple[Any, Any] = (), ()
        self._reply: asyncio.Future[Any] = self._loop.create_future()
        """What the rollout waits for."""
        self._reply.set_result(None)
        self._messages: list[dict[str, Any]] = []
        """Those of the last question."""
        self._turns = 0

    async def reply(self, prompt: Any, tools: Any) -> Any:
        """What the model says to messages: the next turn."""
        if not self._reply.done():
            raise RuntimeError("the environment asks the model two things at once")
        self._question, self._reply = (prompt, tools), self._loop.create_future()
        self._is_asked.set()
        return await self._reply

    def begin(self, columns: Mapping[str, Any]) -> dict[str, Any]:
        """The messages of the first question, where they are others than the row's."""
        self._rollout = self._loop.create_task(self._play(columns))
        if not self._runs_on():
            return self._over()
        is_given = self._messages == [*map(_plain, columns["prompt"])]
        return {} if is_given else {"opening": self._messages}

    def _play(self, columns: Mapping[str, Any]) -> Any:
        """The rollout: a coroutine."""
        row = {"example_id": 0, **columns}
        return self._environment.run_rollout(row, _client(self), "isobit", {})

    def answer(self, turns: Sequence[Turn], wants_reward: bool) -> dict[str, Any]:
        """What is said behind the last turn, or the reward once the rollout is over: by itself, or
        because its model will say no more.
        """
        answer: dict[str, Any] = {}
        for turn in turns:
            if self._rollout.done():
                raise RuntimeError("the environment ended before a turn that it had answered")
            response, spoken = self._response(turn)
            before = [*self._messages, _plain(spoken)]
            runs = self._runs_on(response)
            answer = {"results": self._said_behind(before)} if runs else self._over()
        while wants_reward and not self._rollout.done():
            if not self._runs_on(self._refusal("the episode has reached its limit")):
                return {**self._over(), "over": False}
        return answer

    def _runs_on(self, reply: Any = None) -> bool:
        """Whether the rollout, once it has the ``reply``, comes to another question."""
        if isinstance(reply, Exception) and not self._reply.done():
            self._reply.set_exception(reply)
        elif reply is not None and not self._reply.done():  # as its own time limit cancels it
            self._reply.set_result(reply)

        async def until_asked() -> None:
            asked = asyncio.ensure_future(self._is_asked.wait())
            await asyncio.wait((self._rollout, asked), return_when=asyncio.FIRST_COMPLETED)
            asked.cancel()

        self._loop.run_until_complete(until_asked())
        if self._rollout.done():
            return False
        self._is_asked.clear()
        prompt, tools = self._question
        if [tool.name for tool in tools or ()] != list(self._tools):
            raise ToolError(
                "the environment gives the model other tools in some rows; give all rows the same"
            )
        self._messages = [*map(_plain, prompt)]
        return True

    def _over(self) -> dict[str, Any]:
        output = self._rollout.result()
        if output["error"]:
            return {"failed": "crash", "message": output["error"]["error_chain_repr"]}
        return {"over": True, **rewarded(outcome_of(output["reward"]))}

    def _response(self, turn: Turn) -> tuple[Any, Any]:
        """What the rollout gets for a turn, and its message."""
        types = importlib.import_module("verifiers.types")
        self._turns += 1
        calls = [
            types.ToolCall(
                id=f"call_{self._turns}_{place}",
                name=call.name,
                arguments=json.dumps(call.by_name(self._tools.get(call.name, {}))),
            )
            for place, call in enumerate(turn.calls)
        ]
        reason = "length" if turn.is_cut else "tool_calls" if calls else "stop"
        message = types.ResponseMessage(
            content=turn.text,
            tool_calls=calls or None,
            finish_reason=reason,
            is_truncated=turn.is_cut,
        )
        name = f"turn_{self._turns}"
        return types.Response(id=name, created=0, model="isobit", message=message), message

    def _said_behind(self, before: list[dict[str, Any]]) -> list[list[str]]:
        said = self._messages[len(before) :]
        roles = [one["role"] for one in said]
        if self._messages[: len(before)] != before or not said:
            raise ToolError(
                "the environment asks the model without what was said before, or with nothing "
                "behind the last turn; an episode is one conversation that grows"
            )
        if set(roles) - {"tool", "user"} or roles != sorted(roles):
            raise ToolError(
                f"the environment answers a turn with messages of {', '.join(roles)}; those that "
                "can follow are of tools, and behind them of the user"
            )
        texts = [told(one["content"], self._most) for one in said]
        return [
            [kind if role == "tool" else "user", text]
            for role, (kind, text) in zip(roles, texts, strict=True)
        ]


def _client(conversation: Conversation) -> Any:
    """The client of a model that is elsewhere."""
    base: Any = importlib.import_module("verifiers.clients").Client

    class Drawn(base):
        def setup_client(self, config: Any) -> Any:
            return config

        async def to_native_tool(self, tool: Any) -> Any:
            return tool

        async def to_native_prompt(self, messages: Any) -> tuple[Any, dict[str, Any]]:
            return messages, {}

        async def get_native_response(
            self, prompt: Any, model: str, sampling_args: Any, tools: Any = None, **_: Any
        ) -> Any:
            return await conversation.reply(prompt, tools)

        async def raise_from_native_response(self, response: Any) -> None: ...

        async def from_native_response(self, response: Any) -> Any:
            return response

        async def close(self) -> None: ...

    return Drawn(None)


def _plain(message: Any) -> dict[str, Any]:
    """A message as JSON.  Raises ToolError for one that is more than text."""
    content = message.get("content")
    parts = [content] if isinstance(content, str) else content or ()
    texts = [part if isinstance(part, str) else part.get("text") for part in parts]
    if None in texts:
        raise ToolError("the environment shows the model something that is no text")
    called = (one.get("function", one) for one in message.get("tool_calls") or ())
    calls = [
        {"type": "function", "function": {name: one.get(name) for name in ("name", "arguments")}}
        for one in called
    ]
    text = _text_of("".join(map(str, texts)))
    return {"role": message["role"], "content": text, **({"tool_calls": calls} if calls else {})}
