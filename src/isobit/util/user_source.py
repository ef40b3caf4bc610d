"""The digest of a user's source code (``path/to/file.py:function``, ``module:function``) with the
modules that it imports, none of which is run. Installed packages and the standard library are left
out, since their versions are recorded elsewhere.
"""

import ast
import hashlib
import site
import sys
import sysconfig
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from isobit.util.plain_files import read_plain

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
    contents = _with_imports(first)
    if not contents:
        return None
    digest = hashlib.sha256()
    for content in sorted(contents.values()):
        digest.update(hashlib.sha256(content).digest())
    return digest.hexdigest()


def _with_imports(first: list[Path]) -> dict[Path, bytes]:
    """The content of the files and of all user's files that they import, directly or indirectly."""
    contents: dict[Path, bytes] = {}
    left = list(first)
    while left:
        path = left.pop().resolve()
        if path not in contents:
            contents[path] = read_plain(path)
            left += _imported(path, contents[path])
    return contents


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
    return any(installed == place or installed in place.parents for installed in _INSTALLED)
