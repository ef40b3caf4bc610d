"""Tests against code in another process; here in another thread, over the same wire."""

import ast
import json
import os
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Thread
from typing import Any

import pytest

from isobit.rewards.sandboxed import main as candidate
from isobit.rewards.sandboxed.judge import free_names, judge
from isobit.rewards.sandboxed.wire import Channel

Answering = Callable[[Channel], None]


@contextmanager
def other_side(answer: Answering) -> Iterator[Channel]:
    request_out, request_in = os.pipe()
    reply_out, reply_in = os.pipe()

    def run() -> None:
        try:
            answer(Channel(request_out, reply_in))
        finally:
            os.close(reply_in)

    thread = Thread(target=run, daemon=True)
    thread.start()
    yield Channel(reply_out, request_in)
    os.close(request_in)
    thread.join()
    os.close(request_out)
    os.close(reply_out)


def verdict(code: str, tests: str, entry_point: str | None = None) -> str:
    with other_side(lambda channel: candidate.serve(channel, code)) as channel:
        return judge(channel, tests, entry_point)["verdict"]


def verdict_of_replies(tests: str, *replies: Any) -> str:
    def answer(channel: Channel) -> None:
        for reply in replies:
            channel.receive()
            channel.send(reply)

    with other_side(answer) as channel:
        return judge(channel, tests, None)["verdict"]


@pytest.mark.parametrize(
    ("tests", "free"),
    [
        ("assert f(g(2)) == h", {"f", "g", "h"}),
        ("import math\nfrom os import path as p\nassert math.sqrt(f(1)) == p", {"f"}),
        (
            "def check(candidate):\n    x = candidate(1)\n    assert x == [y for y in range(3)]",
            set(),
        ),
        ("class A: pass\ntry:\n    A(f)\nexcept ValueError as e:\n    print(e)", {"f"}),
        ("f = lambda a, *b, c=1, **d: (a, b, c, d)\nf(*q)", {"q"}),
        ("abs = abs\nassert abs(sorted(f)) == len", {"f"}),
    ],
)
def test_free_names(tests: str, free: set[str]) -> None:
    assert free_names(ast.parse(tests)) == free


@pytest.mark.parametrize(
    ("code", "tests"),
    [
        ("def f(x): return x * x", "assert f(2) == 4\nassert f(x=3) == 9"),
        ("def f(x): return x * x", "def test_two():\n    assert f(2) == 4"),
        ("def f(x): return [x, (x, {x: None})]", "assert f('a') == ['a', ('a', {'a': None})]"),
        ("def f(n): yield from range(n)", "assert list(f(3)) == [0, 1, 2]\nassert next(f(1)) == 0"),
        ("f = range", "assert len(f(4)) == 4 and f(4)[2] == 2 and 3 in f(4)"),
        (
            "def f(x):\n    if x < 0: raise ValueError('negative')\n    return x",
            "assert f(1) == 1\ntry:\n    f(-1)\n    assert False\n"
            "except ValueError as error:\n    assert str(error) == 'negative'",
        ),
        (
            "class Stack:\n    size = 0\n"
            "    def push(self, x):\n        self.size += 1\n        return self",
            "assert Stack().push(1).push(2).size == 2",
        ),
        (
            "class Node:\n    def __init__(self, next=None): self.next = next\n"
            "def length(node): return 1 + length(node.next) if node else 0",
            "assert length(Node(Node(Node()))) == 3",
        ),
    ],
)
def test_right_code_passes(code: str, tests: str) -> None:
    assert verdict(code, tests) == "passed"


CHECK = (
    "def check(candidate):\n    assert candidate(2) == 4\n    assert abs(candidate(3) - 9) < 1e-9"
)


def test_check_is_called_with_the_entry_point() -> None:
    assert verdict("def square(x): return x * x", CHECK, "square") == "passed"
    assert verdict("def square(x): return x + x", CHECK, "square") == "failed"
    assert verdict("def square(x): return x * x", CHECK + "\ncheck(square)", "square") == "passed"
    assert verdict("def other(x): return x * x", CHECK, "square") == "failed"
    assert verdict("def square(x): return x * x", CHECK) == "unusable"


def test_with_an_entry_point_a_helper_is_not_the_answers() -> None:
    """Code that defines the tests' own helper would otherwise grade itself."""
    code = "def near(a, b): return True\ndef f(x): return 0"
    assert verdict(code, "assert near(f(1), 5)") == "passed"
    assert verdict(code, "assert near(f(1), 5)", "f") == "failed"


