r"""Whether a mathematical answer equals the column's, by the library math-verify: 1 or 0.

The answer is the completion's last ``\boxed{..}``, else its last ``<answer>``, else all of it.
Three steps, each only for what the one before left open:

    text      both are the same but for white space and layout
    numbers   both are plain integers, decimals or fractions, the answer perhaps as ``x = 5``: equal
              exactly, or, where one is a decimal, when rounded to 6 places, as math-verify has it
    library   both are within `math_bounds`: parsed as LaTeX and compared by math-verify, for at
              most ``seconds``

What is out of bounds, or takes longer, scores 0 and is counted by kind.  No text reaches ``eval``:
the library's own extraction, whose plain expressions go through sympy's parser, which executes
them, is not used, and its grammar of LaTeX reads numbers by `math_reader`.
"""

import logging
import re
from fractions import Fraction
from functools import lru_cache
from typing import Any

from math_verify import verify

from isobit.records.text import Completion, Prompt
from isobit.rewards.counts import count
from isobit.rewards.deadline import DeadlineError, deadline
from isobit.rewards.extract import cell, final_answer
from isobit.rewards.graders.math_bounds import LONGEST, excess, plain
from isobit.rewards.graders.math_reader import read

PLACES = 6
LAYOUT = re.compile(r"\\left(?![a-z])|\\right(?![a-z])|\\[,;!: ]|\\q?quad|\s|\$")
NUMBER = re.compile(
    r"([+-]?)(?:(\d{1,60})|(\d{0,60}\.\d{1,60})|(\d{1,60})/(\d{1,60})|\\frac\{(\d{1,60})\}\{(\d{1,60})\})",
    re.ASCII,
)

THOUSANDS = re.compile(r"[+-]?\d{1,3}(?:,\d{3}){1,10}", re.ASCII)
EQUATION = re.compile(r"\A[A-Za-z]=")
FORMS = (
    ("(x+1)^2", "x^2+2x+1"),
    (r"\frac{6\pi}{7}", r"6\pi/7"),
    ("[2,5)", r"x \in [2, 5)"),
    (r"\{1,3\}", "3, 1"),
    (r"2\sqrt{3}", r"\sqrt{12}"),
    (r"5\%", "0.05"),
    (r"\text{Sunday}", "Sunday"),
    ("(1,2)", r"x > -\frac{1}{2}"),
    ("y=2x-1", r"2^{10}"),
)


def score(
    prompt: Prompt, completion: Completion, column: str = "answer", seconds: float = 2.0
) -> float:
    """1.0 if the completion's answer equals ``column``, else 0.0.

    A reference answer that cannot be parsed is compared as text, and counted.  ``seconds`` bounds
    the library in the main thread; elsewhere the grading pool's deadline does.  Raises
    ``RewardError`` for a missing column.
    """
    gold = str(cell(prompt, column, "math_verify")).strip()
    answer = final_answer(completion.text).strip()
    if len(answer) > max(LONGEST, len(gold)):
        count("math_verify: length")
        return 0.0
    if not answer:
        return 0.0
    gold_text, text = _tidy(gold), _tidy(answer)
    if gold_text == text:
        return 1.0
    expected = _number(gold_text)
    given = _number(text if expected is None else EQUATION.sub("", text, count=1))
    if expected is not None and given is not None:
        return float(_equal_numbers(*expected, *given))
    return float(_equal(plain(gold), plain(answer), seconds))


def _tidy(text: str) -> str:
    """``text`` without layout, white space and a full stop."""
    if len(text) > LONGEST:
        return text
    text = LAYOUT.sub("", text).replace(r"\dfrac", r"\frac").replace(r"\tfrac", r"\frac")
    return text.removesuffix(".")


def _number(text: str) -> tuple[Fraction, bool] | None:
    """The value of a plain number and whether it is a decimal; None for anything else."""
    match = NUMBER.fullmatch(text.replace(",", "") if THOUSANDS.fullmatch(text) else text)
    if match is None:
        return None
    sign, integer, decimal, above, below, over, under = match.groups()
    below, above = below or under or "1", above or over or decimal or integer
    if Fraction(below) == 0:
        return None
    value = Fraction(above) / Fraction(below)
    return (-value if sign == "-" else value), decimal is not None


def _equal_numbers(a: Fraction, a_decimal: bool, b: Fraction, b_decimal: bool) -> bool:
    if a_decimal or b_decimal:
        return round(a, PLACES) == round(b, PLACES)
    return a == b


def _equal(gold: str, answer: str, seconds: float) -> bool:
    """What the library says, within bounds and time."""
    if (beyond := excess(answer)) is not None:
        count(f"math_verify: {beyond}")
        return False
    if excess(gold) is not None:
        count("math_verify: reference compared as text")
        return False
    try:
        with deadline(seconds):
            return _compare(gold, answer)
    except DeadlineError:
        count("math_verify: time limit")
    except (RecursionError, MemoryError):
        count("math_verify: too large")
    return False


def _compare(gold: str, answer: str) -> bool:
    expected = _parsed(gold)
    if expected is None:
        count("math_verify: reference compared as text")
        return False
    given = _parsed(answer)
    return given is not None and verify(expected, given, timeout_seconds=None)


@lru_cache(maxsize=4096)
def _parsed(text: str) -> Any:
    return read(text)


def _learn() -> None:
    """Read what answers look like: the grammar learns from each new form, for a second in all."""
    for name in (
        "math_verify.grader",
        "math_verify.parser",
    ):  # they warn that they have no deadline
        logging.getLogger(name).setLevel(logging.ERROR)
    for gold, answer in FORMS:
        _compare(gold, answer)


_learn()  # here, because no deadline counts while a grader is loaded
