"""Runs in threads of one process, each on a CUDA stream of its own.

A policy of 135M leaves most of a card idle: a decode step of 128 sequences is a chain of some
hundred kernels with a few blocks each.  Kernels of several processes take turns on a card, those of
several streams of one process run at once.  What threads share is Python's lock, so a few of them,
in a few processes (``--jobs``), keep a card busy.

    python -m benchmarks.arms.threads DIR TASK:ARM:SEED .. [--threads 3] [--jobs 2]
        [--begin-within SECONDS] [-- --KEY VALUE]

Each run is the one that ``isobit train --resume`` makes, and writes to its own log.  A thread that
is done takes the next run, unless the seconds within which one may begin are over; the exit status
is 1 where a run failed, 3 where one was not begun.  Outside of the
main thread Python delivers no signals: a process that is ended loses its runs' steps since their
last checkpoints.
"""

import argparse
import gc
import io
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TextIO

import torch

from benchmarks.arms import answers, runs
from benchmarks.arms.suite import Changes, Run
from isobit import load_config, train
from isobit.kernels.backend import backend_of
from isobit.store.directory import write_json

_FAILED = 1
"""Exit status: some run failed."""
_SWITCH_S = 2e-4
"""How long a thread may keep Python's lock while others want it; one that launches kernels must not
wait for the 5 ms that are Python's choice.
"""


def run_all(
    wanted: Sequence[Run],
    directory: Path,
    cards: Sequence[str],
    jobs: int,
    threads: int,
    seconds: float,
    changes: Changes,
) -> bool:
    """As ``runs.run_all``, in ``jobs`` processes a card of so many threads, which share the runs
    out before they begin.
    """
    (directory / "runs").mkdir(parents=True, exist_ok=True)
    left = [run for run in wanted if not runs.is_made(run, directory)]
    places = list(cards) * jobs
    live: list[subprocess.Popen[bytes]] = []
    for place, card in enumerate(places):
        if share := left[place :: len(places)]:
            words = command(share, directory, threads, jobs, changes)
            live.append(runs.on_card(card, words, directory / "runs" / f"threads-{place}.log"))
    until = time.monotonic() + seconds
    while any(one.poll() is None for one in live) and time.monotonic() < until:
        time.sleep(1.0)
    for one in live:
        one.kill()  # it hears no signal; what has ended is past hearing this one
    codes = [one.wait() for one in live]
    return not any(codes)


def command(
    share: Sequence[Run], directory: Path, threads: int, jobs: int, changes: Changes
) -> list[str]:
    """The command line of a process that makes these runs."""
    named = [f"{run.task}:{run.arm}:{run.seed}" for run in share]
    numbers = ["--threads", str(threads), "--jobs", str(jobs)]
    words = runs.words_of(changes)
    return [sys.executable, "-m", __name__, str(directory), *named, *numbers, "--", *words]


def main() -> int:
    words, changed = runs.parted(sys.argv[1:])
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("directory", type=Path)
    parser.add_argument("runs", nargs="+", type=_run_of)
    parser.add_argument("--threads", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--begin-within", type=float, default=float("inf"))
    given = parser.parse_args(words)
    changes = runs.by_key(changed)
    sys.setswitchinterval(_SWITCH_S)
    if torch.cuda.is_available():
        backend_of(torch.device("cuda"))  # its libraries are loaded once, before there are threads
    said = SaidByThread(sys.stdout)
    sys.stdout = sys.stderr = said
    until = time.monotonic() + given.begin_within

    def make(run: Run) -> int:
        if time.monotonic() > until:
            print(f"{run.name} is not begun: its time is over")
            return runs.LEFT
        beside = given.jobs * given.threads
        return 0 if _make(run, given.directory, beside, changes, said) else _FAILED

    with ThreadPoolExecutor(given.threads) as pool:
        codes = set(pool.map(make, given.runs))
    return next((code for code in (_FAILED, runs.LEFT) if code in codes), 0)


def _run_of(name: str) -> Run:
    task, arm, seed = name.split(":")
    return Run(task, arm, int(seed))


def _make(run: Run, directory: Path, beside: int, changes: Changes, said: "SaidByThread") -> bool:
    """Train, answer in another flow, keep; False for one that failed, whose log says why."""
    log = runs.log_path(run, directory)
    with log.open("a", encoding="utf-8") as file, said.into(file), own_stream():
        try:
            recipe = runs.recipe_of(run.problems)
            train(load_config(recipe, runs.training_words(run, directory, changes)), resume=True)
            runs.keep(run, directory, beside)
            give_back()
            folder, words = runs.answers_words(run, directory, changes)
            answered = answers.answer(folder, recipe, words)
            write_json(runs.answers_path(run, directory), answered)
            runs.keep_answers(run, directory)
        except Exception:  # the others go on
            traceback.print_exc()
            return False
        finally:
            give_back()
    return True


def give_back() -> None:
    """To the card, what a run that is over had of it: nobody else may use what torch keeps of a
    stream, and no process what another one keeps.
    """
    gc.collect()
    if torch.cuda.is_available():
        memory = backend_of(torch.device("cuda")).memory
        assert memory is not None
        memory.release_cached()


def own_stream() -> AbstractContextManager[object]:
    """A block whose kernels may run beside those of other threads."""
    if not torch.cuda.is_available():
        return nullcontext()
    return torch.cuda.stream(torch.cuda.Stream())


class SaidByThread(io.TextIOBase):
    """Standard output that goes to the file of whatever thread writes."""

    def __init__(self, otherwise: TextIO) -> None:
        self._otherwise = otherwise
        self._files = threading.local()

    @contextmanager
    def into(self, file: TextIO) -> Iterator[None]:
        """A block of this thread that writes there."""
        self._files.own = file
        try:
            yield
        finally:
            del self._files.own

    def write(self, text: str) -> int:
        """See ``TextIOBase``."""
        file: TextIO = getattr(self._files, "own", self._otherwise)
        written = file.write(text)
        file.flush()
        return written


if __name__ == "__main__":
    sys.exit(main())
