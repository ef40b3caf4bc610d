"""Hostile answers for every task of reasoning-gym that is graded: one JSON line a task.

Run as a program, so that a scorer which hangs, crashes or takes all memory takes only this down.
``ISOBIT_SWEEP=20`` sends them to so many entries of each task, by default one.
"""

import json
import os
import resource
import warnings
from collections import Counter
from typing import Any

from reasoning_gym.factory import DATASETS

from isobit.config.data import ReasoningGymData
from isobit.data.sources import load_rows
from isobit.records.sequence import TokenSequence
from isobit.records.text import Completion, Prompt
from isobit.rewards import counts
from isobit.rewards.graders import reasoning_gym as grader

ENTRIES = int(os.environ.get("ISOBIT_SWEEP", "1"))
ANSWERS = [
    "",
    "nan",
    "NaN",
    "inf",
    "-infinity",
    "nan+nanj",
    "banana",
    "None",
    "null",
    "1e99999999",
    "1e400",
    "1e-400",
    "9" * 5000,
    "9**9**9**9",
    "9^9^9",
    "F+1000000000",
    "F+999999999999 A-1",
    "R999999999",
    "(" * 3000,
    "(" * 3000 + ")" * 3000,
    "[" * 3000 + "]" * 3000,
    "{" * 3000,
    "[]",
    "{}",
    "[[1e999]]",
    "[[NaN]]",
    '{"a": NaN}',
    "1/0",
    "0/0",
    "1 " * 4000,
    "1," * 4000,
    "UP " * 2000,
    "x" * 1_000_000,
    "\\",
    "\ud800",
    "\u0000",
    "٤٢",
    "４２",  # noqa: RUF001
    "½",
    "1_000",
    "range(10**9)",
    "__import__('os').system('touch /tmp/isobit-executed')",
    "lambda: 1",
    "%s%s%n",
    "{0.__class__}",
    '{"a":' * 1500,
    "0 1 2 3 4 5 6 7 8 9",
    "True False Yes No",
    "\u202e42",
    "\x1b[31m1\x1b[0m",
]


def outcome(prompt: Prompt, answer: str) -> float | str:
    """The score, or what was raised."""
    completion = Completion(TokenSequence.of_answer((1,), (2,)), answer, "stop")
    try:
        return float(grader.score(prompt, completion, seconds=2.0))
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:200]


def share_held(answer: str, own: str) -> float | None:
    """What the library's own scorer gives for text that holds the task's answer."""
    if answer == own:
        return 1.0
    return len(own) / len(answer) if own in answer else None


def sweep(task: str) -> dict[str, Any]:
    """What the answers get from entries of ``task``: those that get anything, and the counts."""
    paid: list[tuple[int, str, float | str]] = []
    wrong: list[int] = []
    counts.take()
    counted = Counter[str]()
    for index, row in enumerate(load_rows(ReasoningGymData(task=task, size=ENTRIES))):
        prompt = Prompt(f"train/{index}", str(row.prompt), (1,), row.columns)
        own = row.columns["answer"]
        for answer in ANSWERS:
            given = outcome(prompt, answer)
            if given != 0.0 and given != share_held(answer, str(own)):
                paid.append((index, answer[:40], given))
        counted.update(counts.take())
        if own is not None and outcome(prompt, str(own)) != 1.0:
            wrong.append(index)
    return {"task": task, "paid": paid, "counts": counted, "own answers not 1": wrong}


def main() -> None:
    """All tasks that are not refused."""
    warnings.simplefilter("ignore")
    resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
    refused = grader.EXECUTES_ANSWERS | grader.EXPANDS_ANSWERS | grader.PAYS_FOR_ANY_ANSWER
    results = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # some tasks print
    for task in sorted(set(DATASETS) - refused - {"composite"}):
        results.write(json.dumps(sweep(task)) + "\n")
        results.flush()


if __name__ == "__main__":
    main()
