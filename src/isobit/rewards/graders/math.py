r"""Whether a mathematical answer equals one that the column accepts, by the library math-verify.

``graders.text`` says what the reference and the answer are. Each of three steps takes what the
previous one left open:

    text      both are the same apart from white space and layout
    numbers   both are plain integers, decimals or fractions, the answer perhaps as ``x = 5``: equal
              exactly, or, if one is a decimal, when rounded to 6 places, as in math-verify, and
              within ``RELATIVE`` of each other
    library   both are within the bounds below: parsed as LaTeX and compared by math-verify, for at
              most ``seconds``

The library takes a difference below 1e-15 for zero, so that all small numbers are equal to it.
Where it says that numbers are equal they are compared again, relatively and with many digits
(``_agree``).

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
from importlib.util import find_spec, module_from_spec
from types import ModuleType
from typing import Any

import sympy
from latex2sympy2_extended.latex2sympy2 import _Latex2Sympy, normalize_latex
from math_verify import LatexExtractionConfig
from math_verify.grader import is_atomic_or_pct_atomic, should_treat_as_complex
from math_verify.parser import get_last_eq

from isobit.records.text import Completion, Prompt
from isobit.rewards.counts import count
from isobit.rewards.deadline import DeadlineError, deadline
from isobit.rewards.graders.text import answer_of, is_prose, references, without_unit

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
NOT_EQUAL = re.compile(r"(?<=[A-Za-z)}])\s*!=")
SCIENCE = re.compile(
    r"(?<![\w.])(\d{1,20}\.\d{1,20}[eE][+-]?\d{1,3}|\d{1,20}[eE][+-]?\d{2,3})(?!\w)"
)
MIXED = re.compile(r"(?<![\w./}])(\d{1,20})\s+(\d{1,20})/(\d{1,20})(?![\w./])")


def plain(text: str) -> str:
    """``text`` with signs outside ASCII, ``**``, ``^(..)``, ``!=``, ``1.5e-7``, ``1 1/2`` and
    ``{,}`` as LaTeX that the parser knows.
    """
    text = text.translate(SIGNS).replace("**", "^").replace(r"\textnormal", r"\text")
    text = NOT_EQUAL.sub(r" \\ne ", text.replace("{,}", ","))
    text = MIXED.sub(r"\1\\frac{\2}{\3}", SCIENCE.sub(_power_of_ten, text))
    return re.sub(r"\^\s*\(([^()]*)\)", r"^{\1}", text)


def _power_of_ten(found: re.Match[str]) -> str:
    mantissa, exponent = found[1].lower().split("e")
    return rf"{mantissa} \times 10^{{{int(exponent)}}}"


def excess(text: str) -> str | None:
    """The bound that ``text``, as ``plain`` returns it, exceeds; None if it is within all."""
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


RELATIVE = sympy.Rational(1, 1000)
"""The relative difference of decimals that are equal when rounded to 6 places: three digits of
small ones.
"""
OF_FLOATS = sympy.Rational(1, 10**12)
EXACT = sympy.Rational(1, 10**30)
DIGITS_COMPARED = 60


def _agree(gold: Any, given: Any) -> bool:
    """Whether two expressions that the library took for equal are so relatively; letters stand for
    numbers. What has no number must have a difference that simplifies to zero.
    """
    is_rounded = any(is_atomic_or_pct_atomic(one, sympy.Float) for one in (gold, given))
    has_floats = gold.has(sympy.Float) or given.has(sympy.Float)
    most = RELATIVE if is_rounded else OF_FLOATS if has_floats else EXACT
    letters = sorted(gold.free_symbols | given.free_symbols, key=str)
    values = {one: sympy.Rational(13 + 4 * n, 7 + 2 * n) for n, one in enumerate(letters)}
    left, right = (one.doit().subs(values).evalf(DIGITS_COMPARED) for one in (gold, given))
    largest = max(abs(left), abs(right)) if left.is_number and right.is_number else None
    if largest is not None and abs(left - right) <= most * largest:
        return True
    return not is_rounded and sympy.simplify(gold - given) == 0


def _library() -> ModuleType:
    """A copy of ``math_verify.grader`` of our own, whose numbers ``_agree``."""
    spec = find_spec("math_verify.grader")
    assert spec is not None, "it was imported"
    assert spec.loader is not None, "it was imported"
    grader = module_from_spec(spec)
    spec.loader.exec_module(grader)
    equal = grader.sympy_numeric_eq

    def numeric_eq(a: Any, b: Any, float_rounding: int, numeric_precision: int) -> bool:
        if not equal(a, b, float_rounding, numeric_precision):
            return False
        is_matrix = isinstance(a, sympy.MatrixBase | sympy.MatrixExpr)  # each item was compared
        return is_matrix or _is_exact(a, b) or _agree(a, b)

    grader.sympy_numeric_eq = numeric_eq  # pyright: ignore[reportAttributeAccessIssue]
    return grader


def _is_exact(a: Any, b: Any) -> bool:
    """Whether the library compares the two exactly: one is an integer, a fraction or a percentage
    of these, and none a decimal.
    """
    return any(is_atomic_or_pct_atomic(one, sympy.Number) for one in (a, b)) and not any(
        is_atomic_or_pct_atomic(one, sympy.Float) for one in (a, b)
    )


LIBRARY = _library()

PLACES = 6
SPACED_DIGITS = re.compile(r"(?<=\d)[ \t\n]+(?=\d)")
ONLY_TEXT = re.compile(r"\\(?:text|textbf|textit|textrm|textnormal|mathrm|mbox)\s?\{([^{}]*)\}")
LAYOUT = re.compile(r"\\left(?![a-z])|\\right(?![a-z])|\\[,;!: ]|\\q?quad|\s|\$")
NUMBER = re.compile(
    r"([+-]?)(?:(\d{1,60})|(\d{0,60}\.\d{1,60})|(\d{1,60})/(\d{1,60})|\\frac\{(\d{1,60})\}\{(\d{1,60})\})",
    re.ASCII,
)

THOUSANDS = re.compile(r"[+-]?[1-9]\d{0,2}(?:,\d{3}){1,10}(?:\.\d{1,60})?", re.ASCII)
DECIMAL_COMMA = re.compile(r"[+-]?\d{1,60},\d{1,60}", re.ASCII)
CHOICE = re.compile(r"\(?([A-J])(?:\)?\s?[.):]\s.{0,300}|\)|[.:])?", re.DOTALL)
IN_BASE = re.compile(r"(\d[0-9A-F]{0,60})_\{?(\d{1,2})\}?", re.ASCII)
SPACED_THOUSANDS = re.compile(r"(?<![\d ])\d{1,3}(?: \d{3}){1,10}(?![\d ])", re.ASCII)
COUNTER = re.compile(
    r"\A([+-]?\d[\d,.]{0,60})(?:\\text\{)?"
    "(?:(?![\u96f6\u4e00\u4e8c\u4e09\u56db\u4e94\u516d\u4e03\u516b\u4e5d\u5341\u767e\u5343\u4e07\u4ebf"
    "\u842c\u5104\u5146\u534a\u5206])[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]){1,4}\\}?\\Z"
)
"""A number with a unit of Chinese, Japanese or Korean, as yuan, but no numeral such as 10,000."""
REPEATING = re.compile(
    r"([+-]?)(\d{1,30})\.(\d{0,30})\\(?:overline|bar|dot)\{(\d{1,30})\}", re.ASCII
)
BRACKETS = re.compile(r"([(\[])[^()\[\]]*([)\]])")
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
    prompt: Prompt,
    completion: Completion,
    column: str = "answer",
    seconds: float = 2.0,
    answer: str = "boxed",
    read_thinking: bool = False,
) -> float:
    """1.0 if the completion's answer equals one that ``column`` accepts, else 0.0.

    A reference that cannot be parsed is compared as text, and counted. ``seconds`` bounds the
    library in the main thread for each accepted answer; elsewhere the grading pool's deadline does.
    Raises as ``graders.text.references`` and ``answer_of`` do.
    """
    golds = references(prompt, column, "math_verify", mathematics=True)
    text, marked = answer_of(prompt, completion, "math_verify", answer, read_thinking)
    given = text.strip()
    if not given:
        return 0.0
    unmarked = not marked and is_prose(given, golds)
    if len(given) > max(LONGEST, *map(len, golds)):
        count("math_verify: no marked answer" if unmarked else "math_verify: length")
        return 0.0
    verdicts = [_by_digits(gold, given) for gold in golds]
    if any(verdicts):
        return 1.0
    is_talk = unmarked and excess(plain(given)) is not None
    if None in verdicts and not is_talk and _by_library(golds, verdicts, given, seconds):
        return 1.0
    if unmarked:
        count("math_verify: no marked answer")
    return 0.0


def _by_digits(gold: str, answer: str) -> bool | None:
    """Whether both are the same text, choice or number; None where that cannot tell."""
    gold_text, text = _tidy(gold), _tidy(answer)
    if gold_text == text:
        return True
    if IN_BASE.fullmatch(gold_text) or IN_BASE.fullmatch(text):
        return (known := _in_base(gold_text)) is not None and known == _in_base(text)
    chosen, choice = CHOICE.fullmatch(gold.strip()), CHOICE.fullmatch(answer)
    if chosen and choice:
        return chosen[1] == choice[1]
    expected = _number(gold_text)
    text = text if expected is None else EQUATION.sub("", text, count=1)
    given = _number(text)
    if expected is None:
        return None
    if given is None and expected[1] and DECIMAL_COMMA.fullmatch(text) and "," in gold + answer:
        given = None if re.search(r",\s", answer) else _number(text.replace(",", "."))
    if given is None and (quantity := without_unit(answer)) is not None:
        given = _number(_tidy(quantity))
    if given is None:
        return False if SPACED_DIGITS.search(answer) and re.fullmatch(r"[\d\s]+", answer) else None
    if expected[1] or given[1]:
        return round(expected[0], PLACES) == round(given[0], PLACES) and abs(
            expected[0] - given[0]
        ) <= Fraction(1, 1000) * max(abs(expected[0]), abs(given[0]))
    return expected[0] == given[0]


def _tidy(text: str) -> str:
    """``text`` without layout, white space and a full stop; white space between digits stays."""
    if len(text) > LONGEST:
        return text
    words = ONLY_TEXT.fullmatch(text.strip())
    text = words[1] if words else text
    text = SPACED_DIGITS.sub("\0", text.replace("{,}", ","))
    text = LAYOUT.sub("", text).replace(r"\dfrac", r"\frac").replace(r"\tfrac", r"\frac")
    text = text.removesuffix(".").removeprefix("=").replace("\0", " ")
    text = SPACED_THOUSANDS.sub(lambda found: found[0].replace(" ", ""), text)
    return COUNTER.sub(r"\1", text.replace(r"\varnothing", r"\emptyset"))


def _in_base(text: str) -> int | None:
    """The value of digits with their base, as in ``101_2``, or without; None for anything else."""
    found = IN_BASE.fullmatch(text) or re.fullmatch(r"(\d{1,60})(\Z)", text, re.ASCII)
    if found is None:
        return None
    try:
        return int(found[1], int(found[2] or 10))
    except ValueError:  # a digit or a base that there is not
        return None


def _number(text: str) -> tuple[Fraction, bool] | None:
    """The value of a plain number and whether it is a decimal; None for anything else."""
    if (repeating := REPEATING.fullmatch(text)) is not None:
        return _repeating(*repeating.groups()), False
    match = NUMBER.fullmatch(text.replace(",", "") if THOUSANDS.fullmatch(text) else text)
    if match is None:
        return None
    sign, integer, decimal, above, below, over, under = match.groups()
    below, above = below or under or "1", above or over or decimal or integer
    if Fraction(below) == 0:
        return None
    value = Fraction(above) / Fraction(below)
    return (-value if sign == "-" else value), decimal is not None


def _repeating(sign: str, whole: str, begin: str, period: str) -> Fraction:
    r"""0.1\overline{6} is (16 - 1) / 90."""
    digits = int(whole + begin + period) - int(whole + begin)
    value = Fraction(digits, (10 ** len(period) - 1) * 10 ** len(begin))
    return -value if sign == "-" else value


def _by_library(
    golds: tuple[str, ...], verdicts: list[bool | None], answer: str, seconds: float
) -> bool:
    """Whether the library takes ``answer`` for equal to one of the golds without a verdict."""
    given = plain(answer)
    if (beyond := excess(given)) is not None:
        count(f"math_verify: {beyond}")
        return False
    readable = False
    for gold, verdict in zip(golds, verdicts, strict=True):
        if verdict is None and (equal := _equal(plain(gold), given, seconds)) is not None:
            readable = True
            if equal:
                return True
    if not readable:
        count("math_verify: reference compared as text")
    return False


def _equal(gold: str, answer: str, seconds: float) -> bool | None:
    """None where the reference is no mathematics within the bounds."""
    if excess(gold) is not None:
        return None
    try:
        with deadline(seconds):
            return _compare(gold, answer)
    except DeadlineError:
        count("math_verify: time limit")
    except (RecursionError, MemoryError):
        count("math_verify: too large")
    return False


@lru_cache(maxsize=4096)
def _compare(gold: str, answer: str) -> bool | None:
    """None where the reference cannot be parsed. The completions of a group repeat answers."""
    expected = read(gold)
    if expected is None:
        return None
    given = read(answer)
    if given is None:
        return False
    equal = LIBRARY.verify(expected, given, timeout_seconds=None, allow_set_relation_comp=True)
    return equal and not _are_other_brackets(expected, given, gold, answer)


def _are_other_brackets(expected: Any, given: Any, gold: str, answer: str) -> bool:
    """Whether a pair stands in round brackets on one side and in square ones on the other: the
    library reads both as a point where the first number is the larger one.
    """
    if not (isinstance(expected, sympy.Tuple) and isinstance(given, sympy.Tuple)):
        return False
    one, other = BRACKETS.fullmatch(gold.strip()), BRACKETS.fullmatch(answer.strip())
    return one is not None and other is not None and one.groups() != other.groups()


def _learn() -> None:
    """Warm up: the grammar's caches take a second in all for the forms of answers."""
    for name in ("math_verify.grader", "math_verify.parser"):  # they warn of a missing deadline
        logging.getLogger(name).setLevel(logging.ERROR)
    for gold, answer in FORMS:
        _compare(gold, answer)


_learn()  # while loading, when no deadline applies
