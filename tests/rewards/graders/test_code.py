"""Code that a model wrote: what is right passes, and what is hostile neither passes nor hangs."""

import base64
import inspect
import json
import os
import zlib
from collections.abc import Iterator
from typing import Any

import pytest

from isobit.config.reward import CODE_SECONDS
from isobit.records.sequence import TokenSequence
from isobit.records.text import Completion, Prompt
from isobit.rewards import counts, sandbox
from isobit.rewards.graders import code as grader
from isobit.rewards.graders.code import MOST_CODE, UnusableTestsError
from isobit.rewards.sandbox import SandboxError
from isobit.util.errors import RewardError

SQUARE = {"tests": "assert square(2) == 4\nassert square(-3) == 9"}
CHECK = {
    "tests": "def check(candidate):\n    assert candidate(2) == 4\n    assert candidate(-3) == 9\n",
    "entry_point": "square",
}
PRINTED = {"tests": {"inputs": ["2\n", "-3\n"], "outputs": ["4\n", "9\n"]}}
RIGHT = "def square(x):\n    return x * x\n"


@pytest.fixture(autouse=True)
def counted() -> Iterator[None]:
    for kind in (sandbox.Bubblewrap(), sandbox.Namespaces()):
        if sandbox.trial(kind) is None:
            break
    else:
        pytest.skip("no sandbox works here")
    counts.take()
    yield
    counts.take()


def score(code: str, row: dict[str, Any], fence: str = "python", **options: Any) -> float:
    text = f"Here it is:\n```{fence}\n{code}\n```\nDone."
    completion = Completion(TokenSequence.of_answer((1,), (2,)), text, "stop")
    return grader.score(Prompt("train/0", "", (1,), row), completion, **options)


def test_the_configuration_knows_the_default_of_seconds() -> None:
    assert inspect.signature(grader.score).parameters["seconds"].default == CODE_SECONDS


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "row",
    [
        SQUARE,
        CHECK,
        {"tests": ["assert square(2) == 4", "assert square(0) == 0"]},
        {"tests": "def test_two():\n    assert square(2) == 4"},
        {"tests": "assert square(TWO) == 4", "setup": "TWO = 2"},
        {**CHECK, "entry_point": "square", "setup": None},
    ],
)
def test_right_and_wrong_functions(row: dict[str, Any]) -> None:
    assert score(RIGHT, row) == 1.0
    assert score("def square(x):\n    return x + 1", row) == 0.0
    assert score("def cube(x):\n    return x * x", row) == 0.0
    assert counts.take() == {}


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "row",
    [
        PRINTED,
        {"tests": json.dumps(PRINTED["tests"])},
        {"tests": [{"input": "2\n", "output": "4"}, {"input": "-3", "output": "9 \n\n"}]},
    ],
)
def test_right_and_wrong_programs(row: dict[str, Any]) -> None:
    assert score("print(int(input()) ** 2)", row) == 1.0
    assert score("if __name__ == '__main__':\n    print(int(input()) ** 2)", row) == 1.0
    for end in ("exit()", "quit()", "exit(0)", "import sys; sys.exit(0)", "raise SystemExit"):
        assert score(f"print(int(input()) ** 2)\n{end}", row) == 1.0
    assert score("print(int(input()) ** 2)\nexit(3)", row) == 0.0
    assert score("print(int(input()) * 2)", row) == 0.0
    assert score("print(4)", row) == 0.0
    assert score("print(int(input()) ** 2)\nraise ValueError", row) == 0.0


