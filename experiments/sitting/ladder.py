"""A sitting of the ladder on the cards of a machine: starts, how they answer untrained, then runs.

    python3 experiments/sitting/ladder.py --starts 443m 108m --until 1600 --runs
        ladder-443m:bf16:0 ladder-443m:fp8:0 ladder-443m:int8:0 ladder-108m:fp8-linear:0

Starts are made side by side, each on a card, and answer then.  A run begins where there is room as
soon as its start is there: the first in the order given that fits, and none that would not end
before ``--until``, seconds after the sitting's beginning, or whose start is not there and is not
being made; both are said.  Then whatever runs is killed.
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from threading import Lock, Thread

import torch

from experiments.proof import runs
from experiments.proof.ladder import PARAMETERS
from experiments.proof.suite import LADDER, Run, run_named

ROOM = 12
"""Of a card, in runs of ``27m``."""
TAKES = {"27m": 1, "hybrid": 1, "108m": 3, "443m": 6, "1.1b": 6}
"""What a run takes of it, and a start of that size while it is made."""
NEEDS = {"27m": 480, "hybrid": 600, "108m": 640, "443m": 1270, "1.1b": 1200}
"""Seconds of a run where the card is full.  Alone the larger two take 800 and 780."""
KV_GIB = {"27m": 4, "hybrid": 4, "108m": 6, "443m": 16, "1.1b": 16}


class Sitting:
    """What is made, is to be made, and goes on; room by card."""

    def __init__(
        self,
        directory: Path,
        begun: float,
        until: float,
        cards: Sequence[str],
        wanted: Sequence[Run],
        shared: Sequence[str],
        needs: float | None = None,
    ) -> None:
        self._directory = directory
        self._begun, self._until, self._needs = begun, until, needs
        self._making = list[Thread]()
        self._left = [run for run in wanted if not runs.is_made(run, directory)]
        self._live: list[runs.Live] = []
        self._beside: dict[Run, list[int]] = {}
        self._shared = set(shared)
        self._room = dict.fromkeys(cards, ROOM)
        self._ready = {size for size in TAKES if (directory / f"start-{size}/start.json").is_file()}
        self._lock = Lock()

    def main(self, starts: Sequence[str]) -> None:
        self._making = [
            Thread(target=self._make_start, args=(size, card), daemon=True)
            for size, card in zip(starts, self._room, strict=False)  # cards may be left
        ]
        for thread in self._making:
            thread.start()
        while self._seconds_left() > 0 and (self._live or self._left or self._makes_starts()):
            self._collect()
            self._begin()
            time.sleep(1.0)
        for one in self._live:
            one.process.kill()
            self._say(f"{one.run.name} was cut off")

    def _seconds_left(self) -> float:
        return self._begun + self._until - time.time()

    def _say(self, text: str) -> None:
        print(f"{time.time() - self._begun:6.0f} s  {text}", flush=True)

    def _make_start(self, size: str, card: str) -> None:
        self._take(card, TAKES[size])
        proof = [sys.executable, "-m", "experiments.proof"]
        more = ["--", "--rollout.kv_memory_gib", str(KV_GIB[size]), "--checkpoint.every", "0"]
        ladder = [*proof, "ladder", str(self._directory), "--size", size, *more]
        if self._ended(f"start-{size}", card, ladder):
            self._ready.add(size)
        if size in PARAMETERS and size in self._ready:
            self._ended(f"flows-{size}", card, [*proof, "flows", *ladder[4:7]])
        self._take(card, -TAKES[size])

    def _take(self, card: str, room: int) -> None:
        with self._lock:
            self._room[card] -= room

    def _ended(self, name: str, card: str, command: list[str]) -> bool:
        process = runs.on_card(card, command, self._directory / f"{name}.log")
        try:
            status = process.wait(self._seconds_left())
        except subprocess.TimeoutExpired:
            process.kill()
            status = "cut off"
        self._say(f"{name} on card {card}: {status}")
        return status == 0

    def _collect(self) -> None:
        for one in self._live:
            there = sum(other.card == one.card for other in self._live) + (one.card in self._shared)
            self._beside.setdefault(one.run, []).append(there)
        for one in [one for one in self._live if one.process.poll() is not None]:
            self._live.remove(one)
            self._take(one.card, -TAKES[_size(one.run)])
            jobs = round(fmean(self._beside[one.run]))
            if not runs.keep_if_finished(one, self._directory, jobs):
                continue
            if one.answers:
                self._say(f"{one.run.name} is made")
            else:
                self._start(one.run, one.card, answers=True)

    def _begin(self) -> None:
        for run in list(self._left):
            if (obstacle := self._obstacle(run)) is not None:
                self._left.remove(run)
                self._say(f"{run.name} is left out: {obstacle}")
                continue
            card = max(self._room, key=self._room.__getitem__)
            if _size(run) in self._ready and self._room[card] >= TAKES[_size(run)]:
                self._left.remove(run)
                self._start(run, card, answers=False)

    def _obstacle(self, run: Run) -> str | None:
        """Why the run can no longer be made, or None."""
        makes_starts = self._makes_starts()  # before what they have made is looked at
        if _size(run) not in self._ready and not makes_starts:
            return f"there is no start of {_size(run)}"
        left, needs = self._seconds_left(), self._needs or NEEDS[_size(run)]
        return f"it needs {needs:.0f} s of {left:.0f}" if needs > left else None

    def _makes_starts(self) -> bool:
        return any(thread.is_alive() for thread in self._making)

    def _start(self, run: Run, card: str, *, answers: bool) -> None:
        self._take(card, TAKES[_size(run)])
        command = runs.answers_command if answers else runs.training_command
        words = command(run, self._directory, {"rollout.kv_memory_gib": str(KV_GIB[_size(run)])})
        process = runs.on_card(card, words, runs.log_path(run, self._directory))
        self._live.append(runs.Live(run, card, process, answers))
        self._say(f"{run.name} {'answers' if answers else 'begins'} on card {card}")


def _size(run: Run) -> str:
    return run.task.removeprefix(LADDER)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--starts", nargs="+", choices=TAKES, default=[])
    parser.add_argument("--runs", nargs="+", type=run_named, default=[])
    parser.add_argument("--until", type=float, required=True)
    parser.add_argument("--needs", type=float, help="seconds of a run where the card is not full")
    parser.add_argument("--cards", nargs="+", help="all, where none is named")
    parser.add_argument("--shared", nargs="+", default=[], help="cards on which others work too")
    options = parser.parse_args()
    cards = options.cards or [str(card) for card in range(torch.cuda.device_count())]
    directory, begun = Path(os.environ["PROOF"]), float(Path(os.environ["BEGUN"]).read_text())
    (directory / "runs").mkdir(parents=True, exist_ok=True)
    if len(options.starts) > len(cards):
        parser.error(
            f"{len(options.starts)} starts for {len(cards)} cards: each has one of its own"
        )
    sitting = Sitting(
        directory, begun, options.until, cards, options.runs, options.shared, options.needs
    )
    sitting.main(options.starts)


if __name__ == "__main__":
    main()
