"""Episodes of an OpenEnv server, by the messages of openenv-core 0.3 over WebSocket at ``/ws``.

    ->  {"type": "reset", "data": {columns of the row}}
    ->  {"type": "step", "data": action}
    <-  {"type": "observation", "data": {"observation": {..}, "reward": 1.0, "done": false}}
    <-  {"type": "error", "data": {"code": "EXECUTION_ERROR", "message": ..}}

A connection is a session of the server with an environment of its own, and an episode has one.  The
tools are those that the server lists for the action ``{"type": "list_tools"}``, which are called as
``{"type": "call_tool", "tool_name": .., "arguments": ..}``.  A server that lists none has the tool
``step``, whose arguments are the action that ``/schema`` describes.

The rewards of the steps of a turn, added up, are the reward of that turn; ``done`` ends the
episode, whose reward is that of its last turn.
"""

import importlib
import json
import re
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from time import monotonic, sleep
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

from isobit.environments.env_backends import Call, HostStart, Turn, rewarded, truncated_result
from isobit.rewards.grade import outcome_of
from isobit.util.errors import ToolError, shown

_LARGEST_MESSAGE = 64 << 20
"""Bytes of an observation, before it is cut."""
_MOST_TOOLS = 256
_LARGEST_TOOLS = 1 << 20
"""Characters of the schemas of all tools, as JSON."""
_DEEPEST = 64
"""Levels of a schema."""
_NAME = re.compile(r"[\w./-]{1,128}", re.ASCII)
"""A name of MCP."""
_PATIENCE = 0.5
"""The share of the deadline that a server gets which is not there yet or has no session free."""
_PAUSE_S = 0.2
_OBJECTIONS = ("EXECUTION_ERROR", "VALIDATION_ERROR")
"""Errors behind which a session goes on."""
_FAILURES = {"CAPACITY_REACHED": "capacity", "FACTORY_ERROR": "server", "SESSION_ERROR": "server"}


class LostEpisodeError(Exception):
    """An episode that cannot go on, with the kind of its failure: ``connection``, ``capacity``,
    ``server``, ``protocol``, ``reset`` or ``deadline``.
    """

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class ObjectionError(Exception):
    """The environment's objection to an action."""


@dataclass(frozen=True, slots=True)
class Observed:
    """The server's answer to a reset or a step."""

    observation: Mapping[str, Any]
    reward: float
    is_done: bool


class OpenEnvConnection:
    """A session of the server at ``address``, which waits ``deadline_s`` for each answer."""

    def __init__(self, address: str, deadline_s: float) -> None:
        self._address, self._deadline_s, self._stack = address, deadline_s, ExitStack()
        connect = importlib.import_module("websockets.sync.client").connect
        self._closed_error = importlib.import_module("websockets.exceptions").ConnectionClosed
        try:
            opened = connect(
                _url_of(address, "ws"),
                open_timeout=deadline_s,
                close_timeout=1.0,
                ping_interval=None,
                max_size=_LARGEST_MESSAGE,
            )
            self._socket = self._stack.enter_context(opened)
        except Exception as error:  # of sockets, handshakes and TLS
            raise self._lost(error) from error

    def close(self) -> None:
        self._stack.close()

    def ask(self, kind: str, data: Mapping[str, Any]) -> Observed:
        """The answer to a message.  Raises LostEpisodeError and ObjectionError."""
        text = json.dumps({"type": kind, "data": data}, default=str)
        try:
            with suppress(OSError, self._closed_error):  # before it closed it may have said why
                self._socket.send(text)
            received = self._socket.recv(timeout=self._deadline_s)
        except Exception as error:  # of a server that died, closed or says nothing
            raise self._lost(error) from error
        try:
            message = json.loads(received)
        except (ValueError, RecursionError):
            message = None
        match message:
            case {"type": "observation", "data": {"observation": dict(seen), **rest}}:
                if (found := _observed(seen, rest)) is not None:
                    return found
            case {"type": "error", "data": {"code": str(code), **rest}}:
                if code in _OBJECTIONS:
                    raise ObjectionError(_objection(rest))
                said = f"{shown(code)}: {shown(rest.get('message'))}"
                why = f"the server at {self._address} says {said}"
                raise LostEpisodeError(_FAILURES.get(code, "protocol"), why + _advice(code, rest))
        why = f"the server at {self._address} answers {kind} with no observation: {received!r:.200}"
        raise LostEpisodeError("protocol", why)

    def _lost(self, error: Exception) -> LostEpisodeError:
        is_late = isinstance(error, TimeoutError)
        what = " ".join(f"{type(error).__name__}: {error}".split())
        if is_late:
            what = f"took longer than environment.deadline_s = {self._deadline_s:g}"
        message = f"no answer from the OpenEnv server at {self._address}: {what}"
        return LostEpisodeError("deadline" if is_late else "connection", message)


