"""Running a file that a user names, and the names of what it defines: rewards and objectives of
one's own are found so.
"""

import importlib.util
import sys
from collections.abc import Callable
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import Any


def run_file(path: Path, name: str) -> ModuleType:
    """The file, which is there, executed as the module ``name``.  Whatever it raises passes
    through, and leaves no module behind.
    """
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


def describe_missing(module: ModuleType, name: str, is_one: Callable[[Any], bool]) -> str:
    """What to say in the place of ``name``: those of the module's own members that ``is_one``
    accepts, and the nearest of them.
    """
    names = [
        member
        for member, value in vars(module).items()
        if is_one(value) and value.__module__ == module.__name__
    ]
    near = get_close_matches(name, names, n=1)
    return f"{', '.join(names) or 'none'}{f'; did you mean {near[0]!r}?' if near else ''}"
