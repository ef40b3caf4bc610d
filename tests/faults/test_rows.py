"""The table of the fault campaign holds what it says: fifty rows, and every test that it names."""

import ast
from functools import cache
from pathlib import Path

import pytest

from tests.faults.rows import ROWS

TESTS = Path(__file__).parents[1]


@cache
def functions(file: str) -> set[str]:
    """The tests of a file."""
    tree = ast.parse((TESTS / file).read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_there_are_fifty() -> None:
    assert list(ROWS) == list(range(1, 51))


@pytest.mark.parametrize("number", ROWS)
def test_a_row_is_shown_or_absent(number: int) -> None:
    row = ROWS[number]
    assert bool(row.tests) != bool(row.absent), "tests, or why there are none"
    assert bool(row.outcome) == bool(row.tests)
    for test in row.tests:
        file, _, name = test.partition("::")
        assert name.startswith("test_") and name in functions(file), test
