"""Grades Python code with unit tests in a sandbox: 1 if all pass, else 0.

The code is the last block between ```python fences after the thinking. The column ``tests`` holds

    Python        a string or a list of strings: assertions, functions ``test_..``, or
                  ``check(candidate)`` with the function's name in the column ``entry_point``;
                  an optional column ``setup`` runs before them
    input/output  {"inputs": [..], "outputs": [..]} (also as JSON), or a list of
                  {"input": .., "output": ..}: the code is a program; each output must be equal,
                  apart from white space at the ends of lines and at the end

The code cannot fake a verdict. It runs in its own sandbox and gets arguments and input only, no
tests and no expected values. Python tests run in a second sandbox, where the names that they do not
define are stubs that call the code and return values of builtin types; outputs are compared in this
process. So only right values win, whatever the code patches, prints or overloads.

Not excluded are weak tests; memorised answers; tests without ``entry_point`` that use a helper of
the answer (with it, only that name is the answer's); NaN where a test asks ``not abs(a - b) > e``.
Arguments are copies, so that a function that works in place scores 0, and functions cannot be
passed as arguments (the tests are then unusable).
"""

import json
import os
from collections.abc import Sequence
from typing import Any

from isobit.records.text import Completion, Prompt
from isobit.rewards.counts import count
from isobit.rewards.graders.text import cell, closed, last_code, visible
from isobit.rewards.sandbox import (
    Launcher,
    OutputLimitError,
    Process,
    ProcessLimits,
    SandboxError,
    TimeLimitError,
    launcher,
)
from isobit.rewards.sandboxed.main import MEMORY
from isobit.util.strict_json import parsed_line

MOST_CODE = 100_000
"""Characters of code; longer code scores 0."""
MOST_OUTPUT = 4 << 20
MOST_VERDICT = 1 << 16


class UnusableTestsError(Exception):
    """Tests that cannot be run for any answer; the completion is not graded."""


def score(
    prompt: Prompt,
    completion: Completion,
    column: str = "tests",
    seconds: float = 5.0,
    memory_mib: int = 512,
    unsandboxed: bool = False,
    read_thinking: bool = False,
) -> float:
    """1.0 if the code in ``completion`` passes all tests in ``column``, else 0.0.

    ``seconds`` of wall-clock time are for all tests of a completion and must be below
    ``reward.deadline_s``, after which the grader is killed and nothing is scored; ``memory_mib`` is
    for each process. Raises ``RewardError`` for a missing column or sandbox,
    ``UnusableTestsError``, and ``SandboxError`` if the code never ran.
    """
    given = _read(cell(prompt, column, "code"))
    started_by = launcher(unsandboxed)
    limits = ProcessLimits(seconds, memory_mib << 20)
    code = last_code(closed(visible(prompt, completion, "code", read_thinking), completion))
    if code is None or len(code) > MOST_CODE:
        count("code: no block" if code is None else "code: too long")
        return 0.0
    try:
        if isinstance(given, str):
            source = f"{prompt.row.get('setup') or ''}\n{given}"
            passed = _judged(code, source, prompt.row.get("entry_point"), limits, started_by)
        else:
            passed = _printed(code, given, limits, started_by)
    except TimeLimitError:
        count("code: time limit")
        return 0.0
    except OutputLimitError:
        count("code: output limit")
        return 0.0
    return float(passed)


def _read(tests: Any) -> str | list[tuple[str, str]]:
    """Python tests as one text, or pairs of input and output. Raises UnusableTestsError."""
    if isinstance(tests, str) and tests.lstrip().startswith(("{", "[")):
        try:
            tests = json.loads(tests)
        except ValueError:
            return tests
    match tests:
        case str() if tests.strip():
            return tests
        case {"inputs": [*inputs], "outputs": [*outputs]} if len(inputs) == len(outputs) > 0:
            pairs = list(zip(inputs, outputs, strict=True))
        case [{"input": _, "output": _}, *_]:
            pairs = [(test.get("input"), test.get("output")) for test in tests]
        case [str(), *_] if all(isinstance(test, str) for test in tests):
            return "\n".join(tests)
        case _:
            raise UnusableTestsError(
                f"the tests are {str(tests)[:80]!r}; expected Python or pairs of input and output"
            )
    if not all(isinstance(text, str) for pair in pairs for text in pair):
        raise UnusableTestsError("inputs and outputs of a program must be text")
    return pairs


def _printed(
    code: str, pairs: Sequence[tuple[str, str]], limits: ProcessLimits, started_by: Launcher
) -> bool:
    """Whether the program prints each output; it runs once for each pair, until one differs."""
    left = limits.seconds
    for given, expected in pairs:
        process = Process(
            "script",
            {"code": code},
            ProcessLimits(left, limits.memory_bytes),
            started_by,
            stdin=given.encode("utf-8", "surrogatepass"),
        )
        output, exit_code = process.finish(MOST_OUTPUT)
        left = process.seconds_left
        if exit_code == MEMORY:
            count("code: memory limit")
        if exit_code != 0 or _lines(output.decode("utf-8", "replace")) != _lines(expected):
            return False
    return True


def _lines(output: str) -> list[str]:
    return [line.rstrip() for line in output.rstrip().split("\n")]


def _judged(
    code: str, tests: str, entry_point: str | None, limits: ProcessLimits, started_by: Launcher
) -> bool:
    """Whether ``tests``, in one process, accept ``code``, in another."""
    candidate, tester = _conversation(code, tests, entry_point, limits, started_by)
    try:
        output, _ = tester.finish(MOST_VERDICT)
    finally:
        candidate.kill()
    if not candidate.started and b'"died"' in output:
        raise SandboxError("the process of the answer's code could not be started")
    return _passed(output)


def _conversation(
    code: str, tests: str, entry_point: str | None, limits: ProcessLimits, started_by: Launcher
) -> tuple[Process, Process]:
    """The two processes, joined by two pipes that no other process holds."""
    request_out, request_in = os.pipe()
    reply_out, reply_in = os.pipe()
    try:
        job = {"code": code, "incoming": request_out, "outgoing": reply_in}
        candidate = Process("candidate", job, limits, started_by, pass_fds=(request_out, reply_in))
        job = {"tests": tests, "entry_point": entry_point}
        job |= {"incoming": reply_out, "outgoing": request_in}
        try:
            tester = Process("tests", job, limits, started_by, pass_fds=(reply_out, request_in))
        except BaseException:
            candidate.kill()
            raise
        return candidate, tester
    finally:
        for descriptor in (request_out, request_in, reply_out, reply_in):
            os.close(descriptor)


def _passed(output: bytes) -> bool:
    if not output:  # the tests' process reached a limit because of the answer, and was killed
        count("code: tests died")
        return False
    match parsed_line(output):
        case {"verdict": "unusable", "message": str(message)}:
            raise UnusableTestsError(message)
        case {"verdict": "died"}:
            count("code: process ended")
        case {"verdict": "memory"}:
            count("code: memory limit")
        case {"verdict": "passed"}:
            return True
        case {"verdict": "failed"}:
            pass
        case _:
            raise UnusableTestsError("the tests wrote into the pipe of their verdict")
    return False
