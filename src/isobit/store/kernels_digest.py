"""The digest of Isobit's kernels and formats: SHA-256 of their syntax, without comments, docstrings
and names of files.
"""

import ast
import hashlib
import os
import secrets
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import isobit
from isobit.util.plain_files import read_plain

_COMPUTE = ("kernels", "precision")  # folders of the package
_LONGEST_ENTRY = 256  # bytes


@cache
def kernels_sha256() -> str:
    """SHA-256 of the definitions that decide what an operation computes.  Parsing them takes a
    fifth of the time of all imports, so the digest of the same bytes is kept in the user's cache.
    """
    sources = _sources()
    key = _key(sources)
    digest = _kept(key)
    if digest is None:
        digest = definitions_sha256({name: source.decode() for name, source in sources.items()})
        _keep(key, digest)
    return digest


def _sources() -> dict[str, bytes]:
    """The bytes of each module of the kernels and formats, by its dotted name."""
    package = Path(__file__).parents[1]
    return {
        ".".join(path.relative_to(package.parent).with_suffix("").parts): path.read_bytes()
        for folder in _COMPUTE
        for path in (package / folder).rglob("*.py")
    }


def _key(sources: Mapping[str, bytes]) -> str:
    """SHA-256 of all that the digest depends on: names, bytes, this file, the version of Python."""
    own = {"": Path(__file__).read_bytes(), sys.version: b""}
    whole = hashlib.sha256()
    for name, source in sorted((own | dict(sources)).items()):
        whole.update(f"{name}\0{len(source)}\0".encode() + source)
    return whole.hexdigest()


def _entry(key: str) -> Path | None:
    """The file of a digest in the user's cache; None where the user has no home."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", ""))
    try:
        folder = cache if cache.is_absolute() else Path.home() / ".cache"
    except RuntimeError:
        return None
    return folder / "isobit" / "kernels" / key


def _line(key: str, digest: str) -> bytes:
    """The content of an entry: the digest, and a checksum that damage does not survive."""
    return f"{digest} {hashlib.sha256(f'{key} {digest}'.encode()).hexdigest()}\n".encode()


def _kept(key: str) -> str | None:
    """The digest that an earlier process has kept; None where there is none, or a damaged one."""
    entry = _entry(key)
    if entry is None:
        return None
    try:
        line = read_plain(entry, _LONGEST_ENTRY)
    except OSError:
        return None
    digest = line[:64].decode("ascii", "replace")
    return digest if line == _line(key, digest) else None


def _keep(key: str, digest: str) -> None:
    """Keep a digest for later processes, where the cache can be written: as a whole, by renaming,
    since others may do the same at once.
    """
    entry = _entry(key)
    if entry is None:
        return
    with suppress(OSError):
        entry.parent.mkdir(parents=True, exist_ok=True)
        partial = entry.with_name(f".{secrets.token_hex(8)}")
        try:
            partial.write_bytes(_line(key, digest))
            partial.replace(entry)
        finally:
            partial.unlink(missing_ok=True)


def definitions_sha256(sources: Mapping[str, str]) -> str:
    """SHA-256 of what modules, given by dotted names, define and execute.

    A global name counts as the definition that it refers to: ``linear.dgrad`` and ``dgrad`` are
    equal under the right imports.  Definitions of one name in several modules are distinguished by
    their syntax, and by their module where that is equal too.
    """
    trees = {module: ast.parse(source) for module, source in sources.items()}
    labels = _labels(trees)
    statements: list[str] = []
    for module, tree in trees.items():
        syntax = _Syntax(module, tree, labels)
        statements += (
            labels[module].get(getattr(statement, "name", ""), "") + syntax.text(statement)
            for statement in tree.body
            if not isinstance(statement, ast.Import | ast.ImportFrom)
            and not _says_nothing(statement)
        )
    return hashlib.sha256("\n".join(sorted(statements)).encode()).hexdigest()


_Labels = dict[str, dict[str, str]]  # by module and name: the text that stands for a definition


def _labels(trees: Mapping[str, ast.Module]) -> _Labels:
    plain = _Syntax("", ast.Module([], []), {})
    labels: _Labels = {module: {} for module in trees}
    for module, tree in trees.items():
        for statement in tree.body:
            for name in _bound(statement):
                labels[module][name] = labels[module].get(name, "") + plain.text(statement)
    modules = Counter(name for names in labels.values() for name in names)
    copies = Counter(definition for names in labels.values() for definition in names.items())
    for module, names in labels.items():
        for name, text in names.items():
            which = hashlib.sha256(text.encode()).hexdigest() if modules[name] > 1 else ""
            names[name] = f"@{name}:{which}" + (module if copies[name, text] > 1 else "")
    return labels


def _bound(statement: ast.stmt) -> Iterator[str]:
    """Names that a statement defines or assigns."""
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield statement.name
    elif isinstance(statement, ast.Assign | ast.AnnAssign):
        for node in ast.walk(statement):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                yield node.id


class _Syntax:
    """The syntax of a module as text that is the same in every version of Python."""

    _UNREAD = frozenset({"ctx", "kind", "type_comment"})

    def __init__(self, module: str, tree: ast.Module, labels: _Labels) -> None:
        self._labels = labels
        self._names = dict(labels.get(module, {}))
        self._modules: dict[str, str] = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                self._names |= {
                    alias.asname: f"@{alias.name}" for alias in node.names if alias.asname
                }
            elif isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    self._add_import(str(node.module), alias.name, alias.asname or alias.name)

    def _add_import(self, module: str, name: str, local: str) -> None:
        full = f"{module}.{name}"
        if full in self._labels:
            self._modules[local] = full
        else:
            outside = f"@{name if _is_ours(module) else full}"
            self._names[local] = self._labels.get(module, {}).get(name, outside)

    def text(self, node: Any) -> str:
        """The text of a node, a list of nodes or a constant."""
        if isinstance(node, list):
            return f"[{','.join(self.text(part) for part in node if not _says_nothing(part))}]"
        if isinstance(node, ast.Name) and node.id in self._names:
            return self._names[node.id]
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            module = self._modules.get(node.value.id, "")
            if node.attr in self._labels.get(module, {}):
                return self._labels[module][node.attr]
        if not isinstance(node, ast.AST):
            return repr(node)
        fields = ",".join(
            f"{name}={self.text(value)}"
            for name, value in ast.iter_fields(node)
            if name not in self._UNREAD and value is not None and value != []
        )
        return f"{type(node).__name__}({fields})"


def _says_nothing(node: ast.AST) -> bool:
    """Whether it is a docstring or an import from this package."""
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    return isinstance(node, ast.ImportFrom) and _is_ours(str(node.module))


def _is_ours(module: str) -> bool:
    return module.split(".", maxsplit=1)[0] == isobit.__name__
