"""Data of the guessing game: ``python recipes/guess.py`` writes them to ``runs/guess-data``.

    transcripts.jsonl   turns of games whose guesses are random, for ``guess_sft.toml``
    games.jsonl         games to learn from, for ``guess.toml``
    held_out.jsonl      other games, for its evaluation

A game has a name, which says nothing of its number, and a number from 1 to 7.  In a transcript
each turn is a row: the prompt is the game up to the turn, with the control token that ends a turn.
"""

import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from random import Random

HIGHEST, GUESSES = 7, 3
SHOWN, GAMES, HELD_OUT = 1000, 1000, 200
Row = dict[str, str | int]


def transcript(name: str, random: Random) -> Iterator[Row]:
    """The turns of a game, which ends at the number or after three guesses."""
    secret, game, said = random.randint(1, HIGHEST), f"{name}:", ""
    for _ in range(GUESSES):
        if said == "right":
            break
        number = random.randint(1, HIGHEST)
        call = f"[guess({number})]"
        yield {"prompt": game, "completion": call}
        said = "right" if number == secret else "higher" if secret > number else "lower"
        game += f"{call}<eos>[{said}]"
    yield {"prompt": game, "completion": "done"}


def write(folder: Path) -> None:
    random = Random(0)  # noqa: S311 (no secret)
    names = [str(name) for name in random.sample(range(10_000), SHOWN + GAMES + HELD_OUT)]
    turns = [row for name in names[:SHOWN] for row in transcript(name, random)]
    random.shuffle(turns)
    games: list[Row] = [
        {"prompt": f"{name}:", "secret": random.randint(1, HIGHEST)} for name in names[SHOWN:]
    ]
    folder.mkdir(parents=True, exist_ok=True)
    _write_rows(folder / "transcripts.jsonl", turns)
    _write_rows(folder / "games.jsonl", games[:GAMES])
    _write_rows(folder / "held_out.jsonl", games[GAMES:])


def _write_rows(path: Path, rows: Iterable[Row]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/guess-data"))
