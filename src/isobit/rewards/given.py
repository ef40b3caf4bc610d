"""Reward functions given from Python, as ``isobit.train(reward=f)``.

A configuration names its reward, and the processes that grade load it by that name:

    a function of a module that they can import    ``module:function``, as in a recipe
    any other: of a script or a notebook,          ``python:NAME@DIGEST``, and the processes are
    a lambda, a closure, an object                 handed a copy of it

The digest is of what the function does: its bytecode, defaults, what it closes over, and the
globals that it reads, in which functions and classes of the user's own count as their bytecode,
plain values as what they are, and anything else (a client, a model) as its type alone.  Comments
and lines do not count.  A run that is resumed with another function has another name, and is
refused.
"""

import functools
import hashlib
import importlib.util
import re
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, TypeAlias
from weakref import WeakValueDictionary

from isobit.errors import RewardError

PREFIX = "python:"
_DIGITS = 16
_LIBRARIES = tuple(
    Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib", "purelib")
) + (Path(__file__).resolve().parent.parent,)


class GivenReward:
    """A function, found by its name for as long as somebody holds this object."""

    def __init__(self, function: Callable[..., Any], name: str) -> None:
        self.function, self.name = function, name


Seen: TypeAlias = dict[int, Any]
"""What was met by its identity, and held, so that nothing else gets that."""

_GIVEN: WeakValueDictionary[str, GivenReward] = WeakValueDictionary()


def give_reward(function: Callable[..., Any]) -> GivenReward:
    """The reward under the name that the configuration has for it; whoever starts the run holds
    what is returned.
    """
    place = _place_of(function)
    if place is not None:
        return GivenReward(function, place)
    label = re.sub(r"\W", "", str(getattr(function, "__name__", type(function).__name__)))
    made = GivenReward(function, f"{PREFIX}{label}@{digest_of(function)[:_DIGITS]}")
    return _GIVEN.setdefault(made.name, made)


def given_reward(name: str) -> Callable[..., Any]:
    """The function with a name that begins with ``PREFIX``.  Raises RewardError where nobody holds
    it.
    """
    found = _GIVEN.get(name)
    if found is None:
        raise RewardError(
            f"the reward {name} was given from Python, which only a call from Python can give "
            "again: isobit.train(.., reward=the same function, resume=True); or put it into a "
            "file, and name it 'path/to/file.py:function'"
        )
    return found.function


def packed_reward(name: str) -> bytes:
    """The function as a grading process takes it.  Raises RewardError for one that cannot be handed
    to another process.
    """
    import dill

    try:
        return dill.dumps(given_reward(name), recurse=True)
    except RewardError:
        raise
    except Exception as error:  # whatever an object raises that is no value
        raise RewardError(
            f"the reward {name} cannot be handed to the processes that grade: "
            f"{type(error).__name__}: {error}; make what it holds (a lock, a client, an open file) "
            "inside the function, put it into a module and name it 'module:function', or set "
            "reward.in_process = true"
        ) from error


def unpack_reward(name: str, packed: bytes) -> GivenReward:
    """The copy of a grading process, which holds it.  Raises whatever unpickling raises."""
    import pickle

    made = GivenReward(pickle.loads(packed), name)  # noqa: S301  the trainer's own
    _GIVEN[name] = made
    return made


def digest_of(value: Any) -> str:
    """SHA-256 of what a function does, as the module says."""
    digest = hashlib.sha256(f"{sys.version_info[:2]}".encode())
    for part in _parts(value, {}):
        digest.update(part.encode("utf-8", "surrogatepass") + b"\0")
    return digest.hexdigest()


def _place_of(function: Callable[..., Any]) -> str | None:
    """``module:function`` of what a new process can import, and finds as this very object."""
    module, name = getattr(function, "__module__", None), getattr(function, "__name__", "")
    if not isinstance(function, FunctionType) or module in (None, "__main__"):
        return None
    if getattr(sys.modules.get(module), name, None) is not function:
        return None
    try:
        found = importlib.util.find_spec(module)
    except (ImportError, ValueError):  # a module that was made by hand
        return None
    file = getattr(sys.modules[module], "__file__", None)
    is_found = found is not None and found.origin is not None and found.origin == file
    return f"{module}:{name}" if is_found else None


def _parts(value: Any, seen: Seen) -> Iterator[str]:
    """What tells one value from another, in an order that does not depend on the process."""
    if value is None or isinstance(value, bool | int | float | complex | str | bytes):
        yield repr(value)
        return
    if not isinstance(value, tuple | frozenset | CodeType):  # whose equals may be one object or two
        if id(value) in seen:
            yield "again"
            return
        seen[id(value)] = value
    yield type(value).__qualname__
    match value:
        case CodeType():
            yield from _of_code(value, seen)
        case FunctionType() if _is_own(value.__module__):
            yield from _of_function(value, seen)
        case FunctionType() | ModuleType():
            yield f"{getattr(value, '__module__', '')}.{value.__name__}"
        case MethodType():
            yield from _parts([value.__func__, value.__self__], seen)
        case property():
            yield from _parts([value.fget, value.fset], seen)
        case functools.partial():
            yield from _parts([value.func, value.args, value.keywords], seen)
        case re.Pattern():
            yield f"{value.pattern!r} {value.flags}"
        case Mapping():
            for key, one in value.items():
                yield from _parts([key, one], seen)
        case list() | tuple():
            for one in value:
                yield from _parts(one, seen)
        case set() | frozenset():
            yield from sorted(" ".join(_parts(one, seen)) for one in value)
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
    if hasattr(value, "__wrapped__"):  # what a decorator such as functools.cache has made
        yield from _parts(value.__wrapped__, seen)
    yield from _parts(type(value), seen)
    if _is_own(type(value).__module__):
        yield from _parts(dict(getattr(value, "__dict__", {})), seen)


def _names_of(code: CodeType) -> set[str]:
    inner = (one for one in code.co_consts if isinstance(one, CodeType))
    return set(code.co_names).union(*(_names_of(one) for one in inner))


def _is_own(module: str | None) -> bool:
    """Whether a module is the user's: of a script, a notebook, a file outside the libraries."""
    found = sys.modules.get(module or "")
    if module == "__main__" or found is None:
        return True
    file = getattr(found, "__file__", None)
    if file is None:
        return module not in sys.builtin_module_names
    return not any(Path(file).resolve().is_relative_to(folder) for folder in _LIBRARIES)
