"""What the deaths of a rollouter cost a run: the share of its time that counts, and whether its
bytes are those of a run without deaths.

    python -m benchmarks.rollouter_deaths recipes/quickstart.toml --directory DIR [--every 120]
        [--deaths 4] [--steps 400] [--undisturbed] [--out FILE.jsonl] [-- --KEY VALUE ...]

The run has one trainer and one rollouter, and a lag of 1. So many seconds after its first step, and
again after as many, the rollouter is ended by SIGKILL. Each of the ``WINDOW`` steps from a death on
takes longer than the median step of the ``WINDOW`` before and behind them by what the death costs
together; ``effective`` is the share of the time between the first and the last step that is left.
With ``--undisturbed`` the same run is made again without deaths, and ``isobit diff`` says whether
its tokens, log-probabilities, rewards, weights and metrics are equal. A JSON line of all.
"""

import argparse
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from time import perf_counter, sleep
from typing import Any

from benchmarks.common import append_row, around_dashes, printed
from isobit.store.journals import whole_lines

WINDOW, ROLLOUTER = 12, 1
_TRAIN = [sys.executable, "-m", "isobit.cli.main", "train"]


def run_with_deaths(
    words: Sequence[str], output: Path, every_s: float, deaths: int
) -> tuple[list[float], list[int]]:
    """Train, and kill the rollouter as often. -> The seconds at which each step was done, and how
    many were done at each death. Raises RuntimeError with the log's end where the run fails.
    """
    log, digests = output.with_suffix(".log"), output / "digests.jsonl"
    done_s, killed = list[float](), list[int]()
    with log.open("wb") as said:
        process = subprocess.Popen([*_TRAIN, *words], stdout=said, stderr=said)  # noqa: S603
        try:
            while process.poll() is None:
                done = sum(1 for _ in whole_lines(digests, 0)) if digests.exists() else 0
                done_s += [perf_counter()] * (done - len(done_s))
                due = len(killed) < deaths and done_s
                if due and perf_counter() > done_s[0] + every_s * (len(killed) + 1):
                    os.kill(rank_of(process.pid, ROLLOUTER), signal.SIGKILL)
                    killed.append(done)
                sleep(0.02)
        finally:
            process.kill()
    if process.returncode:
        tail = log.read_text(encoding="utf-8", errors="replace")[-3000:]
        raise RuntimeError(f"the run ended with {process.returncode}:\n{tail}")
    return done_s, killed


def rank_of(launcher: int, rank: int) -> int:
    """The process of a rank that the launcher has started."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            stat = (process / "stat").read_text(encoding="utf-8")
            environment = (process / "environ").read_bytes().split(b"\0")
        except OSError:  # it has ended, or is another user's
            continue
        parent = int(stat.rsplit(")", 1)[1].split()[1])
        if parent == launcher and f"RANK={rank}".encode() in environment:
            return int(process.name)
    raise RuntimeError(f"process {launcher} has no rank {rank}")


def lost_seconds(done_s: Sequence[float], killed: int) -> float:
    """By how much the steps from a death on took longer than as many around them."""
    steps = [later - sooner for sooner, later in pairwise(done_s)]
    first = killed - 1  # steps[n] ends with the step n + 1
    around = [*steps[max(0, first - WINDOW) : first], *steps[first + WINDOW :][:WINDOW]]
    after = steps[first : first + WINDOW]
    return sum(after) - len(after) * median(around)


def main() -> None:
    own, more = around_dashes(sys.argv[1:])
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("recipe", type=Path)
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--every", type=float, default=120.0, help="seconds")
    parser.add_argument("--deaths", type=int, default=4)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--undisturbed", action="store_true")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(own)
    options.directory.mkdir(parents=True, exist_ok=True)
    keys = ["--training.steps", str(options.steps), "--evaluation.every", "0", "--async.lag", "1"]
    keys += ["--cluster.processes", "2", "--cluster.rollouters", "1", *more]
    outputs = [options.directory / name for name in ("killed", "undisturbed")]
    done_s, killed = run_with_deaths(
        [str(options.recipe), *keys, "--output", str(outputs[0])],
        outputs[0],
        options.every,
        options.deaths,
    )
    lost = [lost_seconds(done_s, one) for one in killed]
    seconds = done_s[-1] - done_s[0]
    row: dict[str, Any] = {"recipe": options.recipe.name, "keys": keys, "every_s": options.every}
    row |= {"cores": len(os.sched_getaffinity(0)), "steps": len(done_s), "seconds": seconds}
    row |= {"killed_after": killed, "lost_s": lost, "effective": 1 - sum(lost) / seconds}
    if options.undisturbed:
        rest, _ = run_with_deaths(
            [str(options.recipe), *keys, "--output", str(outputs[1])], outputs[1], options.every, 0
        )
        diff = [sys.executable, "-m", "isobit.cli.main", "diff", *map(str, outputs)]
        said = subprocess.run(diff, check=False, capture_output=True, text=True)  # noqa: S603
        row |= {"undisturbed_s": rest[-1] - rest[0], "equal": said.returncode == 0}
        print(said.stdout, said.stderr, file=sys.stderr)
    printed(row)
    append_row(options.out, row)


if __name__ == "__main__":
    main()
