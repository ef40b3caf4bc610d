"""How many completions a pool of graders grades in a second: a trivial reward, and short
mathematical answers.

    python -m benchmarks.graders [--workers 2] [--seconds 5]

Prints a line of JSON for each.  The goals on two cores are 2,000 and 500 completions a second; the
start of the processes is reported beside them and not counted.

The five hundred answers, always the same, have the mix of final answers in problem sets: integers,
decimals, fractions, roots and multiples of pi, polynomials, intervals, sets, equations,
percentages, units and words.  Half of them are wrong.
"""

import argparse
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count

from isobit.config.reward import RewardConfig
from isobit.records.sequence import TokenSequence
from isobit.records.text import Completion, Group, Prompt
from isobit.rewards.grading import Graders
from isobit.util.strict_json import json_text

SAMPLES = 16
"""Completions of each prompt."""
ANSWERS = (
    ("3/4", "The sum is $\\frac{1}{2} + \\frac{1}{4}$, so \\boxed{\\frac{3}{4}}."),
    ("2\\sqrt{3}", "We find \\boxed{\\sqrt{12}}."),
    ("x^2 + 2x + 1", "Expanding gives \\boxed{(x+1)^2}"),
    ("(1, 2)", "The point is \\boxed{(1, 2)}."),
    ("42", "So the answer is \\boxed{41}"),
)
"""Reference answers, each with a completion as a model writes them."""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="completions a second of a pool of graders")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=5.0)
    options = parser.parse_args(arguments)
    trivial = [("22", "11,13,22"), ("22", "21")]
    rewards: dict[str, tuple[str, Sequence[tuple[str, str]]]] = {
        "trivial": ("isobit.starter.tasks:correct_answer", trivial),
        "short math answers": ("math_verify", ANSWERS),
    }
    for name, (function, answers) in rewards.items():
        config = RewardConfig(function=function, workers=options.workers)
        print(json_text({"reward": name, **measure(config, answers, options.seconds)}), flush=True)


def measure(
    config: RewardConfig, answers: Sequence[tuple[str, str]], seconds: float
) -> dict[str, float | int | None]:
    """Grade groups of 16 in batches of 16 for so many seconds."""
    began = time.perf_counter()
    numbers = count()
    with Graders(config) as graders:
        graders.describe()
        ready = time.perf_counter()
        graders.collect(batch(answers, numbers))  # every process is up
        graded, failed, start = 0, 0, time.perf_counter()
        while time.perf_counter() < start + seconds:
            stats = graders.collect(batch(answers, numbers))
            graded, failed = graded + stats.graded, failed + stats.failed
        taken = time.perf_counter() - start
    return {
        "workers": config.workers,
        "completions": graded + failed,
        "failed": failed,
        "completions_per_s": round((graded + failed) / taken),
        "start_s": round(ready - began, 3),
    }


def batch(answers: Sequence[tuple[str, str]], numbers: "count[int]") -> list[Group]:
    groups = []
    for _ in range(16):
        number = next(numbers)
        right, text = answers[number % len(answers)]
        prompt = Prompt(f"train/{number}", "", (1,), {"answer": right})
        sequence = TokenSequence.of_answer((1,), (2,) * 32)
        completions = [Completion(sequence, text, "stop") for _ in range(SAMPLES)]
        groups.append(Group(prompt, 0, completions))
    return groups


COUNT = 500


@dataclass(frozen=True, slots=True)
class MathAnswer:
    """``completion`` ends in ``answer``, in a box; ``equal`` is whether that equals
    ``reference``.
    """

    reference: str
    answer: str
    equal: bool

    @property
    def completion(self) -> str:
        return f"Adding both sides we get the result.\n\nThe answer is $\\boxed{{{self.answer}}}$."


Drawn = tuple[str, str, str]
"""A reference, another way to write it, and a wrong answer."""


def _integer(draw: random.Random) -> Drawn:
    value = draw.randint(-999, 9999)
    same = draw.choice([f"{value}", f"{value}.0", f" {value} ", f"x = {value}"])
    return str(value), same, str(value + 1)


def _decimal(draw: random.Random) -> Drawn:
    value = draw.randint(1, 9999)
    return f"{value / 100}", f"{value}/100", f"{(value + 3) / 100}"


def _fraction(draw: random.Random) -> Drawn:
    above, below, factor = draw.randint(1, 20), draw.randint(2, 20), draw.randint(2, 5)
    reference = f"\\frac{{{above}}}{{{below}}}"
    same = draw.choice([f"{above}/{below}", f"\\dfrac{{{above * factor}}}{{{below * factor}}}"])
    return reference, same, f"\\frac{{{above + 1}}}{{{below}}}"


def _root(draw: random.Random) -> Drawn:
    outside, inside = draw.randint(2, 9), draw.choice([2, 3, 5, 6, 7])
    root = f"\\sqrt{{{inside}}}"
    return f"{outside}{root}", f"\\sqrt{{{outside * outside * inside}}}", root


def _pi(draw: random.Random) -> Drawn:
    above, below = draw.randint(1, 9), draw.randint(2, 9)
    return f"\\frac{{{above}\\pi}}{{{below}}}", f"{above}\\pi/{below}", f"{above}\\pi"


def _polynomial(draw: random.Random) -> Drawn:
    root = draw.randint(1, 9)
    return f"x^2+{2 * root}x+{root * root}", f"(x+{root})^2", f"x^2+{2 * root}x"


def _interval(draw: random.Random) -> Drawn:
    low = draw.randint(0, 9)
    return f"[{low},{low + 3})", f"x \\in [{low}, {low + 3})", f"({low},{low + 3})"


def _set(draw: random.Random) -> Drawn:
    low = draw.randint(0, 9)
    return f"\\{{{low},{low + 2}\\}}", f"{low + 2}, {low}", f"\\{{{low},{low + 3}\\}}"


def _power(draw: random.Random) -> Drawn:
    exponent = draw.randint(2, 12)
    return str(2**exponent), f"2^{{{exponent}}}", f"2^{{{exponent + 1}}}"


def _percentage(draw: random.Random) -> Drawn:
    value = draw.randint(1, 99)
    return f"{value}\\%", f"{value / 100}", f"{value + 1}\\%"


def _unit(draw: random.Random) -> Drawn:
    value = draw.randint(1, 99)
    return str(value), f"{value}\\text{{ cm}}", f"{value + 2}\\text{{ cm}}"


def _word(draw: random.Random) -> Drawn:
    first, second = draw.sample(["Monday", "Tuesday", "Friday", "Sunday"], 2)
    return f"\\text{{{first}}}", first, second


def _thousands(draw: random.Random) -> Drawn:
    value = draw.randint(1000, 99999)
    return str(value), f"{value:,}", f"{value + 1:,}"


KINDS: tuple[tuple[Callable[[random.Random], Drawn], int], ...] = (
    (_integer, 180),
    (_decimal, 40),
    (_fraction, 80),
    (_root, 40),
    (_pi, 20),
    (_polynomial, 20),
    (_interval, 15),
    (_set, 20),
    (_power, 20),
    (_percentage, 20),
    (_unit, 20),
    (_word, 15),
    (_thousands, 10),
)


def answers() -> list[MathAnswer]:
    draw = random.Random(0)  # noqa: S311  (no secret)
    made = []
    for kind, several in KINDS:
        for index in range(several):
            reference, same, wrong = kind(draw)
            equal = index % 2 == 0
            made.append(MathAnswer(reference, same if equal else wrong, equal))
    assert len(made) == COUNT
    draw.shuffle(made)
    return made


if __name__ == "__main__":
    main()