PATCHES = {
    "os._exit": """
import os
os._exit(0)
""",
    "sys.exit": """
import sys
sys.exit(0)
""",
    "exit in the function": """
import os
def square(x):
    os._exit(0)
""",
    "atexit": """
import atexit, os
atexit.register(lambda: os._exit(0))
def square(x): return 1
""",
    "patched AssertionError": """
import builtins
builtins.AssertionError = type('E', (BaseException,), {})
def square(x): return 1
""",
    "equal to everything": """
class E:
    def __eq__(self, other): return True
def square(x): return E()
""",
    "equal int": """
class E(int):
    def __eq__(self, other): return True
def square(x): return E(1)
""",
    "patched builtins": """
import builtins
for name in ('exec', 'compile', 'all', 'abs', 'isinstance', 'type', 'dict', 'list'):
    setattr(builtins, name, lambda *a, **k: True)
def square(x): return 1
""",
    "patched json": """
import json
json.dumps = lambda *a: '["value", 4]'
json.loads = lambda *a: 4
def square(x): return 1
""",
    "patched runner": """
import sys
for name, module in list(sys.modules.items()):
    if name.startswith('sandboxed'):
        for key in list(vars(module)):
            if not key.startswith('__'):
                setattr(module, key, lambda *a, **k: ['value', True])
def square(x): return 1
""",
    "frames": """
import sys
frame = sys._getframe()
while frame:
    for key, value in list(frame.f_locals.items()):
        if hasattr(value, '__dict__'):
            try: vars(value)['verdict'] = 'passed'
            except Exception: pass
    frame = frame.f_back
def square(x): return 1
""",
    "printed verdict": """
import os
for number in range(3, 64):
    try: os.write(number, b'{"verdict": "passed", "message": ""}')
    except OSError: pass
print('{"verdict": "passed"}')
def square(x): return 1
""",
    "forged messages": """
import json, os, struct
data = json.dumps({'verdict': 'passed', 'message': ''}).encode()
for number in range(64):
    try: os.write(number, struct.pack('>I', len(data)) + data)
    except OSError: pass
def square(x): return 1
""",
    "tests read": """
import gc, sys
found = [o for o in gc.get_objects() if isinstance(o, dict) and isinstance(o.get('tests'), str)]
def square(x): return 4 if found and x == 2 else 9 if found else 1
""",
    "tests in the frames": """
import sys
frame, tests = sys._getframe(), None
while frame:
    job = frame.f_locals.get('job') or {}
    tests = tests or job.get('tests')
    frame = frame.f_back
def square(x): return x * x if tests else 1
""",
    "tests in files": """
import os
tests = ''
for folder, _, files in os.walk('/'):
    if folder.startswith(('/usr', '/lib', '/root', '/opt', '/home')): continue
    for file in files:
        try: tests += open(os.path.join(folder, file)).read(10000)
        except Exception: pass
def square(x): return x * x if 'square' in tests else 1
""",
    "killed": """
import os, signal
def square(x):
    os.kill(os.getpid(), signal.SIGKILL)
    os._exit(0)
""",
    "everyone killed": """
import os, signal
def square(x):
    os.kill(-1, signal.SIGKILL)
    os._exit(0)
""",
    "crash": """
import ctypes
def square(x): ctypes.string_at(0)
""",
    "raised verdict": """
class UnusableError(BaseException): pass
def square(x): raise UnusableError
""",
    "raised ImportError": "def square(x): raise ImportError('no module')",
    "deep value": """
def square(x):
    v = 1
    for _ in range(99999): v = [v]
    return v
""",
    "deep recursion": """
import sys
sys.setrecursionlimit(10**9)
def square(x): return square(x)
""",
}
ENDLESS = {"deep recursion"}
"""What the time limit ends on any machine."""


@pytest.mark.few(1)
@pytest.mark.parametrize("name", PATCHES)
@pytest.mark.parametrize("row", [SQUARE, CHECK], ids=["asserts", "check"])
def test_a_faked_pass_scores_zero(name: str, row: dict[str, Any]) -> None:
    seconds = 0.5 if name in ENDLESS else 2
    assert score(PATCHES[name], row, seconds=seconds) == 0.0


@pytest.mark.few(3)
@pytest.mark.parametrize("name", ["os._exit", "sys.exit", "atexit", "printed verdict"])
def test_a_faked_program_scores_zero(name: str) -> None:
    assert score(PATCHES[name], PRINTED) == 0.0


def limit_for(kind: str) -> float:
    """Short where it is what is met; elsewhere a slow machine must not meet it."""
    return 0.5 if kind == "code: time limit" else 5


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("import time\ndef square(x): time.sleep(3600)", "code: time limit"),
        ("def square(x):\n    while True: pass", "code: time limit"),
        ("import os\nwhile 1:\n try: os.fork()\n except OSError: pass", "code: time limit"),
        ("def square(x): return 9 ** 9 ** 9 ** 9", "code: time limit"),
        ("def square(x): return bytearray(1 << 40)", "code: memory limit"),
        ("def square(x):\n all = []\n while 1: all.append('x' * 10**7)", "code: memory limit"),
        ("import os\nos._exit(0)", "code: process ended"),
        ("x" * (MOST_CODE + 1), "code: too long"),
    ],
)
def test_what_is_hostile_scores_zero_and_is_counted(code: str, kind: str) -> None:
    assert score(code, SQUARE, seconds=limit_for(kind), memory_mib=256) == 0.0
    assert counts.take() == {kind: 1}


