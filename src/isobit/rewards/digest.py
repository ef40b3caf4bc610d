"""A digest of what a function does, for a run that is resumed to know whether it has the same one.

It is of the function's bytecode, its defaults, what it closes over, and the globals that it reads;
among these count

    functions and classes of the user's own    as their bytecode, likewise
    plain values                               as what they are
    libraries, and anything else               as their names and types alone

Comments and places in a file do not count.  Bytecode is that of a version of Python.
"""

import functools
import hashlib
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, TypeAlias

from isobit.user_source import is_installed

Seen: TypeAlias = dict[int, Any]
"""What was met by its identity, and held, so that nothing else gets that."""


def digest_of(value: Any) -> str:
    """SHA-256 of what a function does, as the module says."""
    digest = hashlib.sha256(f"{sys.version_info[:2]}".encode())
    for part in _parts(value, {}):
        digest.update(part.encode("utf-8", "surrogatepass") + b"\0")
    return digest.hexdigest()


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
            # what `exec` has defined says that it is built in; what is built in, is no function
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
    return not is_installed(Path(file))