def _observed(seen: Mapping[str, Any], rest: Mapping[str, Any]) -> Observed | None:
    reward, done = rest.get("reward"), rest.get("done", False)
    if not isinstance(reward, int | float | None) or not isinstance(done, bool):
        return None
    try:
        return Observed(seen, float(reward or 0), done)
    except OverflowError:  # of an integer
        return None


def _objection(data: Mapping[str, Any]) -> str:
    """The message of an error, with what is wrong with an action's fields."""
    errors = data.get("errors")
    wrong = [
        f"{'.'.join(map(str, location if isinstance(location, list) else [location]))}: "
        f"{error.get('msg')}"
        for error in (errors if isinstance(errors, list) else ())
        if isinstance(error, dict)
        for location in [error.get("loc") or []]
    ]
    return "; ".join(wrong) or str(data.get("message"))


def _advice(code: str, data: Mapping[str, Any]) -> str:
    if code != "CAPACITY_REACHED":
        return ""
    most = data.get("max_sessions", "its max_concurrent_envs")
    return f"; set environment.at_once = {most}, or max_concurrent_envs where the server is made"


def _url_of(address: str, path: str) -> str:
    """The address of ``ws`` or ``schema`` on a server, which is given by ws:// or http://."""
    scheme, rest = address.split("://", 1)
    base = rest.rstrip("/").removesuffix("/ws")
    is_safe = scheme in ("wss", "https")
    names = ("ws", "wss") if path == "ws" else ("http", "https")
    return f"{names[is_safe]}://{base}/{path}"


