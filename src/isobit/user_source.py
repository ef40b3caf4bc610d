"""The source of code that a user names (``path/to/file.py:function``, ``module:function``), found
without running any of it: its file, and the modules of the user's own that it imports.

Installed packages and the standard library do not count: their versions are recorded elsewhere.
"""

import ast
import hashlib
import site
import sys
import sysconfig
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

_INSTALLED = tuple(
    Path(folder).resolve()
    for folder in {
        *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
        *site.getsitepackages(),
        site.getusersitepackages(),
        str(Path(__file__).parent),  # Isobit itself
    }
)


def source_sha256(place: str) -> str | None:
    """SHA-256 of the source behind ``place``; None where no file of the user's own is found."""
    module = place.rpartition(":")[0] or place
    if module.endswith(".py"):
        first = [Path(module)] if Path(module).is_file() else []
    else:
        first = list(_files_of(module.partition(".")[0]))
    found = _with_imports(first)
    if not found:
        return None
    digest = hashlib.sha256()
    for content in sorted(found.values()):
        digest.update(hashlib.sha256(content).digest())
    return digest.hexdigest()


def _with_imports(first: list[Path]) -> dict[Path, bytes]:
    """The content of files and of all that they import, and these in turn."""
    found: dict[Path, bytes] = {}
    left = list(first)
    while left:
        path = left.pop().resolve()
        if path not in found:
            found[path] = path.read_bytes()
            left += [file for name in _imported(found[path]) for file in _files_of(name)]
    return found


def _imported(source: bytes) -> set[str]:
    """The first names of the modules that a source imports, wherever in it."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return set()  # importing it will say what is wrong
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.partition(".")[0])
    return names


def _files_of(name: str) -> Iterator[Path]:
    """The source of a module of the user's own, all files of it where it is a package; none of one
    that is installed, built in or missing.
    """
    if name in sys.builtin_module_names or name in sys.stdlib_module_names:
        return
    try:
        spec = find_spec(name)
    except (ImportError, ValueError):  # a module of this process that came from nowhere
        return
    if spec is None:
        return
    for place in spec.submodule_search_locations or [spec.origin or ""]:
        path = Path(place).resolve()
        if path.suffix != ".py" and not path.is_dir():
            continue
        if not any(folder == path or folder in path.parents for folder in _INSTALLED):
            yield from sorted(path.rglob("*.py")) if path.is_dir() else (path,)
