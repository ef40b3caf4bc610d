"""A server that speaks the messages of openenv-core 0.3, with an environment of each kind, and
servers that misbehave.
"""

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any, ClassVar

from websockets.exceptions import ConnectionClosed
from websockets.sync.server import Server, ServerConnection, serve

Message = dict[str, Any]


class RefusedError(Exception):
    """An error message, by its code."""


def observation(
    seen: Mapping[str, Any], reward: float | None = None, done: bool = False
) -> Message:
    data = {"observation": dict(seen), "reward": reward, "done": done}
    return {"type": "observation", "data": data}


class Count:
    """An environment without tools: counts on until ``goal``."""

    schema: ClassVar[Message] = {
        "type": "object",
        "description": "Count on.",
        "properties": {"by": {"type": "integer"}, "metadata": {"type": "object"}},
        "required": ["by"],
    }

    def reset(self, start: int = 0, goal: int = 10, seed: int | None = None, **_: Any) -> Message:
        if start < 0:
            raise RefusedError("EXECUTION_ERROR", "a start below 0")
        self.total, self.goal = start, goal
        return observation({"total": start, "seed": seed}, 0.0)

    def step(self, data: Message) -> Message:
        if set(data) != {"by"}:
            raise RefusedError("VALIDATION_ERROR", "Invalid message")
        if data["by"] < 0:
            raise RefusedError("EXECUTION_ERROR", "only up")
        self.total += data["by"]
        return observation({"total": self.total}, data["by"] / 4, self.total >= self.goal)


class Tools:
    """An MCP environment: two tools, and nothing to say at first."""

    schema: ClassVar[Message] = {"type": "object", "properties": {"tool_name": {"type": "string"}}}

    def reset(self, **_: Any) -> Message:
        return observation({}, 0.0)

    def step(self, data: Message) -> Message:
        if data["type"] == "list_tools":
            places = {"a": {"type": "integer"}, "b": {"type": "integer"}}
            add = {"type": "object", "properties": places, "required": ["a"]}
            name = {"type": "object", "properties": {"name": {"type": "string"}}}
            listed = [("add", "Add two numbers.", add), ("greet", "Greet somebody.", name)]
            keys = ("name", "description", "input_schema")
            return observation({"tools": [dict(zip(keys, one, strict=True)) for one in listed]})
        name, arguments = data["tool_name"], data["arguments"]
        if name == "greet":
            result = {"content": [], "data": {"hello": arguments["name"]}, "is_error": False}
        elif "a" not in arguments:
            error = {"error_type": "invalid_args", "message": "a is missing"}
            return observation({"tool_name": name, "result": None, "error": error})
        else:
            text = {"type": "text", "text": str(arguments["a"] + arguments.get("b", 0))}
            result = {"content": [text], "data": None, "is_error": False}
        return observation({"tool_name": name, "result": result, "error": None}, 1)


class OpenEnvServer:
    """Sessions of one environment, up to ``capacity`` at once."""

    def __init__(self, kind: type[Count | Tools], capacity: int, wrong: Callable[..., Any]) -> None:
        self._kind, self._capacity, self._wrong = kind, capacity, wrong
        self._lock = threading.Lock()
        self.open = 0
        self.most_open = 0
        self.asked: list[Message] = []

    def session(self, socket: ServerConnection) -> None:
        with self._lock:
            is_full = self.open >= self._capacity
            self.open += not is_full
            self.most_open = max(self.most_open, self.open)
        if is_full:
            data = {"code": "CAPACITY_REACHED", "message": "full", "max_sessions": self._capacity}
            socket.send(json.dumps({"type": "error", "data": data}))
            return
        try:
            environment = self._kind()
            for text in socket:
                self._answer(socket, environment, json.loads(text))
        except ConnectionClosed:
            pass
        finally:
            with self._lock:
                self.open -= 1

    def _answer(self, socket: ServerConnection, environment: Any, message: Message) -> None:
        self.asked.append(message)
        if self._wrong(socket, message):
            return
        kind, data = message["type"], message["data"]
        try:
            said = environment.reset(**data) if kind == "reset" else environment.step(data)
        except RefusedError as error:
            code, text = error.args
            wrong = [{"loc": ["by"], "msg": "Field required"}] if code[0] == "V" else None
            said = {"type": "error", "data": {"code": code, "message": text, "errors": wrong}}
        socket.send(json.dumps(said))

    def page(self, socket: ServerConnection, request: Any) -> Any:
        """/schema, and nothing for the WebSocket's address."""
        if request.path == "/ws":
            return None
        found = json.dumps({"action": self._kind.schema}) if request.path == "/schema" else ""
        return socket.respond(HTTPStatus.OK if found else HTTPStatus.NOT_FOUND, found)


def well(socket: ServerConnection, message: Message) -> bool:
    """A server does nothing wrong."""
    return False


@contextmanager
def serving(
    kind: type[Count | Tools],
    *,
    capacity: int = 16,
    wrong: Callable[[ServerConnection, Message], bool] = well,
) -> Iterator[tuple[str, OpenEnvServer, Server]]:
    """A server in a thread, with its address; ``wrong`` may answer a message in its place."""
    made = OpenEnvServer(kind, capacity, wrong)
    options: dict[str, Any] = {"process_request": made.page, "close_timeout": 0.2}
    with serve(made.session, "127.0.0.1", 0, **options) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        host, port = server.socket.getsockname()
        try:
            yield f"ws://{host}:{port}", made, server
        finally:
            server.shutdown()
            thread.join(timeout=10)