class HostedOpenEnv:
    """A server that is elsewhere, and its tools."""

    def __init__(self, start: HostStart) -> None:
        self._start = start
        try:
            importlib.import_module("websockets.sync.client")
        except ImportError as error:
            raise ToolError(
                f"environment.openenv needs websockets: pip install 'isobit[openenv]' ({error})"
            ) from error
        self._tools = self._listed()
        self._is_mcp = bool(self._tools)
        if not self._is_mcp:
            self._tools = [self._step()]

    def ready(self) -> dict[str, Any]:
        tools = [{"type": "function", "function": tool} for tool in self._tools]
        return {"ready": tools, "opens": True, "has_turn_reward": True}

    def open(self) -> "OpenEnvEpisode":
        return OpenEnvEpisode(self._start, self._tools, self._is_mcp)

    def _listed(self) -> list[dict[str, Any]]:
        """The tools of an MCP environment, in a session of its own; none of any other."""
        try:
            connection, found = _opened(self._start, "step", {"type": "list_tools"})
        except ObjectionError:
            return []
        except LostEpisodeError as error:
            raise ToolError(
                f"{error}; start the server, and give its address as environment.openenv"
            ) from error
        connection.close()
        listed = found.observation.get("tools")
        return _tools(listed) if isinstance(listed, list) else []

    def _step(self) -> dict[str, Any]:
        """The tool of a server that lists none: its action."""
        url = _url_of(self._start.place, "schema")
        try:
            with urlopen(url, timeout=self._start.deadline_s) as response:  # noqa: S310  (http)
                schema = json.loads(response.read(_LARGEST_MESSAGE))["action"]
                properties = {**schema["properties"]}
        except (URLError, OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            what = " ".join(f"{type(error).__name__}: {error}".split())
            raise ToolError(
                f"the OpenEnv server lists no tools, and {url} has no schema of an action: {what}"
            ) from error
        properties.pop("metadata", None)  # of every action
        described = schema.get("description") or "Act in the environment."
        kept = {name: schema[name] for name in ("required", "$defs") if name in schema}
        parameters = {"type": "object", "properties": properties, **kept}
        (found,) = _tools([{"name": "step", "description": described, "input_schema": parameters}])
        return found


def _tools(listed: Sequence[Any]) -> list[dict[str, Any]]:
    """The tools that a server lists.  Raises ToolError for what no model can be told of."""
    if len(listed) > _MOST_TOOLS:
        raise ToolError(
            f"the OpenEnv server lists {len(listed):,} tools; a model is told of at most "
            f"{_MOST_TOOLS}"
        )
    tools = [_tool(tool) for tool in listed]
    names = [tool["name"] for tool in tools]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ToolError(f"the OpenEnv server lists the tool {twice[0]!r} more than once")
    size = len(json.dumps(tools, ensure_ascii=False))
    if size > _LARGEST_TOOLS:
        raise ToolError(
            f"the descriptions and schemas of the OpenEnv server's tools have {size:,} characters; "
            f"a model is told of at most {_LARGEST_TOOLS:,}"
        )
    return tools


def _tool(listed: Any) -> dict[str, Any]:
    match listed:
        case {"name": str(name), "input_schema": dict(schema)}:
            pass
        case _:
            raise ToolError(
                f"the OpenEnv server lists a tool without a name or schema: {listed!r:.200}"
            )
    if not _NAME.fullmatch(name):
        raise ToolError(
            f"the OpenEnv server lists a tool with the name {name!r:.80}; a name has 1 to 128 "
            "letters, digits, and signs of '_-./'"
        )
    described = listed.get("description") or ""
    problem = _problem(schema) if isinstance(described, str) else "its description is no text"
    if problem:
        raise ToolError(f"the tool {name!r} of the OpenEnv server cannot be used: {problem}")
    return {"name": name, "description": described, "parameters": schema}


def _problem(schema: Mapping[str, Any]) -> str:
    """The fault of the JSON schema of a tool's arguments; empty if there is none."""
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if schema.get("type", "object") != "object":
        return f"its arguments are of the type {schema['type']!r:.40}, and not an object"
    if not isinstance(properties, dict) or not all(
        isinstance(node, dict | bool) for node in properties.values()
    ):
        return f"'properties' of its schema is {properties!r:.40}, and not a table of schemas"
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        return f"'required' of its schema is {required!r:.40}, and not a list of names"
    level, depth = [schema], 0
    while level and depth <= _DEEPEST:
        inside = (node.values() if isinstance(node, dict) else node for node in level)
        level = [node for some in inside for node in some if isinstance(node, dict | list)]
        depth += 1
    return f"its schema has more than {_DEEPEST} levels" if level else ""


def _opened(
    start: HostStart, kind: str, data: Mapping[str, Any]
) -> tuple[OpenEnvConnection, Observed]:
    """A session with the answer to its first message.  A server that does not answer, or has no
    session free, which it may have once another ends, is asked again for a while.
    """
    until = monotonic() + start.deadline_s * _PATIENCE
    while True:
        try:
            connection = OpenEnvConnection(start.place, start.deadline_s)
            try:
                return connection, connection.ask(kind, data)
            except BaseException:
                connection.close()
                raise
        except LostEpisodeError as error:
            if error.kind not in ("connection", "capacity") or monotonic() > until:
                raise
            sleep(_PAUSE_S)


class OpenEnvEpisode:
    def __init__(self, start: HostStart, tools: Sequence[Mapping[str, Any]], is_mcp: bool) -> None:
        self._start, self._is_mcp, self._is_over = start, is_mcp, False
        self._tools = {tool["name"]: tool["parameters"] for tool in tools}

    def begin(self, columns: Mapping[str, Any]) -> dict[str, Any]:
        """The first observation, for the prompt, unless it is empty."""
        try:
            given = {**self._start.options, **columns}
            self._connection, seen = _opened(self._start, "reset", given)
        except ObjectionError as error:
            raise LostEpisodeError("reset", str(error)) from error
        if seen.is_done:
            return {"over": True, **rewarded(outcome_of(seen.reward))}
        said = truncated_result(seen.observation, self._start.most_characters)[1]
        return {"opening": said} if seen.observation else {}

    def answer(self, turns: Sequence[Turn], wants_reward: bool) -> dict[str, Any]:
        answer: dict[str, Any] = {"results": []}
        for turn in turns:
            if self._is_over:
                raise RuntimeError("the server ended the episode before a turn that it answered")
            answer = self._answered(turn)
        return answer

    def _answered(self, turn: Turn) -> dict[str, Any]:
        """The results of a turn's calls, one behind the other, up to the end of the episode."""
        results: list[list[str]] = []
        rewards: list[float] = []
        for call in turn.calls:
            if not self._is_over:
                result, reward = self._called(call)
                results.append(result)
                rewards.append(reward)
        outcome = outcome_of(sum(rewards))
        if self._is_over:
            return {"results": results, "over": True, **rewarded(outcome)}
        return {"results": results, **rewarded(outcome, "turn_reward")}

    def _called(self, call: Call) -> tuple[list[str], float]:
        most = self._start.most_characters
        if call.name not in self._tools:
            known = ", ".join(self._tools)
            return ["error", f"there is no tool {call.name!r:.60}; the tools are {known}"], 0.0
        action = arguments = call.by_name(self._tools[call.name])
        if self._is_mcp:
            action = {"type": "call_tool", "tool_name": call.name, "arguments": arguments}
        try:
            seen = self._connection.ask("step", action)
        except ObjectionError as error:
            return ["error", str(error)[:most]], 0.0
        self._is_over = seen.is_done
        return _result(seen.observation, most), seen.reward


def _result(observation: Mapping[str, Any], most: int) -> list[str]:
    """The result that the model sees: the text of a tool's result, or the observation as JSON."""
    match observation:
        case {"tool_name": _, "error": {"message": str(message)}}:
            return ["error", message[:most]]
        case {"tool_name": _, "result": {"content": list(parts), **rest}}:
            texts = [
                part.get("text", "")
                for part in parts
                if isinstance(part, dict) and part.get("type") == "text"
            ]
            result = truncated_result(
                "\n".join(map(str, texts)) if texts else rest.get("data"), most
            )
            return ["error", result[1]] if rest.get("is_error") is True else result
        case {"tool_name": _, "result": value}:
            return truncated_result(value, most)
    return truncated_result(observation, most)
