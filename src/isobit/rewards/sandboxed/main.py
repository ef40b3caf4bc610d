"""The program that the sandbox starts: it confines itself, then does its job.

    argv[1]   descriptor of the job, JSON:
      role       "candidate", "tests", "script" or "probe"
      limits     memory_bytes, cpu_seconds, file_bytes
      parent     the process that started this one and takes it with it; null if another does so
      root       null if namespaces and root are already made, else shown, links, tmp_bytes
      as_nobody  whether the code runs as a user of its own in these namespaces (`namespaces`)
      code, tests, entry_point   as the role needs
      incoming, outgoing         descriptors of the channel between candidate and tests

The file of the job is emptied after the confinement, so that its starter can distinguish a failed
sandbox from failed code.

A candidate is a model's code: its process makes the requested calls and sends back values.  It
knows no tests, expected values or verdicts.  Whatever the code does to this process, only values
come out of it, which the process of the tests compares (``judge``).

    -> ["call", object, method or null, arguments, keyword arguments]
    -> ["attribute", object, name]
    <- ["value", value]  or  ["raised", type's name, message]

An object is a name that the code defines, or the number of an object that was sent before.
"""

import builtins
import json
import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from . import judge, kernel, namespaces
from .wire import Channel, WireError, decode, encode

Job = dict[str, Any]
Loaded = dict[str, Any]
LONGEST_MESSAGE = 1000
MEMORY = 98
"""Exit code of a script that ran out of memory."""


def main() -> None:
    descriptor = int(sys.argv[1])
    with open(descriptor, "rb", closefd=False) as file:
        job: Job = json.load(file)
    if job["parent"] is not None:
        kernel.die_with_parent()
        if os.getppid() != job["parent"]:
            os._exit(1)
    if job["root"] is not None:
        _enter_the_sandbox(job["root"], job["as_nobody"])
    kernel.apply_limits(**job["limits"])
    job["threads"] = kernel.are_threads_bounded()
    kernel.refuse_dangerous_calls(job["threads"], job["limits"]["memory_bytes"])
    os.ftruncate(descriptor, 0)
    os.close(descriptor)
    roles: dict[str, Callable[[Job], None]] = {
        "candidate": _candidate,
        "tests": _tests,
        "script": _script,
        "probe": _probe,
    }
    roles[job["role"]](job)


def _enter_the_sandbox(root: dict[str, Any], as_nobody: bool) -> None:
    """Continue in namespaces and a root of its own, without privileges."""
    ended = namespaces.enter(as_nobody)
    identity = namespaces.INSIDE if as_nobody else None
    kernel.build_root(**root, owner=identity or 0)
    kernel.drop_privileges(identity)
    namespaces.stay_bound(ended)


def _probe(job: Job) -> None:
    """Say how many threads a program may have. Raises OSError if the library cannot be read."""
    with open(os.__file__, "rb") as file:
        file.read(1)
    print(kernel.THREADS if job["threads"] else 1)


def _silence() -> int:
    """Send standard output to /dev/null; returns a descriptor of the original."""
    output = os.dup(1)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.close(nowhere)
    return output


def _candidate(job: Job) -> None:
    _silence()
    serve(Channel(job["incoming"], job["outgoing"]), job["code"])
    os._exit(0)


def _tests(job: Job) -> None:
    output = _silence()
    verdict = judge.judge(
        Channel(job["incoming"], job["outgoing"]), job["tests"], job["entry_point"]
    )
    os.write(output, json.dumps(verdict).encode("ascii"))
    os._exit(0)


def _script(job: Job) -> None:
    try:
        load(job["code"], "__main__")
    except MemoryError:
        os._exit(MEMORY)


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
    for end in ("exit", "quit"):  # Python's own come from site
        setattr(builtins, end, sys.exit)
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
