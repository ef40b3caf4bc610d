"""Reward functions by name: of a module, a file, a built-in grader, or passed from Python, as
``isobit.train(reward=f)``.

A recipe names its reward ``module:function``, ``path/to/file.py:function`` or by a built-in grader.
A function passed from Python gets such a name if grading processes can import it. Any other one (of
a script or notebook, a lambda, a closure, an object) is named ``python:NAME@DIGEST``, and the
processes get a copy.

The digest is of what the function does, so that a run resumed with another function is refused: its
bytecode, its defaults, what it closes over, and the globals that it reads. Among these, functions
and classes of the user count as their bytecode, plain values as their value, libraries and anything
else as their names and types only. Comments and line numbers do not count. Bytecode depends on the
version of Python.
"""

import functools
import hashlib
import importlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, TypeAlias
from weakref import WeakValueDictionary

from isobit.records.text import Completion, Prompt
from isobit.rewards.form import Reward, recognise
from isobit.rewards.graders import GRADERS
from isobit.util.errors import RewardError
from isobit.util.option_secrets import from_environment
from isobit.util.user_code import describe_missing, run_file
from isobit.util.user_source import is_installed

Seen: TypeAlias = dict[int, Any]
"""Objects already visited, by identity, and kept alive, so that no other gets the same one."""


def digest_of(value: Any) -> str:
    digest = hashlib.sha256(f"{sys.version_info[:2]}".encode())
    for part in _parts(value, {}):
        digest.update(part.encode("utf-8", "surrogatepass") + b"\0")
    return digest.hexdigest()


def _parts(value: Any, seen: Seen) -> Iterator[str]:
    """Text that distinguishes values, in an order that does not depend on the process."""
    if value is None or isinstance(value, bool | int | float | complex | str | bytes):
        yield repr(value)
        return
    if not isinstance(value, tuple | frozenset | CodeType):  # equal ones may be one object or two
        if id(value) in seen:
            yield "again"
            return
        seen[id(value)] = value
    yield type(value).__qualname__
    match value:
        case Mapping():
            for key, one in value.items():
                yield from _parts([key, one], seen)
        case list() | tuple():
            for one in value:
                yield from _parts(one, seen)
        case set() | frozenset():
            yield from sorted(" ".join(_parts(one, seen)) for one in value)
        case re.Pattern():
            yield f"{value.pattern!r} {value.flags}"
        case _:
            yield from _of_behaviour(value, seen)


def _of_behaviour(value: Any, seen: Seen) -> Iterator[str]:
    match value:
        case CodeType():
            yield from _of_code(value, seen)
        case FunctionType() if value.__module__ == "builtins" or _is_own(value.__module__):
            # functions defined by `exec` say so; what is really built in is no FunctionType
            yield from _of_function(value, seen)
        case FunctionType() | ModuleType():
            yield f"{getattr(value, '__module__', '')}.{value.__name__}"
        case MethodType():
            yield from _parts([value.__func__, value.__self__], seen)
        case property():
            yield from _parts([value.fget, value.fset], seen)
        case functools.partial():
            yield from _parts([value.func, value.args, value.keywords], seen)
        case type():
            yield from _of_class(value, seen)
        case _:
            yield from _of_object(value, seen)


def _of_code(code: CodeType, seen: Seen) -> Iterator[str]:
    yield code.co_code.hex()
    for names in (code.co_names, code.co_varnames, code.co_freevars):
        yield " ".join(names)
    yield from _parts(list(code.co_consts), seen)


def _of_function(function: FunctionType, seen: Seen) -> Iterator[str]:
    yield from _parts(function.__code__, seen)
    yield from _parts([function.__defaults__, function.__kwdefaults__], seen)
    for cell in function.__closure__ or ():
        try:
            yield from _parts(cell.cell_contents, seen)
        except ValueError:  # not filled yet
            yield "empty"
    for name in sorted(_names_of(function.__code__) & function.__globals__.keys()):
        yield name
        yield from _parts(function.__globals__[name], seen)


def _of_class(kind: type, seen: Seen) -> Iterator[str]:
    yield f"{kind.__module__}.{kind.__qualname__}"
    if not _is_own(kind.__module__):
        return
    yield from _parts(list(kind.__bases__), seen)
    for name, value in sorted(vars(kind).items()):
        if isinstance(value, FunctionType) or not name.startswith("__"):
            yield name
            yield from _parts(getattr(value, "__func__", value), seen)


def _of_object(value: Any, seen: Seen) -> Iterator[str]:
    if hasattr(value, "__wrapped__"):  # decorated, as by functools.cache
        yield from _parts(value.__wrapped__, seen)
    yield from _parts(type(value), seen)
    if _is_own(type(value).__module__):
        yield from _parts(dict(getattr(value, "__dict__", {})), seen)


def _names_of(code: CodeType) -> set[str]:
    inner = (one for one in code.co_consts if isinstance(one, CodeType))
    return set(code.co_names).union(*(_names_of(one) for one in inner))


def _is_own(module: str | None) -> bool:
    """Whether a module is the user's: a script, a notebook, a file outside the libraries."""
    found = sys.modules.get(module or "")
    if module == "__main__" or found is None:
        return True
    file = getattr(found, "__file__", None)
    if file is None:
        return module not in sys.builtin_module_names
    return not is_installed(Path(file))


