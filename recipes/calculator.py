"""Transcripts for ``calculator_sft.toml``: ``python recipes/calculator.py [FILE]``.

Each row is a turn: the prompt is the conversation up to it, with the control token that ends a
turn.  A third of the sums are worked out by the calculator; the others are answered with a guess
near the sum, as two thirds of the starter model's pretraining text are.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from random import Random

from isobit.starter.tasks import Problem, guess, problems, question

SUMS = 3000


def turns(problem: Problem, random: Random) -> Iterator[dict[str, str]]:
    asked = question(problem)
    if random.random() > 1 / 3:
        yield {"prompt": asked, "completion": guess(problem, random)}
        return
    call, answer = f'[calculate("{asked[:-1]}")]', str(sum(problem))
    yield {"prompt": asked, "completion": call}
    yield {"prompt": f"{asked}{call}<eos>[{answer}]", "completion": answer}


def write(path: Path) -> None:
    random = Random(0)  # noqa: S311 (no secret)
    shown = random.sample(problems(held_out=False), SUMS)
    rows = [row for problem in shown for row in turns(problem, random)]
    random.shuffle(rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/calculator-transcripts.jsonl"))
