"""Two suites from one set of tests: `make test`, which a person waits for, and `make test-all`.

    pytest                the quick suite: all parts, and a run of each kind
    pytest --all          everything: whole grids, kills at every phase, soaks
    pytest --rest         what the quick suite leaves out, alone (`make test-all` runs both)
    pytest --seconds N    begin no test after so many seconds, and say how many were left: for a
                          limit on a slow machine; each commit begins somewhere else, so that all
                          tests get their turn
    pytest --hypothesis-seed=7   properties draw other examples than the usual ones, of that seed

Three marks say what the quick suite leaves out, beside the test that they speak of:

- ``exhaustive`` on a test, or on one of its parameters: it runs with ``--all`` alone. Either a
  quicker test guards the same, which its reason names where a reader may doubt it, or it is a run
  in other circumstances than a quick one: killed, resumed, replayed, by several ranks or servers.
- ``pairs``: of a test with several ``parametrize`` marks the quick suite runs as few cases as hold
  every pair of values of two parameters together once.
- ``few(n)``: of all cases of a test, in whatever way they are made, n that are evenly spaced, the
  first and the last among them.

Hypothesis tries ``examples(100)`` where a test does not say how many.
"""

import subprocess
from collections.abc import Sequence
from itertools import combinations
from math import inf
from time import monotonic

import pytest
from hypothesis import HealthCheck, settings

LEAST = 5
"""Examples of a property in the quick suite, at least."""
LATE = "its seconds were over (--seconds)"
_state = {"all": False}
_UNTIL = pytest.StashKey[float]()


def examples(count: int) -> int:
    """Hypothesis' ``max_examples``: the count with ``--all``, and a tenth of it without."""
    return count if _state["all"] else max(LEAST, count // 10)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="whole grids, kills and soaks too")
    parser.addoption("--rest", action="store_true", help="whole grids, kills and soaks alone")
    parser.addoption("--seconds", type=float, help="after which no test begins")
    parser.addoption(
        "--back-end", choices=("hopper", "triton"), default="hopper", help="of tests/gpu"
    )


def pytest_configure(config: pytest.Config) -> None:
    if (seconds := config.getoption("--seconds")) is not None:
        config.stash[_UNTIL] = monotonic() + seconds
    _state["all"] = bool(config.getoption("--all") or config.getoption("--rest"))
    settings.register_profile(
        "isobit",
        deadline=None,
        database=None,
        derandomize=config.getoption("--hypothesis-seed", None) is None,
        max_examples=examples(100),
        suppress_health_check=[HealthCheck.too_slow],
    )
    settings.load_profile("isobit")


def pytest_runtest_setup(item: pytest.Item) -> None:
    if monotonic() > item.config.stash.get(_UNTIL, inf):
        pytest.skip(LATE)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    late = [one for one in terminalreporter.getreports("skipped") if LATE in str(one.longrepr)]
    if late:
        terminalreporter.write_line(f"{len(late)} tests were not run: {LATE}")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if _UNTIL in config.stash:
        first = _commit() % max(1, len(items))
        items[:] = items[first:] + items[:first]
    if config.getoption("--all"):
        return
    left_out, rest = set(left_out_of(items)), config.getoption("--rest")
    wanted: list[pytest.Item] = []
    unwanted: list[pytest.Item] = []
    for item in items:
        is_wanted = (item in left_out or _tries_examples(item)) if rest else item not in left_out
        (wanted if is_wanted else unwanted).append(item)
    config.hook.pytest_deselected(items=unwanted)
    items[:] = wanted


def _commit() -> int:
    """A number of the commit that is tested; 0 outside of a repository."""
    command = ["git", "rev-parse", "--short=8", "HEAD"]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    return int(found.stdout.strip() or "0", 16)


def _tries_examples(item: pytest.Item) -> bool:
    """Whether a property is tested, of which the quick suite tries few examples."""
    return hasattr(getattr(item, "obj", None), "hypothesis")


def left_out_of(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """The items that the quick suite does not run."""
    exhaustive = [item for item in items if item.get_closest_marker("exhaustive")]
    rest = [item for item in items if not item.get_closest_marker("exhaustive")]
    thinned: dict[str, list[pytest.Item]] = {}
    for item in rest:
        if item.get_closest_marker("pairs") or item.get_closest_marker("few"):
            thinned.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for cases in thinned.values():
        if few := cases[0].get_closest_marker("few"):
            kept = set(evenly_spaced(len(cases), few.args[0]))
        else:
            kept = set(covering([_values(case) for case in cases]))
        exhaustive += [case for index, case in enumerate(cases) if index not in kept]
    return exhaustive


def evenly_spaced(count: int, wanted: int) -> list[int]:
    """``wanted`` of the indices below ``count``, with the first, and with the last from two on."""
    if wanted >= count:
        return list(range(count))
    if wanted == 1:
        return [0]
    return [index * (count - 1) // (wanted - 1) for index in range(wanted)]


def covering(cases: Sequence[Sequence[object]]) -> list[int]:
    """The indices of cases that together hold each pair of values, of two parameters, that occurs
    in any case: greedily, the first of those that hold most pairs which are still missing. With
    fewer than two parameters, each value once.
    """
    held = [_pairs(case) for case in cases]
    missing = set[object]().union(*held)
    kept: list[int] = []
    while missing:
        best = max(range(len(cases)), key=lambda index: (len(held[index] & missing), -index))
        kept.append(best)
        missing -= held[best]
    return sorted(kept)


def _pairs(case: Sequence[object]) -> set[object]:
    return set(combinations(enumerate(case), 2)) or set(enumerate(case))


def _values(item: pytest.Item) -> list[object]:
    """What stands for each parameter's value: values need not be hashable, and the cases of a test
    share them.
    """
    call = getattr(item, "callspec", None)
    return [id(value) for value in call.params.values()] if call else []
