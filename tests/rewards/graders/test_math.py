"""Which mathematical text is small enough to be parsed; test_math_verify has what is not.

Mathematical answers: what is equal, what is not, and what is hostile.
"""

import builtins
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.graders import COUNT, answers
from isobit.records.sequence import TokenSequence
from isobit.records.text import Completion, Prompt
from isobit.rewards import counts
from isobit.util.errors import RewardError
from tests.suites import examples


@pytest.mark.parametrize(
    ("gold", "text", "expected"),
    [
        (r"\frac{1}{3}", r"0.\overline{3}", 1.0),
        ("-1/6", r"-0.1\overline{6}", 1.0),
        ("3", r"0.\overline{3}", 0.0),
        (r"\emptyset", r"\varnothing", 1.0),
        ("5\u5143", "5", 1.0),
        ("5", "5\\text{\u5143}", 1.0),
        ("5", "5\u4e07", 0.0),
        ("5", "5\u00b2", 0.0),
        ("5", "5\u03c0", 0.0),
        ("12", "=12", 1.0),
        ("1000", "1 000", 1.0),
        ("1000", "1 00", 0.0),
        ("101", "101_2", 0.0),
        ("101_2", "101", 0.0),
        ("101_2", "101_{2}", 1.0),
        ("5", "101_2", 1.0),
        ("x_1", "x_{1}", 1.0),
    ],
)
def test_notations_of_one_number(gold: str, text: str, expected: float) -> None:
    from isobit.rewards.graders import math as grader

    prompt = Prompt("train/0", "", (1,), {"answer": gold})
    made = Completion(TokenSequence.of_answer((1,), (2,)), f"\\boxed{{{text}}}", "stop")
    assert grader.score(prompt, made) == expected


@pytest.mark.parametrize(
    "text",
    [
        "5",
        "-3.25",
        "x",
        "2^{2024}",
        "x^{100}",
        "(x+1)^{10}",
        "(x+1)^2(x-1)^3",
        "e^{-x^2}".replace("^2", ""),
        "10^{-5}",
        r"\left(\frac{1}{2}\right)^{10}",
        r"2^{\frac{1}{3}}",
        "8^{1/3}",
        "x^(2)",
        "x²",
        r"\sqrt[3]{5}",
        r"\sin^2 x",
        r"90^\circ",
        "90°",
        "20!",
        r"\binom{10}{3}",
        r"\frac{\sqrt{1+\sqrt{5}}}{2}",
        r"\text{no solution}",
        r"\{1, 2, 3\}",
        r"(-\infty, 3) \cup [5, \infty)",
        r"3\!\cdot 4",
        "n^{k+1}",
    ],
)
def test_what_answers_look_like_is_within(text: str) -> None:
    from isobit.rewards.graders.math import excess, plain

    assert excess(plain(text)) is None


