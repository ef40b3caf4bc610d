r"""Which mathematical text is small enough to be parsed and compared.

A parser of LaTeX evaluates some of what it reads at once (``\binom``, ``\Gamma``, matrices), and a
comparison evaluates all of it: ``9^{9^{9^9}}`` has more digits than fit into any memory, and deep
parentheses have more levels than the parser's stack.  So everything that can grow is bounded first,
by regular expressions that go through the text once:

    length       LONGEST characters
    characters   ASCII, and the signs in SIGNS; no digits of other alphabets
    number       DIGITS digits, three in an exponent as in 1E9
    nesting      DEEPEST brackets in each other, no subscript or power in a subscript
    command      those in COMMANDS: an answer is a value, not an integral that is still to be done
    factorial    of a number below 1,000; binomials of numbers below 10,000
    function     one of those that grow faster than any power, so that none is in another
    power        no power or factorial in an exponent, no division by a decimal; with w the product
                 of the numbers in an exponent: w below 1,000 for a letter, 10,000 for a number of
                 at most 3 digits, 31 for anything else; the largest w times the product of those
                 over brackets, which may be in each other, below 10,000; roots below 100
"""

import math
import re

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
"""Signs that an answer may hold, and what stands for each."""

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
"""Names after a backslash.  Not among them: what computes (integrals, sums, products, limits,
determinants, Gamma, named operators).
"""

COMMAND = re.compile(r"\\([A-Za-z]+)")
NUMBER = re.compile(r"\d+")
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
    """``text`` with signs outside ASCII, ``**`` and ``^(..)`` as LaTeX has them."""
    text = text.translate(SIGNS).replace("**", "^")
    return re.sub(r"\^\s*\(([^()]*)\)", r"^{\1}", text)


def excess(text: str) -> str | None:
    """What of ``text``, as ``plain`` returns it, is out of bounds; None if nothing is."""
    if len(text) > LONGEST:
        return "length"
    if not text.isascii() or not text.isprintable():
        return "characters"
    if any(len(number) > DIGITS for number in NUMBER.findall(text)) or SCIENTIFIC.search(text):
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
        weight = math.prod(max(2, int(number)) for number in NUMBER.findall(exponent))
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
