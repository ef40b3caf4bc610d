r"""Whether a mathematical answer equals the column's, by the library math-verify: 1 or 0.

The answer is the completion's last ``\boxed{..}``, else its last ``<answer>``, else all of it. Each
of three steps takes what the previous one left open:

    text      both are the same apart from white space and layout
    numbers   both are plain integers, decimals or fractions, the answer perhaps as ``x = 5``: equal
              exactly, or, if one is a decimal, when rounded to 6 places, as in math-verify
    library   both are within the bounds below: parsed as LaTeX and compared by math-verify, for at
              most ``seconds``

An answer that is out of bounds or takes too long scores 0 and is counted by kind. No text reaches
``eval``: the library's own extraction, which executes plain expressions through sympy's parser, is
not used, and numbers in LaTeX are made from their digits instead of by ``sympy.Number(text)``.

The bounds are there because a parser of LaTeX evaluates some of what it reads (``\binom``,
``\Gamma``, matrices), and a comparison all of it: ``9^{9^{9^9}}`` fits no memory, and deep
parentheses exceed the parser's stack. Regular expressions check them in one pass:

    length       LONGEST characters
    characters   ASCII, and the signs in SIGNS; no digits of other alphabets
    number       DIGITS digits, three in an exponent as in 1E9
    nesting      DEEPEST brackets in each other, no subscript or power in a subscript
    command      those in COMMANDS: an answer is a value, not an integral to be computed
    factorial    of a number below 1,000; binomials of numbers below 10,000
    function     one of those that grow faster than any power, so that none is in another
    power        no power or factorial in an exponent, no division by a decimal; with w the product
                 of the numbers in an exponent: w below 1,000 for a letter, 10,000 for a number of
                 at most 3 digits, 31 for anything else; the largest w times the product of those
                 over brackets, which may be in each other, below 10,000; roots below 100
"""

import logging
import math
import re
from fractions import Fraction
from functools import lru_cache
from typing import Any

import sympy
from latex2sympy2_extended.latex2sympy2 import _Latex2Sympy, normalize_latex
from math_verify import LatexExtractionConfig, verify
from math_verify.grader import should_treat_as_complex
from math_verify.parser import get_last_eq

from isobit.records.text import Completion, Prompt
from isobit.rewards.graders.text import cell, final_answer
from isobit.rewards.outcome import DeadlineError, count, deadline

LONGEST = 500
DIGITS = 100
DEEPEST = 12
MOST_POWER = 9_999
MOST_OF_LETTER = 999
MOST_OF_OTHER = 30

SIGNS = str.maketrans(
    {
        "π": r"\pi ",
        "∞": r"\infty ",
        "−": "-",  # noqa: RUF001  (the minus sign)
        "×": r"\times ",  # noqa: RUF001  (the multiplication sign)
        "·": r"\cdot ",
        "÷": r"\div ",
        "√": r"\sqrt ",
        "°": r"^\circ ",
        "≤": r"\le ",
        "≥": r"\ge ",
        "≠": r"\ne ",
        "∈": r"\in ",
        "∪": r"\cup ",  # noqa: RUF001  (the union)
        "∩": r"\cap ",
        "∅": r"\emptyset ",
        "²": "^2",
        "³": "^3",
        "\u00a0": " ",
        "\n": " ",
    }
)
"""Signs outside ASCII that an answer may have, and their LaTeX."""

COMMANDS = frozenset(
    word
    for line in (
        "frac dfrac tfrac cfrac sqrt pi infty cdot times div pm mp binom dbinom tbinom",
        "left right big Big bigl bigr Bigl Bigr quad qquad displaystyle textstyle begin end",
        "text textbf textit textrm mathrm mathbf mathit mathbb mathcal mbox boxed fbox",
        "le leq leqslant lt ge geq geqslant gt ne neq approx equiv sim cong perp parallel",
        "in notin cup cap setminus emptyset varnothing and or wedge vee neg mid",
        "sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh log ln exp",
        "alpha beta delta epsilon varepsilon zeta eta theta kappa lambda mu nu xi rho sigma tau",
        "phi varphi chi psi omega Delta Theta Lambda Sigma Phi Psi Omega circ degree",
        "angle triangle overline bar vec hat prime to rightarrow Rightarrow implies",
        "ldots dots cdots vert lvert rvert lfloor rfloor lceil rceil langle rangle",
    )
    for word in line.split()
)
"""Names after a backslash, without those that compute (integrals, sums, products, limits,
determinants, Gamma, named operators).
"""

