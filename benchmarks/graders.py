"""How many completions a pool of graders grades in a second: a trivial reward, and short answers in
mathematics.

    python -m benchmarks.graders [--workers 2] [--seconds 5]

Prints a line of JSON for each.  The floor that the project sets itself on two cores is 2,000 and
500; starting the processes and importing their modules is not counted, and is told beside.
"""

import argparse
import json
import time
from collections.abc import Sequence
from itertools import count

from isobit.config.reward import RewardConfig
from isobit.records.sequence import TokenSequence
from isobit.records.text import Completion, Group, Prompt
from isobit.rewards.grading import Graders

SAMPLES = 16
"""Of a prompt."""
ANSWERS = (
    ("3/4", "The sum is $\\frac{1}{2} + \\frac{1}{4}$, so \\boxed{\\frac{3}{4}}."),
    ("2\\sqrt{3}", "We find \\boxed{\\sqrt{12}}."),
    ("x^2 + 2x + 1", "Expanding gives \\boxed{(x+1)^2}"),
    ("(1, 2)", "The point is \\boxed{(1, 2)}."),
    ("42", "So the answer is \\boxed{41}"),
)
"""What is right, and an answer of a model's kind."""


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
        print(json.dumps({"reward": name, **measure(config, answers, options.seconds)}), flush=True)


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


if __name__ == "__main__":
    main()
