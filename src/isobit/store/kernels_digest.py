"""The digest of Isobit's kernels and formats: SHA-256 of their syntax, without comments, docstrings
and names of files.
"""

import ast
import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import isobit

_COMPUTE = ("kernels", "precision")  # folders of the package


@cache
def kernels_sha256() -> str:
    """Of the source that decides what an operation computes."""
    package = Path(__file__).parents[1]
    return definitions_sha256(
        {
            ".".join(path.relative_to(package.parent).with_suffix("").parts): path.read_text()
            for folder in _COMPUTE
            for path in (package / folder).rglob("*.py")
        }
    )


def definitions_sha256(sources: Mapping[str, str]) -> str:
    """Of what modules, given by dotted names, define and execute.

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
    found: _Labels = {module: {} for module in trees}
    for module, tree in trees.items():
        for statement in tree.body:
            for name in _bound(statement):
                found[module][name] = found[module].get(name, "") + plain.text(statement)
    modules = Counter(name for names in found.values() for name in names)
    copies = Counter(one for names in found.values() for one in names.items())
    for module, names in found.items():
        for name, text in names.items():
            which = hashlib.sha256(text.encode()).hexdigest() if modules[name] > 1 else ""
            names[name] = f"@{name}:{which}" + (module if copies[name, text] > 1 else "")
    return found


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
                self._names |= {one.asname: f"@{one.name}" for one in node.names if one.asname}
            elif isinstance(node, ast.ImportFrom):
                for one in node.names:
                    self._add_import(str(node.module), one.name, one.asname or one.name)

    def _add_import(self, module: str, name: str, local: str) -> None:
        full = f"{module}.{name}"
        if full in self._labels:
            self._modules[local] = full
        else:
            outside = f"@{name if _is_ours(module) else full}"
            self._names[local] = self._labels.get(module, {}).get(name, outside)

    def text(self, node: Any) -> str:
        """Of a node, a list of nodes or a constant."""
        if isinstance(node, list):
            return f"[{','.join(self.text(one) for one in node if not _says_nothing(one))}]"
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