COMMAND = re.compile(r"\\([A-Za-z]+)")
DIGIT_RUN = re.compile(r"\d+")
SCIENTIFIC = re.compile(r"\d\s*[eE]\s*[+-]?\s*\d{4}")
FACTORIAL = re.compile(r"(?<![\d.])\d{1,3}!(?!!)")
BINOMIAL = re.compile(r"\\[dt]?binom(?!\{\d{1,4}\}\{\d{1,4}\})")
ROOT = re.compile(r"\\sqrt\s*\[(?!\s*(?:\d{1,2}|[A-Za-z])\s*\])")
SUBSCRIPT = re.compile(r"_\s*\{[^{}]*[_^]")
GROWING = re.compile(r"\\(?:exp|sinh|cosh)(?![A-Za-z])")
FRACTION = r"\\[dtc]?frac\{[^{}]*\}\{[^{}]*\}"
POWER = re.compile(
    rf"(\S)\s*\^\s*(\{{(?:[^{{}}]|{FRACTION})*\}}|\\[A-Za-z]+|-?[A-Za-z\d])(?!\s*[\^!])"
)
SHORT_NUMBER = re.compile(r"(?<![\d.])\d{1,3}\s*\Z")
IN_EXPONENT = re.compile(
    r"[\^!]|\\(?:exp|sinh|cosh|[dt]?binom)|\..*(?:/|frac|div)|(?:/|frac|div).*\."
)


def plain(text: str) -> str:
    """``text`` with signs outside ASCII, ``**`` and ``^(..)`` as LaTeX."""
    text = text.translate(SIGNS).replace("**", "^")
    return re.sub(r"\^\s*\(([^()]*)\)", r"^{\1}", text)


def excess(text: str) -> str | None:
    """Which bound ``text``, as ``plain`` returns it, exceeds; None if it is within all."""
    if len(text) > LONGEST:
        return "length"
    if not text.isascii() or not text.isprintable():
        return "characters"
    if any(len(number) > DIGITS for number in DIGIT_RUN.findall(text)) or SCIENTIFIC.search(text):
        return "number"
    if _depth(text) > DEEPEST or SUBSCRIPT.search(text):
        return "nesting"
    if set(COMMAND.findall(text)) - COMMANDS:
        return "command"
    if text.replace(r"\!", "").count("!") != len(FACTORIAL.findall(text)) or BINOMIAL.search(text):
        return "factorial"
    if len(GROWING.findall(text)) > 1:
        return "function"
    return "power" if ROOT.search(text) or _powers_exceed(text) else None


def _depth(text: str) -> int:
    depth = deepest = 0
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        deepest = max(deepest, depth)
    return deepest


def _powers_exceed(text: str) -> bool:
    powers = list(POWER.finditer(text))
    if len(powers) != text.count("^"):
        return True
    largest = of_brackets = 1
    for power in powers:
        base, exponent = power.groups()
        if IN_EXPONENT.search(exponent):
            return True
        weight = math.prod(max(2, int(number)) for number in DIGIT_RUN.findall(exponent))
        if base.isdigit() and SHORT_NUMBER.search(text, 0, power.end(1)):
            most = MOST_POWER
        else:
            most = MOST_OF_LETTER if base.isalpha() else MOST_OF_OTHER
        if weight > most:
            return True
        if base in ")]}|":
            of_brackets *= weight
        largest = max(largest, weight)
    return largest * of_brackets > MOST_POWER


GROUPED_THOUSANDS = re.compile(r"\s*-?\d{1,3}(?:,\d{3})+(?:\.\d+)?\s*")
NORMALISED = LatexExtractionConfig().normalization_config


class _Reader(_Latex2Sympy):
    def parse_number(self, text: str) -> sympy.Number:
        digits = text.replace(",", "")
        return sympy.Integer(int(digits)) if digits.isdigit() else sympy.Float(digits)


@lru_cache(maxsize=4096)
def read(text: str) -> Any:
    """The expression of ``text``, or of the last part of its chain of equations; None if it is
    none. Raises RecursionError, MemoryError; ``text`` must be within the bounds.
    """
    try:
        latex = normalize_latex(text, NORMALISED)
    except Exception:  # the library's errors are not documented
        return None
    for part in dict.fromkeys((latex, get_last_eq(latex))):
        if GROUPED_THOUSANDS.fullmatch(part):
            part = part.replace(",", "")
        try:
            return _Reader(None, not should_treat_as_complex(part)).parse(part)
        except (RecursionError, MemoryError):
            raise
        except Exception:  # the grammar raises bare exceptions, sympy almost any  # noqa: S112
            continue
    return None


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

    A reference answer that cannot be parsed is compared as text, and counted. ``seconds`` bounds
    the library in the main thread; elsewhere the grading pool's deadline does. Raises
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
        if expected[1] or given[1]:
            return float(round(expected[0], PLACES) == round(given[0], PLACES))
        return float(expected[0] == given[0])
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


def _equal(gold: str, answer: str, seconds: float) -> bool:
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
    expected = read(gold)
    if expected is None:
        count("math_verify: reference compared as text")
        return False
    given = read(answer)
    return given is not None and verify(expected, given, timeout_seconds=None)


def _learn() -> None:
    """Warm up: the grammar's caches take a second in all for the forms of answers."""
    for name in ("math_verify.grader", "math_verify.parser"):  # they warn of a missing deadline
        logging.getLogger(name).setLevel(logging.ERROR)
    for gold, answer in FORMS:
        _compare(gold, answer)


_learn()  # while loading, when no deadline applies
