"""The text of the supervised run: problems of reasoning-gym with their answers, from several tasks,
and its tokens, which are bytes.

Bytes need no tokenizer's files, and what is measured does not hang on it: byte b is token b + 2,
behind a token that starts the sequence and before one that ends it.  All of it is learnt, question
and answer.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random

TASKS = (
    "chain_sum",
    "basic_arithmetic",
    "spell_backward",
    "letter_counting",
    "number_sorting",
    "gcd",
    "caesar_cipher",
    "leg_counting",
    "family_relationships",
)
TRAINING_ROWS, HELD_OUT_ROWS = 1100, 40
"""Of each task."""
START, END, _FIRST_BYTE = 0, 1, 2


Pair = tuple[Sequence[int], Sequence[int]]
"""What is given, and what is learnt."""


def write_text(directory: Path) -> None:
    """Both files, the tasks in turns."""
    from isobit.data.tasks import create_task

    directory.mkdir(parents=True, exist_ok=True)
    size = TRAINING_ROWS + HELD_OUT_ROWS
    tasks = [create_task(name, size, seed=0, options={}) for name in TASKS]
    for name, rows in (("train", range(TRAINING_ROWS)), ("held_out", range(TRAINING_ROWS, size))):
        entries = [task[row] for row in rows for task in tasks]
        lines = [
            json.dumps({"prompt": entry["question"], "completion": entry["answer"]})
            for entry in entries
        ]
        path = directory / f"{name}.jsonl"
        path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
        print(f"{path}: {len(lines):,} rows, {path.stat().st_size:,} bytes")


def read_pairs(path: Path) -> list[Pair]:
    """The rows of a file as tokens."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [
        (
            (START,),
            [
                *(byte + _FIRST_BYTE for byte in f"{row['prompt']}\n{row['completion']}".encode()),
                END,
            ],
        )
        for row in rows
    ]


def batches(pairs: Sequence[Pair], tokens: int, seed: int) -> Iterator[list[Pair]]:
    """Without end: as many pairs a batch as ``tokens`` hold, in a new order in each pass over all
    of them.
    """
    random, batch, room = Random(seed), list[Pair](), tokens  # noqa: S311 (draws an order, keeps no secret)
    while True:
        for given, learnt in random.sample(pairs, len(pairs)):
            length = len(given) + len(learnt)
            if length > room:
                yield batch
                batch, room = [], tokens
            batch.append((given, learnt))
            room -= length
