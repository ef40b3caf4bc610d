"""Running a user's file, and the digest of a user's source code (``path/to/file.py:function``,
``module:function``) with the modules that it imports, none of which is run. Installed packages and
the standard library are left out, since their versions are recorded elsewhere.

Secrets of a reward's options, which the recipe names by an environment variable:

    options = { api_key = "env:JUDGE_KEY" }

The value is read in the process that loads the reward and is written nowhere; in the reward's
errors it is shown as ``env:JUDGE_KEY``. A secret written into the recipe itself gets a warning.

Every grading process imports this module at its start, so it must not import pydantic.
"""

import ast
import hashlib
import importlib.util
import os
import re
import site
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping
from difflib import get_close_matches
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from isobit.util.errors import RewardError
from isobit.util.plain_files import read_plain


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
    """For an error: the module's own members that ``is_one`` accepts, and the nearest one."""
    names = [
        member
        for member, value in vars(module).items()
        if is_one(value) and getattr(value, "__module__", None) == module.__name__
    ]
    near = get_close_matches(name, names, n=1)
    return f"{', '.join(names) or 'none'}{f'; did you mean {near[0]!r}?' if near else ''}"


_INSTALLED = tuple(
    Path(folder).resolve()
    for folder in {
        *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
        *site.getsitepackages(),
        site.getusersitepackages(),
        str(Path(__file__).parents[1]),  # Isobit itself
    }
)


def source_sha256(place: str) -> str | None:
    """SHA-256 of the source of ``place``; None where no user's file is found."""
    module = place.rpartition(":")[0] or place
    if module.endswith(".py"):
        first = [Path(module)] if Path(module).is_file() else []
    else:
        first = list(_files_of(module.split(".")))
    found = _with_imports(first)
    if not found:
        return None
    digest = hashlib.sha256()
    for content in sorted(found.values()):
        digest.update(hashlib.sha256(content).digest())
    return digest.hexdigest()


def _with_imports(first: list[Path]) -> dict[Path, bytes]:
    """The content of the files and of all user's files that they import, directly or indirectly."""
    found: dict[Path, bytes] = {}
    left = list(first)
    while left:
        path = left.pop().resolve()
        if path not in found:
            found[path] = read_plain(path)
            left += _imported(path, found[path])
    return found


def _imported(path: Path, source: bytes) -> Iterator[Path]:
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return  # importing it will say what is wrong
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield from _files_of(alias.name.split("."))
        elif isinstance(node, ast.ImportFrom):
            module = node.module.split(".") if node.module else []
            for alias in node.names:  # a module, or a name in one
                if node.level:
                    yield from _below(path.parents[node.level - 1], [*module, alias.name])
                else:
                    yield from _files_of([*module, alias.name])


def _files_of(parts: list[str]) -> Iterator[Path]:
    """The source of a user's module by its dotted name, with the packages above it; nothing for a
    module that is installed, built in or missing.
    """
    first = parts[0]
    if first in sys.builtin_module_names or first in sys.stdlib_module_names:
        return
    try:
        spec = find_spec(first)
    except (ImportError, ValueError):  # a module of this process that came from nowhere
        return
    if spec is None:
        return
    places = spec.submodule_search_locations or ([spec.origin] if spec.origin else [])
    for folder in {Path(place).parent for place in places}:
        if not is_installed(folder) and not is_installed(folder / first):
            yield from _below(folder, parts)


def _below(folder: Path, parts: list[str]) -> Iterator[Path]:
    for part in parts:
        package, module = folder / part, folder / f"{part}.py"
        if not package.is_dir():
            if module.is_file():
                yield module
            return
        if (package / "__init__.py").is_file():
            yield package / "__init__.py"
        folder = package


def is_installed(folder: Path) -> bool:
    """Whether a path is in the standard library, an installed package or Isobit."""
    place = folder.resolve()
    return any(one == place or one in place.parents for one in _INSTALLED)


if TYPE_CHECKING:
    from isobit.config.reward import RewardConfig


ENVIRONMENT = "env:"
"""Prefix of an option's value that names a variable."""
_NAMES = re.compile(
    r"(?i)(^|[_-])(api|access|auth|private|secret)[_-]?(key|token)$|"
    r"(^|[_-])(password|passwd|secret|credentials?|bearer)$"
)


def is_secret(name: str) -> bool:
    return _NAMES.search(name) is not None


def secret_notes(reward: "RewardConfig | None") -> list[str]:
    """Warnings for options with the name of a secret and a value in the recipe."""
    if reward is None:
        return []
    tables = {"reward.options": reward.options} | {
        f"reward.parts.{name}.options": part.options for name, part in reward.parts.items()
    }
    return [
        f"{table}.{name} is written to run.json and to every checkpoint as it stands; "
        f'{name} = "env:NAME" takes it from the environment variable NAME, and is all that is '
        "written"
        for table, options in tables.items()
        for name, value in options.items()
        if is_secret(name) and isinstance(value, str) and not value.startswith(ENVIRONMENT)
    ]


_SHORTEST = 4
"""Shorter values are not searched for in messages, since they may be parts of words."""
_shown: dict[str, str] = {}
"""What messages show in place of each value."""


def from_environment(options: Mapping[str, Any], reward: str) -> dict[str, Any]:
    """The options with their variables' values. Raises RewardError for one that is not set."""
    return {name: _value(name, given, reward) for name, given in options.items()}


def hidden(text: str) -> str:
    """A message without the values that came from the environment."""
    for value, name in _shown.items():
        text = text.replace(value, name)
    return text


def _value(option: str, given: Any, reward: str) -> Any:
    if not (isinstance(given, str) and given.startswith(ENVIRONMENT)):
        return given
    name = given.removeprefix(ENVIRONMENT)
    value = os.environ.get(name)
    if value is None:
        raise RewardError(
            f"the option {option} of the reward {reward!r} is {given!r}, but the environment "
            f"variable {name} is not set; export it before the run, also before --resume"
        )
    if len(value) >= _SHORTEST:
        _shown[value] = given
    return value