EQUAL = "    def __eq__(self, other): return True\n"
ALWAYS = f"class Any:\n{EQUAL}    def __ne__(self, other): return False\n"


@pytest.mark.parametrize(
    "code",
    [
        "def f(x): return 5",
        "def f(x): 1 / 0",
        "def f(x)",
        "def g(x): return x * x",
        "import sys\nsys.exit(0)",
        "def f(x): raise SystemExit(0)",
        "def f(x): raise AssertionError",
        "def f(x): raise KeyboardInterrupt",
        "def f(x): raise StopIteration(4)",
        ALWAYS + "def f(x): return Any()",
        ALWAYS + "f = Any()\nAny.__call__ = lambda self, x: self",
        f"class Yes(int):\n    __hash__ = None\n{EQUAL}def f(x): return Yes(3)",
        f"class Yes(list):\n{EQUAL}def f(x): return Yes()",
        "f = lambda x: (lambda y: True)",
        "import importlib\nf = 4",
    ],
)
def test_faked_passes_fail(code: str) -> None:
    assert verdict(code, "assert f(2) == 4") == "failed"
    assert verdict(code, "assert [f(2)] == [4] and f(2) in (4, 8)") == "failed"


def test_an_object_has_no_truth() -> None:
    assert verdict("def f(x): return object()", "assert f(2)") == "failed"


def test_a_builtin_is_never_the_answers() -> None:
    code = "def abs(x): return 0\ndef all(x): return True\ndef f(x): return 7"
    assert verdict(code, "assert all([abs(f(1) - 3) < 1])") == "failed"


@pytest.mark.parametrize(
    "replies",
    [
        [],
        [["value"]],
        [["passed"]],
        [{"verdict": "passed", "message": ""}],
        [["value", ["?"]]],
        [["raised", 1, 2]],
        [["raised", "CandidateDiedError", ""]],
        [["raised", "UnusableError", ""]],
        [["raised", "SystemExit", ""]],
        [["raised", "GeneratorExit", ""]],
        [["raised", "ImportError", ""]],
        [["raised", "SyntaxError", ""]],
        [["raised", "UnicodeDecodeError", ""]],
        [["raised", "BaseException", ""]],
    ],
)
def test_forged_replies_neither_pass_nor_exclude(replies: list[Any]) -> None:
    assert verdict_of_replies("assert f(2) == 4", *replies) in ("failed", "died")


def test_replies_ahead_of_time_are_only_values() -> None:
    def flood(channel: Channel) -> None:
        for _ in range(10):
            channel.send(["value", 4])
        channel.send({"verdict": "passed"})

    with other_side(flood) as channel:
        tests = "assert f(2) == 4\nassert f(3) == 9"
        assert judge(channel, tests, None)["verdict"] == "failed"


def test_a_deep_value_is_the_answers_fault() -> None:
    """Else a wrong answer could choose to be excluded."""
    deep: Any = 1
    for _ in range(150):
        deep = ["l", deep]
    assert verdict_of_replies("assert f(f(2)) == 4", ["value", deep]) == "died"


def test_a_long_message_ends_the_conversation() -> None:
    def answer(channel: Channel) -> None:
        channel.receive()
        os.write(channel.outgoing, struct.pack(">I", 1 << 31))

    with other_side(answer) as channel:
        assert judge(channel, "assert f(2) == 4", None)["verdict"] == "died"


def test_memory_is_told_apart() -> None:
    assert verdict("def f(x): raise MemoryError", "assert f(2) == 4") == "memory"


@pytest.mark.parametrize(
    "tests",
    [
        "assert f(2 == 4",
        "import no_such_module\nassert f(2) == 4",
        "assert True",
        "x = 1",
        "assert f(lambda x: x) == 4",
        "f(2)\nraise SystemExit",
    ],
)
def test_tests_that_no_code_can_pass_are_unusable(tests: str) -> None:
    assert verdict("def f(x): return 4", tests) == "unusable"


def test_tests_that_exit_with_an_error_fail() -> None:
    tests = "import sys\nsys.exit(0 if f(2) == 4 else 1)"
    assert verdict("def f(x): return 5", tests) == "failed"


def test_a_verdict_is_json() -> None:
    def answer(channel: Channel) -> None:
        channel.receive()
        channel.send(["raised", "Own", "\ud800"])

    with other_side(answer) as channel:
        assert json.dumps(judge(channel, "f(1)", None)).isascii()
