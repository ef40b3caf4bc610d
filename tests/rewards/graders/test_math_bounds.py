"""Which mathematical text is small enough to be parsed; test_math_verify has what is not."""

import pytest

from isobit.rewards.graders.math_bounds import LONGEST, excess, plain


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
    assert excess(plain(text)) is None


def test_the_length_itself() -> None:
    assert excess("x+" * (LONGEST // 2)) is None
    assert excess("x+" * (LONGEST // 2) + "1") == "length"
