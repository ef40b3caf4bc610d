"""Products that a calculator works out: problems, transcripts of a model that uses it now and then,
and the reward, for ``tools_sft.toml`` and ``tools.toml``.

    python recipes/tools.py FOLDER [--chat]

    transcripts.jsonl   turns to fine-tune on: ``prompt`` (what was said before), ``completion``
    train.jsonl         problems to learn from: ``prompt`` and ``answer``
    held_out.jsonl      problems of the evaluation

No problem stands in two files.  Transcripts are imperfect, so that reinforcement learning has
something to find out: half of them answer at once, with a guess near the product, and a quarter
of the calls have a wrong digit.  With ``--chat`` a conversation is a list of messages, for a model
with a chat template; otherwise it is text with the control token of the starter's tokenizer.
"""

import argparse
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from random import Random
from typing import Any

from isobit.records.text import Completion, Prompt

GUESSED, MISCOPIED = 1 / 2, 1 / 4
"""Shares of the transcripts without a call, and of the calls with a wrong digit."""
OFF = 0.1
"""The largest relative error of a guess."""
DIGITS = 4, 3
SIZES = {"transcripts": 20_000, "train": 8_000, "held_out": 500}
"""Problems in each file."""
Factors = tuple[int, int]
Row = dict[str, Any]


def correct(prompt: Prompt, completion: Completion) -> float:
    """The reward: 1 where the last number of the last turn is the product."""
    numbers = re.findall(r"\d[\d,]*", completion.text)
    return float(bool(numbers) and numbers[-1].replace(",", "") == prompt.row["answer"])


def question(factors: Factors) -> str:
    return "What is {} * {}?".format(*factors)


def problems(count: int, random: Random) -> list[Factors]:
    """So many different pairs of factors."""
    found: dict[Factors, None] = {}
    while len(found) < count:
        first, second = (random.randrange(10 ** (most - 1), 10**most) for most in DIGITS)
        found[first, second] = None
    return list(found)


def conversation(factors: Factors, random: Random) -> list[str]:
    """What is said in turns, the user's or the tool's first, the model's second."""
    product = factors[0] * factors[1]
    if random.random() < GUESSED:
        return [question(factors), str(round(product * random.uniform(1 - OFF, 1 + OFF)))]
    first, second = miscopied(factors, random) if random.random() < MISCOPIED else factors
    result = str(first * second)
    return [question(factors), f"[multiply({first}, {second})]", f"[{result}]", result]


def miscopied(factors: Factors, random: Random) -> Factors:
    """The factors with another digit, not 0, in the place of one."""
    digits = list(map(str, factors))
    which = random.randrange(len(digits))
    place = random.randrange(len(digits[which]))
    others = "123456789".replace(digits[which][place], "")
    digits[which] = digits[which][:place] + random.choice(others) + digits[which][place + 1 :]
    return int(digits[0]), int(digits[1])


def turns(said: list[str], chat: bool) -> Iterator[Row]:
    """A row for each turn of the model."""
    for place in range(1, len(said), 2):
        before = said[:place]
        roles = ("assistant" if index % 2 else "user" for index in range(place))
        messages = [
            {"role": role, "content": text} for role, text in zip(roles, before, strict=True)
        ]
        text = "".join(f"{one}<eos>" if index % 2 else one for index, one in enumerate(before))
        yield {"prompt": messages if chat else text, "completion": said[place]}


def write(folder: Path, chat: bool = False) -> None:
    """All files, the same bytes each time."""
    random = Random(0)  # noqa: S311 (no secret)
    drawn = iter(problems(sum(SIZES.values()), random))
    folder.mkdir(parents=True, exist_ok=True)
    for name, size in SIZES.items():
        ours = [next(drawn) for _ in range(size)]
        if name == "transcripts":
            rows = [row for one in ours for row in turns(conversation(one, random), chat)]
            random.shuffle(rows)
        else:
            rows = [{"prompt": question(one), "answer": str(one[0] * one[1])} for one in ours]
        write_rows(folder / f"{name}.jsonl", rows)


def write_rows(path: Path, rows: Iterable[Row]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--chat", action="store_true", help="conversations as messages")
    arguments = parser.parse_args()
    write(arguments.folder, arguments.chat)


if __name__ == "__main__":
    main()
