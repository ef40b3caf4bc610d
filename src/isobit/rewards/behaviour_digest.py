"""A digest of what a Python function or class does.

A run that is resumed with a function of another digest is refused.

It covers its bytecode, its defaults, what it closes over, and the globals that it reads. Among
these, functions and classes of the user count as their bytecode, plain values as their value,
libraries and anything else as their names and types only. Comments and line numbers do not count.
Bytecode depends on the version of Python.
"""

import functools
import hashlib
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, TypeAlias

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
    inner = (const for const in code.co_consts if isinstance(const, CodeType))
    return set(code.co_names).union(*(_names_of(one) for one in inner))


def _is_own(module: str | None) -> bool:
    """Whether a module is the user's: a script, a notebook, a file outside the libraries."""
    loaded = sys.modules.get(module or "")
    if module == "__main__" or loaded is None:
        return True
    file = getattr(loaded, "__file__", None)
    if file is None:
        return module not in sys.builtin_module_names
    return not is_installed(Path(file))