def test_the_length_itself() -> None:
    from isobit.rewards.graders.math import LONGEST, excess

    assert excess("x+" * (LONGEST // 2)) is None
    assert excess("x+" * (LONGEST // 2) + "1") == "length"


SEQUENCE = TokenSequence.of_answer((1,), (2,))


@pytest.fixture(autouse=True)
def counted() -> Iterator[None]:
    counts.take()
    yield
    counts.take()


def completed(reference: str, text: str, **options: Any) -> float:
    from isobit.rewards.graders import math as grader  # here: it takes 2 s of each worker

    prompt = Prompt("train/0", "", (1,), {"answer": reference})
    return grader.score(prompt, Completion(SEQUENCE, text, "stop"), **options)


def score(reference: str, answer: str) -> float:
    return completed(reference, f"So it is \\boxed{{{answer}}}.")


@pytest.mark.parametrize(
    ("reference", "answer"),
    [
        ("42", "42"),
        ("42", "42.0"),
        ("42", "x = 42"),
        ("42", "$42$."),
        ("-3", "−3"),  # noqa: RUF001
        ("1/2", "0.5"),
        (r"\frac{1}{2}", r"\dfrac{2}{4}"),
        ("1/3", "0.333333"),
        ("1000", "1,000"),
        ("1,234,567", "1234567"),
        ("1024", "2^{10}"),
        ("1024", "2**10"),
        ("2^{2024}", "4^{1012}"),
        ("x^2+2x+1", "(x+1)^2"),
        (r"\sqrt{8}", r"2\sqrt{2}"),
        ("3π", r"3\pi"),
        ("5", r"5\text{ cm}"),
        (r"50\%", "0.5"),
        ("(1,2)", "(1, 2)"),
        (r"\{1,2\}", "2, 1"),
        ("x>3", "3<x"),
        ("[0,1)", r"x \in [0,1)"),
        (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{bmatrix}1&2\\3&4\end{bmatrix}"),
        ("10", r"\binom{5}{2}"),
        ("6", "3!"),
        ("A", "(A)"),
        (r"\text{Paris}", "Paris"),
        ("2^{2^{2^2}}", "2^{2^{2^2}}"),  # beyond the bounds, but the same text
    ],
)
def test_equal_answers(reference: str, answer: str) -> None:
    assert score(reference, answer) == 1.0


@pytest.mark.parametrize(
    ("reference", "answer"),
    [
        ("42", "43"),
        ("42", ""),
        ("42", "42, 43"),
        ("42", "42 or 43"),
        ("1/3", "0.3333"),
        ("(1,2)", "(2,1)"),
        ("x+1", "y+1"),
        ("A", "B"),
        ("2^{2024}", "2^{2024}-1"),
        ("5", r"\frac{0}{0}"),
        ("5", r"\frac{5}{0}"),
        ("0", r"\frac{1}{\infty}+1"),
        (r"\infty", "10^{999}"),
        ("5", "nan"),
        ("nan", r"\frac{0}{0}"),
        ("6", "5 < 6"),
    ],
)
def test_different_answers(reference: str, answer: str) -> None:
    assert score(reference, answer) == 0.0


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (r"\boxed{41}, no, \boxed{42}", 1.0),
        (r"\boxed{42}, no, \boxed{41}", 0.0),
        ("<answer>42</answer>", 1.0),
        (r"<answer>42</answer> but \boxed{41}", 0.0),
        (" 42\n", 1.0),
        ("The answer is 42", 0.0),
        ("", 0.0),
    ],
)
def test_which_part_is_the_answer(text: str, expected: float) -> None:
    assert completed("42", text) == expected


HOSTILE = {
    "length": ["1" * 1_000_000, "\\boxed{" * 150_000, "(" * 500_000 + ")" * 500_000, "x+" * 400],
    "power": [
        "9**9**9**9",
        "9^{9^{9^9}}",
        "9^9^9^9",
        "((9^{999})^9)^9",
        "(2^{999})^{30}",
        r"\left(2^{999}\right)^{30}",
        "2^{99999}",
        r"2^{9999\cdot9999}",
        r"9^{\frac{1}{0.00001}}",
        "9^{1/0.00001}",
        r"\sqrt[0.0000001]{9}",
        "2^{99!}",
        "99!^{99}",
        "(x+y+z)^{99}",
        r"2^{\binom{99}{9}}",
        "^" * 50,
    ],
    "nesting": [
        "(" * 200 + "1" + ")" * 200,
        "{" * 50 + "1" + "}" * 50,
        r"\frac{1}{" * 40 + "1" + "}" * 40,
        r"\{" * 100,
        "x_{x_{x_{x_{x_{x}}}}}",
    ],
    "factorial": [
        "1000!",
        "9!!",
        "(9!)!",
        "9 ! !",
        "n!",
        r"\binom{10^9}{5}",
        r"\binom{99999}{9}",
        r"\binom 99",
    ],
    "number": ["9" * 400, "0." + "3" * 300, "1E999999999", "1e-99999"],
    "command": [
        r"\int_0^1 x dx",
        r"\sum_{n=1}^{999999999} n",
        r"\prod_{n=1}^{999999999} n",
        r"\lim_{x\to 0} x",
        r"\Gamma(10^9)",
        r"\gamma(999999999)",
        r"\operatorname{eye}(99999)",
        r"\det 5",
        r"\input{/etc/passwd}",
    ],
    "function": [r"\exp(\exp(\exp(99)))", r"\cosh\exp 999"],
    "characters": [
        "４２",  # noqa: RUF001
        "٤٢",
        "𝟒𝟐",  # noqa: RUF001
        "4２",  # noqa: RUF001
        "42\u200b",
        "4\u0662",
        "⁴²",
        "42\u0000",
        "\ud800",
        "х+1",  # noqa: RUF001
        "Ⅷ",
    ],
}
CASES = [(kind, text) for kind, texts in HOSTILE.items() for text in texts]


@pytest.mark.few(41)
@pytest.mark.parametrize(("kind", "text"), CASES, ids=[f"{k}-{t[:20]!r}" for k, t in CASES])
def test_what_is_out_of_bounds_scores_zero_and_is_counted(kind: str, text: str) -> None:
    for reference in ("42", "x+1"):
        assert completed(reference, f"<answer>{text}</answer>") == 0.0
        assert counts.take() == {f"math_verify: {kind}": 1}


def test_within_the_bounds_time_is_bounded() -> None:
    assert completed("5", "(a+b+c+d+e)^{30}", seconds=0.2) == 0.0
    assert counts.take() == {"math_verify: time limit": 1}
    assert score("x+1", "1+x") == 1.0


def test_no_text_reaches_eval(monkeypatch: pytest.MonkeyPatch) -> None:
    from sympy.parsing import sympy_parser

    score("x+1", "1+x")  # what is imported is imported
    executed: list[Any] = []
    plain_eval = builtins.eval
    monkeypatch.setattr(builtins, "eval", lambda *a: executed.append(a[0]) or plain_eval(*a))
    monkeypatch.setattr(sympy_parser, "eval_expr", lambda *a: executed.append(a[0]))
    for text in [
        "__import__('os').system('true')",
        r"\text{__import__('os').system('true')}",
        "eval('1')+x",
        "exec(x)",
        "().__class__",
        "lambda: 1",
        "print(5)",
        "S(5)",
        "5 if 1 else 2",
        "[1 for x in y]",
        "2*3+4",
        "1+1=2",
        "f'{5}'",
        "x.y",
        "1,2;3",
    ]:
        for reference in ("x^2", "x=1", "print(5)+1"):
            score(reference, text)
            score(text, reference)
    assert executed == []


def test_it_works_outside_the_main_thread() -> None:
    scores: list[float] = []
    thread = threading.Thread(target=lambda: scores.append(score("x^2-1", "(x-1)(x+1)")))
    thread.start()
    thread.join()
    assert scores == [1.0]


@pytest.mark.parametrize("reference", ["\\frac{1}{", "9^{9^{9}}", "Straße & Co."])
def test_a_reference_that_is_no_expression_is_compared_as_text(reference: str) -> None:
    assert score(reference, reference) == 1.0 or reference.count("{") != reference.count("}")
    counts.take()
    assert score(reference, "5") == 0.0
    assert counts.take() == {"math_verify: reference compared as text": 1}


def test_a_missing_column_ends_the_run() -> None:
    from isobit.rewards.graders import math as grader

    prompt, completion = (
        Prompt("train/0", "", (1,), {"solution": "5"}),
        Completion(SEQUENCE, "5", "stop"),
    )
    with pytest.raises(RewardError, match="math_verify needs the column 'answer'"):
        grader.score(prompt, completion)
    assert grader.score(prompt, completion, column="solution") == 1.0


def test_five_hundred_short_answers() -> None:
    """The benchmark's own: each is judged right."""
    made = answers()
    assert len(made) == COUNT and 200 < sum(answer.equal for answer in made) < 300
    assert [a for a in made if completed(a.reference, a.completion) != a.equal] == []
    assert counts.take() == {}


EXPONENTS = st.integers(-60, 60)
DIGITS = st.integers(1, 99)
FORMS = (r"{0} \cdot 10^{{{1}}}", r"x = {0} \times 10^{{{1}}}", r"\{{{0} \cdot 10^{{{1}}}, -1\}}")
FORMS += (r"[-2, {0} \cdot 10^{{{1}}}]", r"{0} \cdot 10^{{{1}}} y", r"{0}\pi \cdot 10^{{{1}}}")


@settings(deadline=None, max_examples=examples(60))
@given(st.sampled_from(FORMS), DIGITS, EXPONENTS, DIGITS, EXPONENTS)
def test_numbers_of_any_size_are_equal_where_their_values_are(
    form: str, first: int, power: int, second: int, other: int
) -> None:
    """In every place of an expression, however small they are."""
    gold, answer = form.format(first, power), form.format(second, other)
    equal = first * 10 ** (power + 60) == second * 10 ** (other + 60)
    assert score(gold, answer) == float(equal)
    assert score(gold, form.format(first * 10, power - 1)) == 1.0


@settings(deadline=None, max_examples=examples(60))
@given(DIGITS, st.integers(-20, 9), DIGITS, st.integers(-20, 9))
def test_decimals_that_both_round_to_nothing_differ(
    first: int, power: int, second: int, other: int
) -> None:
    one, two = first * 10.0**power, second * 10.0**other
    if abs(one - two) > 1e-3 * max(one, two):
        assert score(f"{one:.25f}", f"{two:.25f}") == 0.0
        assert score("0", f"{two:.25f}") == 0.0
    assert score(f"{one:.25f}", f"{one:.25f}0") == 1.0


@settings(deadline=None, max_examples=examples(60))
@given(st.integers(0, 10**7))
def test_commas_of_thousands_and_of_decimals(number: int) -> None:
    assert score(str(number), f"{number:,}") == 1.0
    assert score(f"{number:,}", str(number)) == 1.0
    if number % 100:
        assert score(f"{number / 100:.2f}", f"{number / 100:.2f}".replace(".", ",")) == 1.0
        assert score(str(number), f"{number / 100:.2f}".replace(".", ",")) == 0.0


def test_the_library_of_others_is_left_as_it_is() -> None:
    """Only a copy of its module compares relatively."""
    import math_verify

    one, other = (math_verify.parse(f"$\\frac{{1}}{{2^{{{n}}}}}$") for n in (98, 99))
    assert math_verify.verify(one, other, timeout_seconds=None)
    assert score(r"\frac{1}{2^{98}}", r"\frac{1}{2^{99}}") == 0.0
