"""Does exact FP8 learn like BF16, and what does a mismatch of rollout and training cost?  Arms by
seeds, on a real checkpoint.

    tools/smollm2.sh MODEL                                  # SmolLM2-135M-Instruct, in shared/
    python -m benchmarks.proof problems DIR
    python -m benchmarks.proof start DIR --model MODEL      # fine-tuned once, for all arms
    python -m benchmarks.proof start DIR --model MODEL --precision fp8      # for from-fp8
    python -m benchmarks.proof outliers DIR                 # the start of stress-outliers
    python -m benchmarks.proof flows DIR [--cards 0 1] [--jobs 3]       # where FP8 loses, untrained
    python -m benchmarks.proof run DIR --tasks gsm multiply [--cards 0 1] [--jobs 3] [--threads 3]
        [--seconds S]
    python -m benchmarks.proof look DIR                     # how far all runs are
    python -m benchmarks.proof table ROWS                   # DIR/rows, or benchmarks/results/proof
    python -m benchmarks.proof page ROWS [--out proof.html] [--picture docs/pictures/proof.svg]

``run`` goes on with what is not finished, ``--jobs`` runs at a time on each card, and tells its
runs to write a checkpoint when the seconds are over; exit status 3 says that something is left.
With ``--threads`` each of the jobs is a process that makes so many runs at once
(``benchmarks.arms.threads``).
Rows of earlier sittings, copied to DIR/rows, are not made again.
Anything behind ``--`` goes to ``isobit``: ``-- --training.steps 2``.
"""

import argparse
import subprocess
import sys
from pathlib import Path

import torch

from benchmarks.arms import (
    figures,
    flows,
    look,
    outliers,
    page,
    problems,
    rows,
    runs,
    suite,
    threads,
)

FINE_TUNE = Path(__file__).parent / "arms" / "fine_tune.toml"


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("problems", "start", "outliers", "flows", "run", "look", "table", "page"):
        commands.add_parser(name).add_argument("directory", type=Path)
    start, run = commands.choices["start"], commands.choices["run"]
    drawn = commands.choices["page"]
    drawn.add_argument("--out", type=Path, default=Path("proof.html"))
    drawn.add_argument("--picture", type=Path)
    start.add_argument("--model", type=Path, required=True)
    start.add_argument("--precision", choices=("bf16", "fp8"), default="bf16")
    run.add_argument("--tasks", nargs="+", choices=suite.NAMES, required=True)
    run.add_argument("--arms", nargs="+", choices=suite.ALL_ARMS, default=suite.ALL_ARMS)
    run.add_argument("--seeds", type=int, default=4)
    for command in run, commands.choices["flows"]:
        command.add_argument("--cards", nargs="+", default=["0"])
        command.add_argument("--jobs", type=int, default=1)
    run.add_argument("--threads", type=int, default=1)
    run.add_argument("--seconds", type=float, default=float("inf"))
    return parser


def main() -> int:
    words, changes = runs.parted(sys.argv[1:])
    arguments = make_parser().parse_args(words)
    directory: Path = arguments.directory
    match arguments.command:
        case "problems":
            problems.write_problems(directory / "data")
        case "start":
            return fine_tune(directory, arguments.model, arguments.precision, changes)
        case "outliers":
            outliers.plant(directory / "start" / "model", directory / "outliers" / "model")
        case "flows":
            where = arguments.cards, arguments.jobs
            found = flows.answer_all(directory, *where, runs.by_key(changes))
            print("\n".join(flows.markdown(found)))
        case "run":
            wanted = suite.wanted(arguments.tasks, arguments.arms, range(arguments.seeds))
            where = arguments.cards, arguments.jobs
            how = arguments.seconds, runs.by_key(changes)
            if arguments.threads > 1:
                done = threads.run_all(wanted, directory, *where, arguments.threads, *how)
            else:
                done = runs.run_all(wanted, directory, *where, *how)
            return 0 if done else runs.LEFT
        case "look":
            print("\n".join(look.look(directory)))
        case _:
            report(arguments)
    return 0


def report(arguments: argparse.Namespace) -> None:
    """The table, or the page and the picture, of the rows in a folder."""
    found = rows.read_finished(arguments.directory), rows.read_repeats(arguments.directory)
    if not found[0]:
        raise SystemExit(
            f"no finished run in {arguments.directory}: name the folder that has rows "
            f"(TASK-ARM-SEED{rows.SUFFIX}), DIR/rows of a proof that was run"
        )
    torch.set_num_threads(1)  # a bootstrap's draw is little: threads beside other work wait for it
    if arguments.command == "table":
        print("\n".join(figures.markdown(figures.tables(*found))))
        return
    print(page.write_html(*found, arguments.out))
    if arguments.picture is not None:
        print(page.write_picture(found[0], arguments.picture))


def fine_tune(directory: Path, model: Path, precision: str, changes: list[str]) -> int:
    """``isobit sft`` on the solutions of both tasks, in one file."""
    data = directory / "data"
    solutions = [data / f"{task}.solutions.jsonl" for task in problems.TASKS]
    joined = data / "solutions.jsonl"
    joined.write_bytes(b"".join(path.read_bytes() for path in solutions))
    output = directory / ("start" if precision == "bf16" else f"start-{precision}")
    held_out = {task: data / f"{task}.held_out.jsonl" for task in problems.TASKS}
    words = [
        *("--model", model, "--output", output, "--data.train.path", joined),
        *("--precision", precision),
        *(part for task, path in held_out.items() for part in (f"--data.eval.{task}.path", path)),
        *changes,
    ]
    command = [sys.executable, "-m", "isobit.cli.main", "sft", FINE_TUNE, "--resume", *words]
    return subprocess.run(list(map(str, command)), check=False).returncode  # noqa: S603 (this file)


if __name__ == "__main__":
    sys.exit(main())