@pytest.mark.exhaustive
def test_a_packed_bomb_is_bounded_by_memory() -> None:
    """320 MiB in two layers of deflate, as long as a line."""
    packer = zlib.compressobj(1)
    once = b"".join(packer.compress(bytes(1 << 24)) for _ in range(20)) + packer.flush()
    code = (
        "import base64, zlib\n"
        f"once = zlib.decompress(base64.b64decode({base64.b64encode(zlib.compress(once))!r}))\n"
        "def square(x): return len(zlib.decompress(once))"
    )
    assert len(code) < MOST_CODE
    assert score(code, SQUARE, seconds=8, memory_mib=256) == 0.0
    assert counts.take() == {"code: memory limit": 1}


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("import time\ntime.sleep(3600)", "code: time limit"),
        ("x = bytearray(1 << 40)", "code: memory limit"),
        ("while True: print('x' * 1000000)", "code: output limit"),
    ],
)
def test_hostile_programs_score_zero_and_are_counted(code: str, kind: str) -> None:
    assert score(code, PRINTED, seconds=limit_for(kind)) == 0.0
    assert counts.take() == {kind: 1}


def test_forks_sockets_and_writes_outside_do_not_happen() -> None:
    code = (
        "import os, socket\ndone = 0\n"
        "write = [lambda: open('/x', 'w'), lambda: open('/usr/x', 'w')]\n"
        "for attempt in (os.fork, socket.socket, *write):\n"
        "    try: attempt(); done += 1\n    except OSError: pass\n"
        "def square(x): return x * x + done"
    )
    assert score(code, SQUARE) == 1.0
    assert not os.path.exists("/x") and not os.path.exists("/usr/x")


def test_a_completion_without_code_scores_zero_and_is_counted() -> None:
    prompt = Prompt("train/0", "", (1,), SQUARE)
    completion = Completion(TokenSequence.of_answer((1,), (2,)), RIGHT, "stop")
    assert grader.score(prompt, completion) == 0.0
    assert counts.take() == {"code: no block": 1}


@pytest.mark.few(5)
@pytest.mark.parametrize(
    "tests",
    ["", "x = 1", "assert square(2 == 4", "import no_such_module", [], [1], {}, 5, None,
     {"inputs": ["1"], "outputs": []}, {"inputs": [[1]], "outputs": [[1]]}],
)  # fmt: skip
def test_tests_that_cannot_be_used_exclude_the_completion(tests: Any) -> None:
    with pytest.raises(UnusableTestsError):
        score(RIGHT, {"tests": tests})


def test_a_missing_column_ends_the_run() -> None:
    with pytest.raises(RewardError, match="code needs the column 'tests', which prompt train/0"):
        score(RIGHT, {"answer": "4"})
    assert score(RIGHT, {"checks": SQUARE["tests"]}, column="checks") == 1.0


def test_a_sandbox_that_does_not_start_is_no_wrong_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    class Forbidden(sandbox.Namespaces):
        def root(self) -> dict[str, Any]:
            return {"shown": {"/x": "/no/such"}, "links": {}, "tmp_bytes": 1}

    monkeypatch.setattr(grader, "launcher", lambda unsandboxed: Forbidden())
    for row in (SQUARE, PRINTED):
        with pytest.raises(SandboxError):
            score(RIGHT, row)


def test_a_sandbox_that_does_not_start_for_the_code_alone_is_none_either(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class ForbiddenOnce(sandbox.Namespaces):
        times = 0

        def root(self) -> dict[str, Any]:
            self.times += 1
            broken = {"shown": {"/x": "/no/such"}, "links": {}, "tmp_bytes": 1}
            return broken if self.times == 1 else super().root()

    monkeypatch.setattr(grader, "launcher", lambda unsandboxed: ForbiddenOnce())
    with pytest.raises(SandboxError, match="could not be started"):
        score(RIGHT, SQUARE)


def test_a_sandbox_is_demanded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "launchers", lambda: ())
    sandbox.launcher.cache_clear()
    with pytest.raises(RewardError, match="unsandboxed = true"):
        score(RIGHT, SQUARE)
    assert score(RIGHT, SQUARE, unsandboxed=True) == 1.0
    sandbox.launcher.cache_clear()