PREFIX = "python:"
_DIGITS = 16


class GivenReward:
    """A function that is found by its name as long as this object exists."""

    def __init__(self, function: Callable[..., Any], name: str) -> None:
        self.function, self.name = function, name


_GIVEN: WeakValueDictionary[str, GivenReward] = WeakValueDictionary()


def give_reward(function: Callable[..., Any]) -> GivenReward:
    """The reward with its name for the configuration; the caller must hold it during the run."""
    place = place_of(function) if isinstance(function, FunctionType) else None
    if place is not None:
        return GivenReward(function, place)
    label = re.sub(r"\W", "", str(getattr(function, "__name__", type(function).__name__)))
    made = GivenReward(function, f"{PREFIX}{label}@{digest_of(function)[:_DIGITS]}")
    return _GIVEN.setdefault(made.name, made)


def given_reward(name: str) -> Callable[..., Any]:
    """The function called ``name`` (with ``PREFIX``). Raises RewardError if it is not held."""
    found = _GIVEN.get(name)
    if found is None:
        raise RewardError(
            f"the reward {name} was given from Python; give the same function again with "
            "isobit.train(.., reward=f, resume=True), or name it 'path/to/file.py:function'"
        )
    return found.function


def packed_reward(name: str) -> bytes:
    """The function's copy for a grading process. Raises RewardError if it cannot be copied."""
    import dill

    try:
        return dill.dumps(given_reward(name), recurse=True)
    except RewardError:
        raise
    except Exception as error:  # objects that cannot be pickled raise anything
        raise RewardError(
            f"the reward {name} cannot be handed to the processes that grade: "
            f"{type(error).__name__}: {error}; make clients, generators and open files inside the "
            "function, name it 'module:function', or set reward.in_process = true"
        ) from error


def unpack_reward(name: str, packed: bytes) -> GivenReward:
    """The copy in a grading process, which holds it. Raises whatever unpickling raises."""
    import pickle

    made = GivenReward(pickle.loads(packed), name)  # noqa: S301  the trainer's own
    _GIVEN[name] = made
    return made


def place_of(function: Callable[..., Any]) -> str | None:
    """``module:name`` of a function or class if a new process can import this very object by that
    name.
    """
    module, name = getattr(function, "__module__", None), getattr(function, "__name__", "")
    if not isinstance(function, FunctionType | type) or module in (None, "__main__"):
        return None
    if getattr(sys.modules.get(module), name, None) is not function:
        return None
    try:
        found = importlib.util.find_spec(module)
    except (ImportError, ValueError):  # a module that was created by hand
        return None
    file = getattr(sys.modules[module], "__file__", None)
    is_found = found is not None and found.origin is not None and found.origin == file
    return f"{module}:{name}" if is_found else None


RewardFunction: TypeAlias = Callable[[Prompt, Completion], float | None]

_NO_MEMORY = ("annot allocate memory", "failed to map segment")
"""Parts of the system's and the dynamic loader's messages."""


def load_reward(name: str, options: Mapping[str, Any] | None = None) -> Reward:
    """The reward called ``name`` with its options, in which ``env:NAME`` is replaced by the
    environment variable's value.

    Raises ``RewardError`` for an unset variable, an invalid name, a module or file that is missing
    or fails on import, an unknown function (with those that exist), and an unknown form
    (``isobit.rewards.form``).
    """
    options = from_environment(options or {}, name)
    if name.startswith(PREFIX):
        return recognise(given_reward(name), name, options)
    place = GRADERS.get(name, name)
    module_name, separator, function_name = place.rpartition(":")
    if not (separator and module_name and function_name):
        raise RewardError(
            f"cannot read the reward {name!r}; expected 'module:function', "
            f"'path/to/file.py:function' or one of {', '.join(map(repr, GRADERS))}"
        )
    module = (
        _from_file(Path(module_name)) if module_name.endswith(".py") else _from_module(module_name)
    )
    return recognise(_function(module, module_name, function_name), name, options)


def _from_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise RewardError(f"there is no reward file {path} (looked in {path.absolute().parent})")
    try:
        return run_file(path, f"isobit_reward_{path.stem}")
    except (Exception, SystemExit) as error:
        raise RewardError(f"the reward file {path} fails on import: {_in_a_line(error)}") from error


def _from_module(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        missing = isinstance(error, ModuleNotFoundError)
        hint = (
            "; a file that is not installed is named by its path, as in 'rewards/mine.py:function'"
            if missing
            else ""
        )
        raise RewardError(
            f"the reward module {name!r} cannot be imported: {_in_a_line(error)}{hint}"
        ) from error


def _function(module: ModuleType, module_name: str, function_name: str) -> Callable[..., Any]:
    function = getattr(module, function_name, None)
    if callable(function):
        return function
    functions = describe_missing(module, function_name, inspect.isfunction)
    raise RewardError(
        f"{module_name} has no function {function_name!r}; its functions are {functions}"
    )


def _in_a_line(error: BaseException) -> str:
    text = " ".join(f"{type(error).__name__}: {error}".split())
    short_of_memory = isinstance(error, MemoryError) or any(sign in text for sign in _NO_MEMORY)
    return text + (" (reward.memory_mib is what it may take)" if short_of_memory else "")
