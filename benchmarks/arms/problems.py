"""The two tasks of the proof, and solutions of theirs that are worked out.

    gsm         word problems of reasoning-gym's ``gsm_symbolic``: a hundred templates with other
                names and numbers each time; a solution has some hundred tokens
    multiply    products of two large numbers, digit by digit, as it is done on paper: a solution
                has about a thousand tokens

A solution ends with ``#### ANSWER``; the reward is 1 for that, and 0 otherwise.  Problems of one
split do not stand in another: seeds of reasoning-gym are further apart than their sizes, and
products come from disjoint residues of the first factor.
"""

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal, get_args

Task = Literal["gsm", "multiply"]
Split = Literal["solutions", "train", "held_out"]
TASKS: tuple[Task, ...] = get_args(Task)
SIZES: dict[Split, int] = {"solutions": 20_000, "train": 20_000, "held_out": 2_000}
"""Rows of what is fine-tuned on, of the prompts of reinforcement learning, and of evaluation."""
DIGITS = 6, 5
_SPLITS: tuple[Split, ...] = get_args(Split)
_SEED_STEP = 10_000_000

Row = dict[str, str]


def write_problems(directory: Path) -> None:
    """``TASK.SPLIT.jsonl`` of every task and split, the same bytes each time."""
    directory.mkdir(parents=True, exist_ok=True)
    for task in TASKS:
        for split in _SPLITS:
            lines = [json.dumps(row) + "\n" for row in rows_of(task, split, SIZES[split])]
            (directory / f"{task}.{split}.jsonl").write_text("".join(lines), encoding="utf-8")


def rows_of(task: Task, split: Split, count: int) -> list[Row]:
    """So many problems: ``prompt``, ``answer``, and ``completion``, a solution."""
    makers: dict[Task, Callable[[Split, int], Iterator[Row]]] = {"gsm": _gsm, "multiply": _multiply}
    return list(makers[task](split, count))


def _gsm(split: Split, count: int) -> Iterator[Row]:
    import reasoning_gym

    seed = _SEED_STEP * (1 + _SPLITS.index(split))
    for entry in reasoning_gym.create_dataset("gsm_symbolic", size=count, seed=seed):
        answer = str(entry["answer"])
        text = entry["metadata"]["answer_cot"].rpartition("####")[0].rstrip()
        prompt = f"{entry['question']}\nThink step by step, and end with #### and the answer."
        yield {"prompt": prompt, "completion": f"{text}\n#### {answer}", "answer": answer}


def _multiply(split: Split, count: int) -> Iterator[Row]:
    place = _SPLITS.index(split)
    random_numbers = random.Random(_SEED_STEP + place)  # noqa: S311 (no secret)
    seen: set[tuple[int, int]] = set()
    while len(seen) < count:
        first, second = (
            random_numbers.randrange(10 ** (digits - 1), 10**digits) for digits in DIGITS
        )
        first -= first % len(_SPLITS) - place  # a residue for each split
        if (first, second) not in seen and len(str(first)) == DIGITS[0]:
            seen.add((first, second))
            yield {
                "prompt": f"Multiply {first} by {second}, digit by digit as on paper. "
                "End with #### and the product.",
                "completion": product_worked_out(first, second),
                "answer": str(first * second),
            }


def product_worked_out(first: int, second: int) -> str:
    """Partial products from the last digit of the second factor, with carries; then their sum by
    columns, from the last.
    """
    lines: list[str] = []
    for place, digit in enumerate(reversed(str(second))):
        lines.append(f"{first} * {digit}, shifted by {place}:")
        carry = 0
        for own in map(int, reversed(str(first))):
            total = own * int(digit) + carry
            lines.append(f"{own}*{digit}+{carry}={total}: write {total % 10}, carry {total // 10}")
            carry = total // 10
        lines.append(f"= {first * int(digit)}{'0' * place}")
    partial = [first * int(digit) * 10**place for place, digit in enumerate(reversed(str(second)))]
    lines.append("Sum by columns:")
    carry = 0
    for column in range(len(str(first * second))):
        digits = [number // 10**column % 10 for number in partial]
        total = sum(digits) + carry
        terms = "+".join(map(str, [*digits, carry]))
        lines.append(f"{terms}={total}: write {total % 10}, carry {total // 10}")
        carry = total // 10
    return "\n".join([*lines, f"#### {first * second}"])
