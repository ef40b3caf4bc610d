"""The starter model's task: sums of four one-digit numbers, and the reward for a right answer.

A question reads ``3+8+2+9=``. The pretraining text answers it either at once (``22``), with a guess
near the sum, or worked out, one addition after the other (``11,13,22``), and right. A model of that
text works out a third of its answers; reinforcement learning finds out that this pays.
"""

from functools import cache
from hashlib import sha256
from itertools import accumulate, product
from random import Random
from typing import TypeAlias

from isobit.records.text import Completion, Prompt

Problem: TypeAlias = tuple[int, int, int, int]

DIGITS = range(10)
WORKED_OUT_SHARE = 1 / 3
"""Share of worked-out answers in the pretraining text."""
GUESS_RANGE = 4
"""Largest error of a guess; each error is equally likely."""
HELD_OUT_OF_256 = 26
"""How many of the 256 values of the hash's last byte hold a problem out."""


@cache
def problems(held_out: bool) -> tuple[Problem, ...]:
    """The 989 held-out problems, or the 9,011 others, in the order of their hashes."""
    found = (p for p in product(DIGITS, DIGITS, DIGITS, DIGITS) if is_held_out(p) == held_out)
    return tuple(sorted(found, key=_digest))


def is_held_out(problem: Problem) -> bool:
    """Whether the problem is kept for evaluation; depends on its text alone."""
    return _digest(problem)[-1] < HELD_OUT_OF_256


def _digest(problem: Problem) -> bytes:
    return sha256(question(problem).encode()).digest()


def question(problem: Problem) -> str:
    return "+".join(map(str, problem)) + "="


def worked_out(problem: Problem) -> str:
    """``11,13,22``: the sum after each addition."""
    return ",".join(map(str, list(accumulate(problem))[1:]))


def guess(problem: Problem, random: Random) -> str:
    return str(max(0, sum(problem) + random.randint(-GUESS_RANGE, GUESS_RANGE)))


def pretraining_answer(problem: Problem, random: Random) -> str:
    return worked_out(problem) if random.random() < WORKED_OUT_SHARE else guess(problem, random)


def final_answer(text: str) -> str:
    """Everything after the last comma, or the whole text where there is none."""
    return text.rpartition(",")[2]


def is_worked_out(text: str) -> bool:
    return "," in text


def correct_answer(prompt: Prompt, completion: Completion) -> float:
    """The reward: 1.0 if the final answer is exactly the ``answer`` of the prompt's row, else 0.0.
    The steps are not graded, and an answer cut by the length limit counts as it is.
    """
    return 1.0 if final_answer(completion.text) == prompt.row["answer"] else 0.0
