"""Pairs of answers to the starter's sums of which one is right: what a small reward model learns
from.

    python -m tools.starter.preferences recipes

writes ``preferences.jsonl`` and ``preferences_held_out.jsonl``, the same on every machine.

Three kinds of pairs follow one another.  ``worked``: a sum that is worked out against a wrong
number; ``step``: against one with a wrong addition, after which all is off by the same; ``number``:
the right number alone against a wrong one, which a model of this size can hardly tell.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from itertools import cycle
from pathlib import Path
from random import Random

from isobit.starter.tasks import GUESS_RANGE, Problem, problems, question, worked_out

KINDS = ("worked", "step", "number")
SIZES = {"preferences.jsonl": (False, 240), "preferences_held_out.jsonl": (True, 60)}
"""Whether its problems are held out, and how many there are."""


def preference_pairs(of: Sequence[Problem], random: Random) -> Iterator[dict[str, str]]:
    """One pair for each problem."""
    for problem, kind in zip(of, cycle(KINDS)):
        right = str(sum(problem)) if kind == "number" else worked_out(problem)
        wrong = wrong_step(problem, random) if kind == "step" else wrong_number(problem, random)
        yield {"prompt": question(problem), "chosen": right, "rejected": wrong, "kind": kind}


def wrong_number(problem: Problem, random: Random) -> str:
    """A number near the sum that is not the sum, and not below zero."""
    return str(sum(problem) + _error(sum(problem), random))


def wrong_step(problem: Problem, random: Random) -> str:
    """Worked out, with an error in one addition that the later ones carry on."""
    steps = [int(step) for step in worked_out(problem).split(",")]
    at = random.randrange(len(steps))
    error = _error(steps[at], random)
    return ",".join(str(step + error * (index >= at)) for index, step in enumerate(steps))


def _error(number: int, random: Random) -> int:
    return random.choice(
        [e for e in range(-GUESS_RANGE, GUESS_RANGE + 1) if e != 0 and number + e >= 0]
    )


def main(arguments: Sequence[str]) -> None:
    """Write both files into a directory."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("directory", type=Path)
    directory: Path = parser.parse_args(arguments).directory
    for name, (held_out, count) in SIZES.items():
        random = Random(0)  # noqa: S311 (draws a text, keeps no secret)
        pairs = preference_pairs(problems(held_out)[:count], random)
        lines = "".join(json.dumps(pair) + "\n" for pair in pairs)
        (directory / name).write_text(lines, encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
