"""The process of a model's code: it makes the requested calls and sends back values.

It knows no tests, expected values or verdicts. Whatever the code does to this process, only values
come out of it, which the process of the tests compares.

    -> ["call", object, method or null, arguments, keyword arguments]
    -> ["attribute", object, name]
    <- ["value", value]  or  ["raised", type's name, message]

An object is a name that the code defines, or the number of an object that was sent before.
"""

import sys
from types import ModuleType
from typing import Any

from .wire import Channel, WireError, decode, encode

Loaded = dict[str, Any]
LONGEST_MESSAGE = 1000


class Objects:
    def __init__(self) -> None:
        self._objects: list[Any] = []

    def keep(self, value: Any) -> list[Any]:
        """Keep ``value``; returns the reference to send."""
        self._objects.append(value)
        return ["r", len(self._objects) - 1]

    def find(self, number: int) -> Any:
        return self._objects[number]


def load(code: str, name: str) -> Loaded:
    """Run ``code`` as a module called ``name`` and return its names. Raises what it raises."""
    module = ModuleType(name)
    sys.modules[name] = module  # where dataclasses and pickle look up a class's module
    exec(compile(code, f"<{name}>", "exec"), module.__dict__)  # noqa: S102  (this is the sandbox)
    return module.__dict__


def serve(channel: Channel, code: str) -> None:
    """Load ``code`` and answer requests until the channel closes, with errors if loading failed."""
    objects = Objects()
    loaded: Loaded = {}
    failure: BaseException | None = None
    try:
        loaded = load(code, "solution")
    except BaseException as error:  # SystemExit too: requests must still be answered
        failure = error
    while True:
        try:
            request = channel.receive()
        except EOFError:
            return
        try:
            if failure is not None:
                raise failure
            reply = ["value", encode(_answer(request, loaded, objects), objects.keep)]
        except BaseException as error:
            reply = ["raised", type(error).__name__, _message(error)]
        try:
            channel.send(reply)
        except WireError as error:
            channel.send(["raised", "WireError", str(error)])


def _answer(request: list[Any], loaded: Loaded, objects: Objects) -> Any:
    kind, target, *rest = request
    value = loaded[target] if isinstance(target, str) else objects.find(target)
    if kind == "attribute":
        return getattr(value, rest[0])
    method, args, keywords = rest
    function = value if method is None else getattr(value, method)
    return function(
        *decode(args, objects.find),
        **{name: decode(item, objects.find) for name, item in keywords.items()},
    )


def _message(error: BaseException) -> str:
    try:
        return str(error)[:LONGEST_MESSAGE]
    except Exception:
        return ""
