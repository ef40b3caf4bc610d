"""The environments that ship with Isobit, by the names that ``environment.class`` takes:

calculator   arithmetic
guess        a number to be found, with the answers "higher" and "lower"
python       programs, in the sandbox of the reward ``code``
search       a folder of documents with a full-text index, which all episodes share
"""

import ast
import operator
import re
import sqlite3
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

from isobit.environments.document_index import SUFFIXES, built_index
from isobit.rewards.sandbox import (
    OutputLimitError,
    Process,
    ProcessLimits,
    SandboxError,
    TimeLimitError,
    launcher,
)

_LONGEST = 200
"""Characters of an expression."""
_LARGEST = 10**50
_PROGRAM = """import sys, traceback
try:
    exec(compile({code!r}, "<program>", "exec"), {{"__name__": "__main__"}})
except Exception as error:
    own = error.with_traceback(error.__traceback__.tb_next)
    traceback.print_exception(own, file=sys.stdout)
    sys.exit(1)
"""
_MOST_OUTPUT = 1 << 20
"""Bytes that a program may write."""
_MOST_FOUND = 20
"""Documents of one search."""


class Calculator:
    """Arithmetic; nothing is kept between calls."""

    _BINARY: ClassVar[dict[type, Callable[[Any, Any], Any]]] = {
        ast.Add: operator.add,
        ast.Sub: operator.sub,
        ast.Mult: operator.mul,
        ast.Div: operator.truediv,
        ast.FloorDiv: operator.floordiv,
        ast.Mod: operator.mod,
    }

    def calculate(self, expression: str) -> str:
        """Work out an arithmetic expression.

        Args:
            expression: Numbers with +, -, *, /, //, % and brackets, such as "(3 + 4) * 12".

        Returns:
            The result, as a number.
        """
        if len(expression) > _LONGEST:
            raise ValueError(f"an expression has at most {_LONGEST} characters")
        try:
            tree = ast.parse(expression.strip(), mode="eval").body
        except SyntaxError as error:
            raise ValueError(f"{expression!r} is no arithmetic expression") from error
        value = self._value(tree)
        is_whole = isinstance(value, float) and value.is_integer() and abs(value) < 1e15
        return str(int(value) if is_whole else value)

    def multiply(self, a: int, b: int) -> int:
        """Multiply two whole numbers.

        Args:
            a: The first factor.
            b: The second factor.

        Returns:
            The product.
        """
        return self._bounded(int(a) * int(b))

    def _value(self, node: ast.AST) -> Any:
        match node:
            case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
                return self._bounded(value)
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -self._value(operand)
            case ast.BinOp(op=op, left=left, right=right) if type(op) in self._BINARY:
                return self._bounded(self._BINARY[type(op)](self._value(left), self._value(right)))
        raise ValueError(f"{ast.unparse(node):.40} is no number, +, -, *, /, // or %")

    @staticmethod
    def _bounded(value: Any) -> Any:
        if abs(value) > _LARGEST:
            raise ValueError("a number is larger than 10^50")
        return value


class Guess:
    """A number to be found, which the column ``secret`` of a row holds; the reward is 1 where a
    guess was right.
    """

    def reset(self, secret: int) -> None:
        self._secret, self._is_found = int(secret), False

    def guess(self, number: int) -> str:
        """Guess the number.

        Args:
            number: The guess.

        Returns:
            "right", or "higher" or "lower" where the number is.
        """
        if number == self._secret:
            self._is_found = True
            return "right"
        return "higher" if self._secret > number else "lower"

    def get_reward(self) -> float:
        return float(self._is_found)


class Python:
    """Programs in a sandbox without network and files; nothing is kept between calls.

    Args:
        seconds, memory_mib: limits of a program.
        unsandboxed: run them without a sandbox where none works, with your own rights.
    """

    def __init__(
        self, seconds: float = 5.0, memory_mib: int = 256, unsandboxed: bool = False
    ) -> None:
        self._limits = ProcessLimits(seconds, memory_mib << 20)
        self._launcher = launcher(unsandboxed)

    @classmethod
    def _prepare(cls, unsandboxed: bool = False, **_: Any) -> str:
        """Find the sandbox once, in the process from which those of the episodes are forked."""
        return launcher(unsandboxed).describe()

    def python(self, code: str) -> str:
        """Run a Python program.

        Args:
            code: The program; what it prints is the result.

        Returns:
            What it printed, with the traceback where it failed.
        """
        job = {"code": _PROGRAM.format(code=code)}
        process = Process("script", job, self._limits, self._launcher)
        try:
            output, exit_code = process.finish(_MOST_OUTPUT)
        except (TimeLimitError, OutputLimitError, SandboxError) as error:
            raise ValueError(str(error)) from error
        said = output.decode("utf-8", "replace")
        return said if said or not exit_code else f"exit code {exit_code}"


class Search:
    """Documents of a folder, found by their words (SQLite's FTS5, ranked by BM25).

    The index is made once for a folder with its present files, and read by all episodes.

    Args:
        folder: files below it with one of the ``suffixes`` are the documents, by their path in it.
        index: the folder for the index; by default ``isobit/search`` in the user's cache.
    """

    _place: ClassVar[Path]

    def __init__(self, **_: Any) -> None:
        place = self._place.absolute().as_uri()
        self._index = sqlite3.connect(f"{place}?mode=ro&immutable=1", uri=True)

    @classmethod
    def _prepare(
        cls, folder: str, suffixes: Sequence[str] = SUFFIXES, index: str | None = None
    ) -> None:
        cls._place = built_index(Path(folder).expanduser(), suffixes, index)

    def search(self, query: str, k: int = 3) -> list[dict[str, str]]:
        """Find documents.

        Args:
            query: Words to look for.
            k: How many documents to return at most.

        Returns:
            The best documents, best first: the name of each, and an excerpt.
        """
        words = re.findall(r"\w+", query)
        if not words:
            raise ValueError("the query has no words")
        found = self._index.execute(
            "SELECT document, snippet(documents, 1, '', '', '..', 24) FROM documents "
            "WHERE documents MATCH ? ORDER BY bm25(documents), document LIMIT ?",
            (" OR ".join(f'"{word}"' for word in words), max(1, min(int(k), _MOST_FOUND))),
        )
        return [{"document": name, "excerpt": text} for name, text in found]

    def read(self, document: str, start: int = 0) -> str:
        """Read a document.

        Args:
            document: Its name, as a search returns it.
            start: The character to begin at.

        Returns:
            Its text.
        """
        row = self._index.execute(
            "SELECT text FROM documents WHERE document = ?", (document,)
        ).fetchone()
        if row is None:
            raise ValueError(f"there is no document {document!r:.80}")
        return row[0][max(0, int(start)) :]
