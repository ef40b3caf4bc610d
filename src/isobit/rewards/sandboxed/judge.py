"""The process that runs a dataset's tests, which call a model's code in another process.

Names that the tests use and do not define are stubs: calling one sends the arguments and returns a
value of builtin types. So ``assert f(2) == 4`` compares in this process, which the model's code
cannot change.

    the verdict, as JSON:  {"verdict": one of these, "message": ..}
    passed     every assertion held, and the model's code was called
    failed     an assertion did not hold, or something raised
    died       the process of the model's code has ended
    memory     it ran out of memory
    unusable   the tests cannot be run for any answer: no Python, a missing module, an argument that
               cannot be sent, no call at all
"""

import ast
import builtins
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from .wire import Channel, WireError, decode, encode

CANDIDATE = "candidate"
Names = dict[str, Any]


class CandidateError(Exception):
    """An exception of the model's code whose type is not builtin."""


class CandidateMemoryError(MemoryError):
    """The model's code ran out of memory."""


class CandidateDiedError(BaseException):
    """The process of the model's code has ended, or sent nonsense. Not an ``Exception``, so that
    the tests cannot catch it by mistake.
    """


class UnusableError(BaseException):
    """Tests that cannot be run for any answer."""


class Session:
    """A conversation with the process of the model's code; ``calls`` counts the requests."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.calls = 0
        self.raised: BaseException | None = None

    def ask(self, kind: str, *rest: Any) -> Any:
        """The value of one request. Raises what the model's code raised."""
        self.calls += 1
        try:
            self.channel.send([kind, *rest])
            match self.channel.receive():
                case ["value", message]:
                    return decode(message, lambda number: Remote(self, number))
                case ["raised", str(name), str(text)]:
                    pass
                case _:
                    raise WireError("a reply that is none")
        except (OSError, EOFError, WireError) as error:
            raise CandidateDiedError(str(error)) from error
        self.raised = _exception(name, text)
        raise self.raised


def _exception(name: str, message: str) -> Exception:
    """The tests' view of an exception of the model's code: builtin types as they are."""
    if name == "MemoryError":
        return CandidateMemoryError(message)
    kind: Any = vars(builtins).get(name)
    stops = StopIteration | StopAsyncIteration  # would silently end a loop of the tests
    if isinstance(kind, type) and issubclass(kind, Exception) and not issubclass(kind, stops):
        with suppress(TypeError):  # some take more than a message
            return kind(message)
    return CandidateError(f"{name}: {message}")


class Remote:
    """An object in the process of the model's code, which can be called, asked for attributes and
    items, and iterated over.

    It equals only itself and has no truth value, since the other process must not decide about
    these.
    """

    __slots__ = ("_session", "_target")

    def __init__(self, session: Session, target: int | str) -> None:
        self._session = session
        self._target = target

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        return _call(self, None, args, keywords)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._session.ask("attribute", self._target, name)

    def __iter__(self) -> Iterator[Any]:
        iterator = _call(self, "__iter__", (), {})
        if not isinstance(iterator, Remote):
            raise TypeError("iter() of the model's object gave a plain value")
        while True:
            try:
                item = _call(iterator, "__next__", (), {})
            except CandidateError as error:
                if str(error).startswith("StopIteration:"):
                    return
                raise
            yield item

    def __next__(self) -> Any:
        try:
            return _call(self, "__next__", (), {})
        except CandidateError as error:
            if str(error).startswith("StopIteration:"):
                raise StopIteration from None
            raise

    def __len__(self) -> int:
        try:
            length = _call(self, "__len__", (), {})
        except AttributeError as error:  # list() asks for a length, and accepts a TypeError
            raise TypeError("the model's object has no len()") from error
        if type(length) is not int:
            raise TypeError("len() of the model's object is no int")
        return length

    def __getitem__(self, key: Any) -> Any:
        return _call(self, "__getitem__", (key,), {})

    def __bool__(self) -> bool:
        raise TypeError("an object of the model's own has no truth here; expected a plain value")


def _call(remote: Remote, method: str | None, args: tuple[Any, ...], keywords: Names) -> Any:
    try:
        sent = encode(list(args), _keep)
        named = {name: encode(value, _keep) for name, value in keywords.items()}
    except WireError as error:
        raise UnusableError(f"the tests pass {error}") from error
    return remote._session.ask("call", remote._target, method, sent, named)


def _keep(value: Any) -> list[Any]:
    if isinstance(value, Remote) and isinstance(value._target, int):
        return ["r", value._target]
    raise WireError(f"an argument of type {type(value).__name__}, which cannot be sent")


def free_names(tests: ast.Module) -> set[str]:
    """The names that ``tests`` read and neither define nor find among the builtins."""
    read: set[str] = set()
    bound: set[str] = set(dir(builtins))
    for node in ast.walk(tests):
        match node:
            case ast.Name(id=name, ctx=ast.Load()):
                read.add(name)
            case ast.Name(id=name):
                bound.add(name)
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                bound.add(name)
            case ast.ClassDef(name=name) | ast.ExceptHandler(name=str(name)):
                bound.add(name)
            case ast.arg(arg=name):
                bound.add(name)
            case ast.alias(name=name, asname=alias):
                bound.add(alias or name.partition(".")[0])
    return read - bound


def judge(channel: Channel, tests: str, entry_point: str | None) -> dict[str, str]:
    """Run ``tests`` and return the verdict. With ``entry_point`` only that name and ``candidate``
    are the model's; otherwise all names that the tests do not define.
    """
    session = Session(channel)
    try:
        _run(session, tests, entry_point)
        if session.calls == 0:
            raise UnusableError("the tests never call the answer's code")
    except UnusableError as error:
        return {"verdict": "unusable", "message": str(error)}
    except CandidateDiedError as error:
        return {"verdict": "died", "message": str(error)}
    except CandidateMemoryError as error:
        return {"verdict": "memory", "message": str(error)}
    except (SyntaxError, ImportError) as error:
        if error is not session.raised:
            return {"verdict": "unusable", "message": f"{type(error).__name__}: {error}"}
        return {"verdict": "failed", "message": f"{type(error).__name__}: {error}"}
    except SystemExit as error:
        verdict = "failed" if error.code else "unusable"
        return {"verdict": verdict, "message": f"the tests call sys.exit({error.code!r:.80})"}
    except BaseException as error:
        return {"verdict": "failed", "message": f"{type(error).__name__}: {error}"[:1000]}
    return {"verdict": "passed", "message": ""}


def _run(session: Session, tests: str, entry_point: str | None) -> None:
    tree = ast.parse(tests)
    remote = {entry_point, CANDIDATE} if entry_point else free_names(tree)
    names: Names = {"__name__": "tests", "__builtins__": builtins}
    for name in remote:
        names[name] = Remote(session, entry_point or name)
    exec(compile(tree, "<tests>", "exec"), names)  # noqa: S102  (this is the sandbox)
    functions = [
        value
        for name, value in names.items()
        if name.startswith("test_") and callable(value) and not isinstance(value, Remote)
    ]
    for function in functions:
        function()
    check = names.get("check")
    if callable(check) and not isinstance(check, Remote) and session.calls == 0:
        if entry_point is None:
            raise UnusableError("check(candidate) needs the column entry_point")
        check(names[entry_point])
