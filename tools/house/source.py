"""What the text of a tree says about its house, without running it.

- **Device**: files outside kernels/ whose code names a device.  Names, attributes, modules and
  strings without spaces count, where they hold cuda, gpu, hopper or triton as a word or a part of
  one (``is_cuda``, ``DeviceTurns``).  What is for people is counted apart: docstrings, comments and
  sentences.  Of these files, some know a device's own code: they name hopper or triton, or ask
  ``is_cuda``.
- **Climbs**: functions outside config/ with a parameter annotated as a whole configuration,
  RunConfig or SftConfig, rather than a section of it.
- **Upward imports**: imports of a room by one that stands below it in ``LAYERS``, those for types
  alone included.  A file of the package's root is its own room; ``isobit`` itself is none.
- **Types**: functions whose parameters (but self and cls) and result are all annotated.
- **Docstrings**: public modules, classes, functions and methods that have one.  Methods with two
  underscores on both sides, and what is defined within a function, do not count.
"""

import ast
import re
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

LAYERS = (
    ("cli", "api"),
    ("run",),
    ("proof", "observe", "rollout", "environments"),
    ("store",),
    ("memory",),
    ("training",),
    ("models", "rewards"),
    ("kernels", "algorithms"),
    ("precision", "data", "starter"),
    ("config", "records"),
    ("errors", "files", "clock", "units"),
)
"""Rooms from the top down; those of one layer may import each other."""
APART = {("rollout", "training"), ("training", "rollout")}
"""Pairs that may not, whatever their layers."""
DEVICE = re.compile(r"cuda|gpu|hopper|triton", re.IGNORECASE)
OWN_CODE = re.compile(r"hopper|triton|is_cuda", re.IGNORECASE)
WHOLE_CONFIGURATION = re.compile(r"\b(RunConfig|SftConfig)\b")

Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef
Documented: TypeAlias = ast.Module | ast.ClassDef | Function


@dataclass(frozen=True, slots=True)
class Source:
    """One file of a tree: its path in the tree, its room, its lines and its syntax."""

    path: str
    room: str
    lines: list[str]
    tree: ast.Module

    def functions(self) -> Iterator[Function]:
        """All of them, nested ones too."""
        for node in ast.walk(self.tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                yield node


@dataclass(frozen=True, slots=True)
class Share:
    """So many of so many; ``missing`` names the others."""

    there: int
    of: int
    missing: list[str]


def read_tree(tree: Path) -> list[Source]:
    """Every Python file of the package at ``tree``."""
    sources = []
    for path in sorted(tree.rglob("*.py")):
        relative = path.relative_to(tree)
        room = relative.parts[0].removesuffix(".py")
        text = path.read_text(encoding="utf-8")
        sources.append(Source(str(relative), room, text.splitlines(), ast.parse(text)))
    return sources


def device_files(sources: list[Source]) -> tuple[dict[str, list[str]], dict[str, int]]:
    """Files outside kernels/ that name a device: in code, with the words; and to people, with how
    often.
    """
    code: dict[str, list[str]] = {}
    prose: dict[str, int] = {}
    for source in sources:
        if source.room == "kernels":
            continue
        words, sentences = _words(source)
        found = {word for word in words if DEVICE.search(word)}
        said = sum(len(DEVICE.findall(sentence)) for sentence in sentences)
        if found:
            code[source.path] = sorted(found)
        if said:
            prose[source.path] = said
    return code, prose


def climbs(sources: list[Source]) -> dict[str, list[str]]:
    """Functions that take a whole configuration, by room."""
    found: dict[str, list[str]] = {}
    for source in sources:
        if source.room == "config":
            continue
        for function in source.functions():
            annotations = [ast.unparse(p.annotation) for p in _parameters(function) if p.annotation]
            if any(WHOLE_CONFIGURATION.search(annotation) for annotation in annotations):
                found.setdefault(source.room, []).append(f"{source.path}: {function.name}")
    return found


def upward_imports(sources: list[Source]) -> list[str]:
    """``file -> module`` for each import that goes up, or across a pair that is kept apart."""
    rank = {room: number for number, layer in enumerate(LAYERS) for room in layer}
    found = []
    for source in sources:
        for module in _imported(source.tree):
            parts = module.split(".")
            if parts[0] != "isobit" or len(parts) < 2 or source.room == "__init__":
                continue
            pair = source.room, parts[1]
            if not set(pair) <= rank.keys():
                continue
            if rank[pair[1]] < rank[pair[0]] or pair in APART:
                found.append(f"{source.path} -> {module}")
    return sorted(set(found))


def largest(sources: list[Source]) -> tuple[tuple[str, int], tuple[str, int]]:
    """The longest file and the longest function, each with its lines."""
    functions = [
        (f"{source.path}: {one.name}", (one.end_lineno or one.lineno) - one.lineno + 1)
        for source in sources
        for one in source.functions()
    ]
    files = [(source.path, len(source.lines)) for source in sources]
    return max(files, key=lambda one: one[1]), max(functions, key=lambda one: one[1])


def typed(sources: list[Source]) -> Share:
    """Functions that are fully annotated; Triton's kernels take pointers, and have no types."""
    missing, total = [], 0
    for source in sources:
        for function in source.functions():
            if any("jit" in ast.unparse(one) for one in function.decorator_list):
                continue
            total += 1
            named = [p for p in _parameters(function) if p.arg not in ("self", "cls")]
            if function.returns is None or any(p.annotation is None for p in named):
                missing.append(f"{source.path}: {function.name}")
    return Share(total - len(missing), total, missing)


def documented(sources: list[Source]) -> Share:
    """Public names that have a docstring."""
    missing, total = [], 0
    for source in sources:
        for name, node in _public(source.tree):
            total += 1
            if ast.get_docstring(node) is None:
                missing.append(f"{source.path}: {name}")
    return Share(total - len(missing), total, missing)


def _public(node: Documented, prefix: str = "") -> Iterator[tuple[str, Documented]]:
    yield prefix.rstrip(".") or "(module)", node
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return
    for child in node.body:
        if isinstance(
            child, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        ) and not child.name.startswith("_"):
            yield from _public(child, f"{prefix}{child.name}.")


def _parameters(function: Function) -> list[ast.arg]:
    given = function.args
    more = [one for one in (given.vararg, given.kwarg) if one is not None]
    return [*given.posonlyargs, *given.args, *given.kwonlyargs, *more]


def _words(source: Source) -> tuple[list[str], list[str]]:
    """Names and strings of the code, and what is for people: comments, docstrings (strings that
    stand alone, behind a field too) and strings with spaces.
    """
    alone = {
        id(node.value)
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    words: list[str] = []
    sentences = list(_comments(source))
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            is_said = id(node) in alone or " " in node.value.strip()
            (sentences if is_said else words).append(node.value.strip())
        for field in ("id", "attr", "name", "arg", "module"):
            value = getattr(node, field, None)
            if isinstance(value, str):
                words.append(value)
    return words, sentences


def _comments(source: Source) -> Iterator[str]:
    lines = iter([f"{line}\n" for line in source.lines])
    for token in tokenize.generate_tokens(lambda: next(lines, "")):
        if token.type == tokenize.COMMENT:
            yield token.string


def _imported(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (one.name for one in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            if node.module == "isobit":
                yield from (f"isobit.{one.name}" for one in node.names)
            else:
                yield node.module
