"""Subjects and words, read from the text of the tree: one subject a module, one meaning a name.

- **Unconnected parts**: a module's top-level definitions are a graph, with an edge where one names
  another. A part is what edges connect, of at least ``PART`` lines. A module with two parts has two
  subjects, unless it stands in ``exceptions.toml`` with the reason why it is one.
- **Repeated class names**: a class name that several files define stands for two things, unless it
  stands in ``exceptions.toml``, as a pair of back ends does.
- **Fragments**: docstrings, of attributes too, that begin with a preposition or a relative word.
- **Commands** are the keys of ``COMMANDS`` in ``cli/main.py``; each has ``run_NAME`` in
  ``cli/NAME.py``.
"""

import ast
import re
import tomllib
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tools.structure.source import Source

PART = 25
"""Lines of a part that counts."""
BEGINNINGS = re.compile(
    r"(of|in|on|at|by|for|from|with|without|to|into|onto|over|under|behind|before|after|between"
    r"|beyond|beside|against|as|through|until|within|where|which|that|whose|who|when|than)(?=[\s,.]|$)",
    re.IGNORECASE,
)
"""First words of a docstring that is no sentence."""
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True, slots=True)
class Exceptions:
    """What is as it should be, by name with its reason."""

    parts: Mapping[str, str]
    words: Mapping[str, str]

    @classmethod
    def read(cls, text: str) -> "Exceptions":
        """The tables of ``exceptions.toml``."""
        tables = tomllib.loads(text)
        return cls(tables["parts"], tables["words"])

    def stale(self, sources: list[Source]) -> list[str]:
        """The names that are no exceptions any more."""
        pairs = (
            (self.parts, unconnected_modules(sources)),
            (self.words, repeated_classes(sources)),
        )
        return [name for names, counted in pairs for name in names if name not in counted]


def without(text: str, names: list[str]) -> str:
    """``exceptions.toml`` without the lines of these names."""
    for name in names:
        text = re.sub(rf'(?m)^"?{re.escape(name)}"? = .*\n', "", text)
    return text


def unconnected_modules(sources: list[Source]) -> dict[str, str]:
    """Path of each module with several parts -> the lines and first names of its parts."""
    modules: dict[str, str] = {}
    for source in sources:
        parts = _parts(source.tree)
        if len(parts) > 1:
            modules[source.path] = " | ".join(
                f"{lines}: {', '.join(names[:3])}" for lines, names in parts
            )
    return modules


def _parts(tree: ast.Module) -> list[tuple[int, list[str]]]:
    """Lines and names of the parts of a module that count, the largest first."""
    definitions = dict(_definitions(tree))
    above = {name: name for name in definitions}

    def root(name: str) -> str:
        while above[name] != name:
            name = above[name]
        return name

    for name, node in definitions.items():
        for other in _named(node):
            if other in definitions:
                above[root(name)] = root(other)
    names_of: defaultdict[str, list[str]] = defaultdict(list)
    for name in definitions:
        names_of[root(name)].append(name)
    sized = [
        (sum(map(_lines, {definitions[name] for name in names})), names)
        for names in names_of.values()
    ]
    return sorted((part for part in sized if part[0] >= PART), key=lambda part: -part[0])


def _definitions(tree: ast.Module) -> Iterator[tuple[str, ast.stmt]]:
    for node in tree.body:
        if isinstance(node, (*_FUNCTIONS, ast.ClassDef)):
            yield node.name, node
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                if isinstance(target, ast.Name):
                    yield target.id, node


def _named(node: ast.stmt) -> Iterator[str]:
    """Names in a definition, those that stand in quotes too."""
    for inner in ast.walk(node):
        if isinstance(inner, ast.Name):
            yield inner.id
        elif isinstance(inner, ast.Constant) and isinstance(inner.value, str):
            yield inner.value


def _lines(node: ast.stmt) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def repeated_classes(sources: list[Source]) -> dict[str, str]:
    """Name of each class that several files define -> these files."""
    files: defaultdict[str, list[str]] = defaultdict(list)
    for source in sources:
        names = {node.name for node in ast.walk(source.tree) if isinstance(node, ast.ClassDef)}
        for name in sorted(names):
            files[name].append(source.path)
    return {name: ", ".join(paths) for name, paths in sorted(files.items()) if len(paths) > 1}


def fragments(sources: list[Source]) -> list[str]:
    """``path:line: docstring`` of each that begins with one of BEGINNINGS."""
    return [
        f"{source.path}:{line}: {' '.join(text.split())[:70]}"
        for source in sources
        for line, text in sorted(_docstrings(source.tree))
        if BEGINNINGS.match(text)
    ]


def _docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and text of the docstrings of functions, classes, attributes and constants."""
    for node in ast.walk(tree):
        if isinstance(node, (*_FUNCTIONS, ast.ClassDef)) and (text := ast.get_docstring(node)):
            yield node.lineno, text
        if isinstance(node, (ast.Module, ast.ClassDef)):
            for before, after in zip(node.body, node.body[1:], strict=False):
                text = after.value if isinstance(after, ast.Expr) else None
                is_named = isinstance(before, (ast.Assign, ast.AnnAssign))
                if is_named and isinstance(text, ast.Constant) and isinstance(text.value, str):
                    yield after.lineno, text.value


def commands_elsewhere(sources: list[Source]) -> list[str]:
    """The commands that have no file of their name."""
    files = {source.path: source.tree for source in sources}
    return [
        name
        for name in _commands(files.get("cli/main.py"))
        if not any(
            isinstance(node, _FUNCTIONS) and node.name == f"run_{name}"
            for node in getattr(files.get(f"cli/{name}.py"), "body", ())
        )
    ]


def _commands(main: Any) -> list[str]:
    for name, node in _definitions(main) if main is not None else ():
        table = getattr(node, "value", None)
        if name == "COMMANDS" and isinstance(table, ast.Dict):
            return [str(key.value) for key in table.keys if isinstance(key, ast.Constant)]
    return []
