"""Running a user's file, or a function of it (``path/to/file.py:function``, ``module:function``).

Every grading process imports this module at its start, so it must not import pydantic.
"""

import importlib.util
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from isobit.util.errors import did_you_mean


def run_file(path: Path, name: str) -> ModuleType:
    """Execute a file as the module ``name``, which is removed again if the file raises."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None, "a .py file always has a loader"
    assert spec.loader is not None, "a .py file always has a loader"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and typing look a class's module up there
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def call_place(place: str, *arguments: Any) -> None:
    """Call the function ``path/to/file.py:function`` or ``module:function``.  Raises whatever its
    module or the function does, and AttributeError where there is none of the name.
    """
    source, _, name = place.rpartition(":")
    is_file = source.endswith(".py")
    module = run_file(Path(source), Path(source).stem) if is_file else import_module(source)
    if not callable(function := getattr(module, name, None)):
        others = describe_missing(module, name, callable)
        raise AttributeError(f"{source} has no function {name!r}; it has {others}")
    function(*arguments)


def describe_missing(module: ModuleType, name: str, is_one: Callable[[Any], bool]) -> str:
    """Text for an error: the module's own members that ``is_one`` accepts, and the nearest one."""
    names = [
        member
        for member, value in vars(module).items()
        if is_one(value) and getattr(value, "__module__", None) == module.__name__
    ]
    return f"{', '.join(names) or 'none'}{did_you_mean(name, names)}"
