"""What a function does has one digest in every process; what changes it, changes that."""

import functools
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from isobit.rewards.digest import digest_of

SCRIPT = '''
import functools, json, re, threading
WORDS = {"b", "a", "c"}
PATTERN = re.compile("[0-9]+")
LOCK = threading.Lock()
class Judge:
    """A judge."""
    scale = 2.0
    @staticmethod
    def half(x): return x / 2
    @property
    def twice(self): return 2 * self.scale
    def __init__(self, words): self.words = words
    def __call__(self, prompt, completion): return self.half(helper(completion.text))
def helper(text):
    return float(text in WORDS or text in {"x", "y", "z"}) + len(PATTERN.findall(text))
@functools.cache
def kept(text): return helper(text)
def closing(factor):
    def score(prompt, completion):
        with LOCK:
            return factor * kept(json.dumps(completion.text))
    return score
score = closing(3)
'''
ALL = ("score", "helper", "kept", "closing", "Judge(WORDS)", "lambda p, c: Judge.half(1)")


def digests(script: str, *names: str) -> list[str]:
    """In this process, of what a script that is read here defines."""
    space: dict[str, Any] = {"__name__": "__main__"}
    exec(script, space)  # as `python script.py` would
    return [digest_of(eval(name, space)) for name in names]


def test_another_process_with_another_seed_of_hashes_has_the_same_digests(tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    lines = "from isobit.rewards.digest import digest_of\n" + "".join(
        f"print(digest_of({name}))\n" for name in ALL
    )
    path.write_text("# a comment\n\n" + SCRIPT + lines)
    found = subprocess.run(
        [sys.executable, path], capture_output=True, text=True, check=True, env={**ENV}
    ).stdout.split()
    assert found == digests(SCRIPT, *ALL), "and comments and places in a file do not count"
    assert len(set(found)) == len(ALL)


ENV = {"PYTHONHASHSEED": "123", "PYTHONPATH": str(Path(__file__).parents[2] / "src")}


EVERY, CLASS = set(ALL), {"Judge(WORDS)", "lambda p, c: Judge.half(1)"}


@pytest.mark.parametrize(
    ("old", "new", "changed"),
    [
        ('"b", "a"', '"b", "d"', EVERY),
        ('{"x", "y"', '{"x", "v"', EVERY),
        ("[0-9]+", "[0-8]+", EVERY),
        ("float(text", "bool(text", EVERY),
        ("closing(3)", "closing(4)", {"score"}),
        ("x / 2", "x / 3", CLASS),
        ("2 * self", "3 * self", CLASS),
        ("scale = 2.0", "scale = 1.0", CLASS),
        ('"""A judge."""', '"""A jury."""', set()),
        ("def helper(text):", "def helper(text):  # why", set()),
    ],
)
def test_what_a_function_reads_changes_its_digest(old: str, new: str, changed: set[str]) -> None:
    assert old in SCRIPT
    before, after = digests(SCRIPT, *ALL), digests(SCRIPT.replace(old, new), *ALL)
    names = zip(ALL, before, after, strict=True)
    assert {name for name, one, other in names if one != other} == changed


def scaled(factor: float, text: str, pattern: re.Pattern[str] = re.compile("a")) -> float:
    return factor * len(pattern.findall(text))


@pytest.mark.parametrize(
    "make",
    [
        lambda value: functools.partial(scaled, value),
        lambda value: lambda text, factor=value: factor,
        lambda value: lambda text: value,
        lambda value: lambda text, *, factor=value: factor,
    ],
)
def test_defaults_closures_and_given_arguments_count(make: Callable[[Any], Any]) -> None:
    assert digest_of(make(2)) == digest_of(make(2))
    assert len({digest_of(make(value)) for value in (2, 3, 2.0, "2", [2], (2,), {2: 2}, {2})}) == 8
