"""Figures that are read from the text of the tree and of the pages, without running anything.

- **Modules** are the Python files of the package without ``__init__.py`` and ``__main__.py``.
- **Sizes** of modules and functions are lines as they stand in the file.  Modules of ``kernels/``
  may be of any size, and functions there too, since a Triton kernel cannot be cut.
- **Prose** is what people read: the pages of the repository, without tables, code, HTML comments
  and lines that are too long only because of one unbreakable word (a link), and docstrings.
"""

import ast
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median

COLUMNS = 100
SMALL, LARGE, LONG = 40, 600, 60
"""Lines: a module below SMALL or above LARGE, and a function above LONG, is reported."""
MARGIN = 20
"""Lines below LARGE in which a module is said to be full."""
LABEL = 20
"""Characters beside a word that cannot be broken."""
PAGES = ("*.md", "docs/*.md", "recipes/*.md", "src/isobit/starter/*.md")


@dataclass(frozen=True, slots=True)
class Source:
    """One file of a tree: its path in the tree, its lines and its syntax."""

    path: str
    lines: list[str]
    tree: ast.Module

    @property
    def package(self) -> str:
        return self.path.split("/")[0].removesuffix(".py")

    @property
    def is_module(self) -> bool:
        return not self.path.endswith(("__init__.py", "__main__.py"))


def read_tree(tree: Path) -> list[Source]:
    """Every Python file of the package at ``tree``."""
    found = []
    for path in sorted(tree.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        name = path.relative_to(tree).as_posix()
        found.append(Source(name, text.splitlines(), ast.parse(text)))
    return found


def median_module(sources: list[Source]) -> int:
    return int(median(len(one.lines) for one in sources if one.is_module))


def modules_sized(sources: list[Source], asked: Callable[[int], bool]) -> list[str]:
    """``path (lines)`` of each module outside kernels/ whose size is one of those asked for."""
    return [
        f"{one.path} ({len(one.lines)})"
        for one in _outside_kernels(sources)
        if asked(len(one.lines))
    ]


def long_functions(sources: list[Source]) -> list[str]:
    """``path: function (lines)`` of each that does not fit on a screen."""
    found = []
    for source in _outside_kernels(sources):
        for node in ast.walk(source.tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if lines > LONG:
                    found.append(f"{source.path}: {node.name} ({lines})")
    return found


def packages(sources: list[Source]) -> dict[str, tuple[int, int]]:
    """Package -> its modules and their lines, those of ``__init__.py`` included."""
    found: dict[str, tuple[int, int]] = {}
    for source in sources:
        if source.package not in ("__init__", "__main__"):
            modules, lines = found.get(source.package, (0, 0))
            found[source.package] = modules + source.is_module, lines + len(source.lines)
    return found


def wide_prose(root: Path, sources: list[Source]) -> list[str]:
    """``path:line`` of each line of prose above COLUMNS columns, in pages and docstrings."""
    pages = sorted(path for pattern in PAGES for path in root.glob(pattern))
    names = {path.relative_to(root).as_posix(): path for path in pages}
    found = [
        f"{name}:{number}"
        for name, path in names.items()
        for number in wide_lines(path.read_text(encoding="utf-8"))
    ]
    for source in sources:
        found += [f"{source.path}:{number}" for number in _wide_docstring_lines(source)]
    return found


def wide_lines(page: str) -> Iterator[int]:
    """The numbers of a page's lines of prose that are too long."""
    is_code = is_front_matter = False
    for number, line in enumerate(page.splitlines(), 1):
        if line == "---" and (number == 1 or is_front_matter):
            is_front_matter = not is_front_matter
        if re.match(r"\s*(```|~~~)", line):
            is_code = not is_code
        if is_code or is_front_matter or line.startswith(("|", "    ", "<!--")):
            continue
        if len(line) > COLUMNS and _could_be_broken(line):
            yield number


def _could_be_broken(line: str) -> bool:
    """Whether more than a marker or a label stands beside the longest word, a link for instance."""
    return len(line) - max(map(len, line.split())) > LABEL


def _wide_docstring_lines(source: Source) -> Iterator[int]:
    for node in ast.walk(source.tree):
        value = node.value if isinstance(node, ast.Expr) else None
        if isinstance(value, ast.Constant) and isinstance(value.value, str):
            for number in range(value.lineno, (value.end_lineno or value.lineno) + 1):
                if len(source.lines[number - 1]) > COLUMNS:
                    yield number


def _outside_kernels(sources: list[Source]) -> list[Source]:
    return [one for one in sources if one.is_module and one.package != "kernels"]


def filled(words: list[str], separator: str) -> str:
    """The words joined, in lines of at most COLUMNS columns."""
    lines = [words[0]] if words else [""]
    for word in words[1:]:
        if len(lines[-1] + separator + word + separator.rstrip()) > COLUMNS:
            lines[-1] += separator.rstrip()
            lines.append(word)
        else:
            lines[-1] += separator + word
    return "\n".join(lines)
