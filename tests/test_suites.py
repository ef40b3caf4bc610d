"""What the quick suite leaves out, and that it leaves nothing else out."""

from itertools import combinations, product

import pytest

from tests.suites import covering, evenly_spaced

pytest_plugins = ["pytester"]
FILE = """
import pytest
from hypothesis import given, strategies

from tests.suites import examples

@pytest.mark.exhaustive
def test_whole(): pass

@pytest.mark.parametrize("value", [1, pytest.param(2, marks=pytest.mark.exhaustive)])
def test_one_value(value): pass

@pytest.mark.pairs
@pytest.mark.parametrize("a", range(3))
@pytest.mark.parametrize("b", range(3))
@pytest.mark.parametrize("c", range(3))
def test_grid(a, b, c): pass

@pytest.mark.few(2)
@pytest.mark.parametrize("a", range(9))
def test_many(a): pass

print("examples", examples(100), examples(20))

@given(strategies.integers())
def test_property(value): pass
"""


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("words", "passed", "examples"),
    [([], 1 + 10 + 2 + 1, "10 5"), (["--all"], 40, "100 20"), (["--rest"], 40 - 14 + 1, "100 20")],
)
def test_marks(pytester: pytest.Pytester, words: list[str], passed: int, examples: str) -> None:
    pytester.makepyfile(FILE)
    result = pytester.runpytest_inprocess("-s", "-p", "tests.suites", *words)
    result.assert_outcomes(passed=passed, deselected=40 - passed)
    result.stdout.fnmatch_lines([f"*examples {examples}*"])


DRAWING = """
from hypothesis import given, strategies

@given(strategies.integers(0, 10**9))
def test_property(value):
    print("drew", value)
"""


def test_a_seed_draws_other_examples_and_each_seed_its_own(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(DRAWING)

    def drawn(*words: str) -> list[str]:
        result = pytester.runpytest_inprocess("-s", "-p", "tests.suites", *words)
        result.assert_outcomes(passed=1)
        return [line for line in result.outlines if "drew" in line]

    usual, seven, eight = drawn(), drawn("--hypothesis-seed=7"), drawn("--hypothesis-seed=8")
    assert usual == drawn() and seven == drawn("--hypothesis-seed=7")
    assert usual != seven != eight != usual


@pytest.mark.parametrize(("seconds", "passed"), [("0", 0), ("600", 14)])
def test_no_test_begins_late(pytester: pytest.Pytester, seconds: str, passed: int) -> None:
    """And it is said how many have not begun."""
    pytester.makepyfile(FILE)
    result = pytester.runpytest_inprocess("-p", "tests.suites", "--seconds", seconds)
    result.assert_outcomes(passed=passed, skipped=14 - passed, deselected=26)
    said = [line for line in result.outlines if "14 tests were not run" in line]
    assert len(said) == (not passed)


@pytest.mark.parametrize("sizes", [(2, 3), (3, 3, 3), (4, 2, 5, 2)])
def test_pairs_are_covered_by_fewer_cases(sizes: tuple[int, ...]) -> None:
    cases = list(product(*map(range, sizes)))
    kept = [cases[index] for index in covering(cases)]

    def pairs(some: list[tuple[int, ...]]) -> set[object]:
        return {pair for case in some for pair in combinations(enumerate(case), 2)}

    assert pairs(kept) == pairs(cases)
    assert len(kept) < len(cases) or len(sizes) == 2


def test_one_parameter_keeps_all_its_values() -> None:
    assert covering([[0], [1], [2]]) == [0, 1, 2]


def test_evenly_spaced_has_the_first_and_the_last() -> None:
    assert evenly_spaced(9, 3) == [0, 4, 8]
    assert evenly_spaced(9, 1) == [0]
    assert evenly_spaced(3, 5) == [0, 1, 2]
