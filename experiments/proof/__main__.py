"""Does exact FP8 learn like BF16, and what does a mismatch of rollout and training cost?  Arms by
seeds, on a real checkpoint.

    tools/smollm2.sh MODEL                                  # SmolLM2-135M-Instruct, in shared/
    python -m experiments.proof problems DIR
    python -m experiments.proof start DIR --model MODEL      # fine-tuned once, for all arms
    python -m experiments.proof start DIR --model MODEL --precision fp8      # for from-fp8
    python -m experiments.proof ladder DIR --size 27m        # a start of another size, or its text
    python -m experiments.proof outliers DIR                 # the start of stress-outliers
    python -m experiments.proof flows DIR [--cards 0 1] [--jobs 3]     # where FP8 loses, untrained
    python -m experiments.proof flows DIR --size 27m         # a start of the ladder, untrained
    python -m experiments.proof run DIR --tasks gsm multiply [--cards 0 1] [--jobs 3]
        [--seconds S] [--begin-within S]
    python -m experiments.proof run DIR --runs gsm:fp8:2 gsm:bf16:0:again        # as for --tasks
    python -m experiments.proof cost DIR --tasks gsm ladder-27m          # each arm alone on a card
    python -m experiments.proof look DIR                     # how far all runs are
    python -m experiments.proof table ROWS                  # DIR/rows, or experiments/results/proof
    python -m experiments.proof decide ROWS                  # arms by the rewards of training
    python -m experiments.proof page ROWS [--out proof.html] [--picture docs/pictures/proof.svg]
    python -m experiments.proof sizes ROWS [--page results.md] [--advice PATH]
        [--picture docs/pictures/proof_sizes.svg]

``run`` goes on with what is not finished, ``--jobs`` runs at a time on each card, and tells its
runs to write a checkpoint when the seconds are over; exit status 3 says that something is left.
A run that is made ``again`` leaves its row among the repeats, with which the table compares.
``sizes`` has the table of the ladder beside SmolLM2, and puts it into a page; ``--advice`` writes
what ``isobit flows`` says of sizes (``isobit.observe.flow_choice.BY_SIZE``).
Rows of earlier sittings, copied to DIR/rows, are not made again.
Anything behind ``--`` goes to ``isobit``: ``-- --training.steps 2``.
"""

import argparse
import subprocess
import sys
from pathlib import Path

import torch

from experiments.proof import cost, decide, figures, ladder, page, rows, runs, sizes, suite
from experiments.proof import rows as rows_module
from experiments.proof import runs as runs_module
from experiments.proof import suite as suite_module
from isobit.config.load import load_recipe
from isobit.config.recipes import SftConfig
from isobit.store.directory import write_json

FINE_TUNE, LADDER = (Path(__file__).parent / f"{name}.toml" for name in ("fine_tune", "ladder"))
_SIZES_TO = "page", "picture", "advice"
LEFT = 3
"""Exit status: some run is not finished."""


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("problems", "start", "ladder", "outliers", "flows", "run", "cost", "look"):
        commands.add_parser(name).add_argument("directory", type=Path)
    for name in ("table", "decide", "page", "sizes"):
        commands.add_parser(name).add_argument("directory", type=Path)
    commands.choices["ladder"].add_argument(
        "--size", choices=(*ladder.STARTS_OF, "text"), required=True
    )
    start, run = commands.choices["start"], commands.choices["run"]
    drawn = commands.choices["page"]
    drawn.add_argument("--out", type=Path, default=Path("proof.html"))
    over_sizes = commands.choices["sizes"]
    for command, option in (drawn, "picture"), *((over_sizes, o) for o in _SIZES_TO):
        command.add_argument(f"--{option}", type=Path)
    start.add_argument("--model", type=Path, required=True)
    start.add_argument("--precision", choices=("bf16", "fp8"), default="bf16")
    which = run.add_mutually_exclusive_group(required=True)
    which.add_argument("--tasks", nargs="+", choices=suite.NAMES)
    which.add_argument("--runs", nargs="+", type=suite.run_named, metavar="TASK:ARM:SEED[:again]")
    run.add_argument("--arms", nargs="+", choices=suite.ALL_ARMS, default=suite.ALL_ARMS)
    run.add_argument("--seeds", type=int, default=4)
    for command in run, commands.choices["flows"]:
        command.add_argument("--cards", nargs="+", default=["0"])
        command.add_argument("--jobs", type=int, default=1)
    flows = commands.choices["flows"]
    flows.add_argument("--size", choices=ladder.PARAMETERS, help="a start of the ladder")
    flows.add_argument("--arms", nargs="+", choices=ladder.FLOWS, default=tuple(ladder.FLOWS))
    flows.add_argument("--problems", type=int, help="with --size: more than the runs answer")
    run.add_argument("--seconds", type=float, default=float("inf"))
    run.add_argument("--begin-within", type=float, default=float("inf"))
    costs = commands.choices["cost"]
    tasks = suite_module.TASKS
    costs.add_argument("--tasks", nargs="+", choices=(*tasks, *suite.LADDERS), default=tasks)
    costs.add_argument("--steps", type=int, default=cost.STEPS)
    costs.add_argument("--card", default="0")
    costs.add_argument(
        "--at-once",
        type=int,
        default=cost.AT_ONCE,
        help="arms whose memory the card must hold: one that has too little trains slowly",
    )
    return parser


def main() -> int:
    words, changes = runs.parted(sys.argv[1:])
    arguments = make_parser().parse_args(words)
    directory: Path = arguments.directory
    match arguments.command:
        case "problems":
            suite_module.write_problems(directory / "data")
        case "start":
            return fine_tune(directory, arguments.model, arguments.precision, changes)
        case "ladder":
            return climb(directory, arguments.size, changes)
        case "outliers":
            suite_module.plant(directory / "start" / "model", directory / "outliers" / "model")
        case "flows":
            answer_untrained(arguments, changes)
        case "run":
            seeds = range(arguments.seeds)
            wanted = arguments.runs or suite.wanted(arguments.tasks, arguments.arms, seeds)
            where = arguments.cards, arguments.jobs
            how = arguments.seconds, runs.by_key(changes), arguments.begin_within
            return 0 if runs.run_all(wanted, directory, *where, *how) else LEFT
        case "cost":
            how = arguments.card, arguments.steps, runs.by_key(changes)
            for task in arguments.tasks:
                wanted = suite.wanted([task], suite.ALL_ARMS, [0])
                cost.measure_all(wanted, directory, *how, arguments.at_once)
            print("\n".join(cost.markdown(cost.read(directory / "rows"))))
        case "look":
            print("\n".join(runs_module.look(directory)))
        case _:
            report(arguments)
    return 0


def answer_untrained(arguments: argparse.Namespace, changes: list[str]) -> None:
    """A start in several flows: one of the ladder in this process, or that of all arms."""
    directory, given = arguments.directory, runs.by_key(changes)
    if arguments.size is not None:
        asked = arguments.size, given, arguments.arms, arguments.problems
        print(ladder.answer_start(directory, *asked))
        return
    found = runs_module.answer_all(directory, arguments.cards, arguments.jobs, given)
    print("\n".join(runs_module.markdown(found)))


def report(arguments: argparse.Namespace) -> None:
    """The tables, or the page and the picture, of the rows in a folder."""
    directory: Path = arguments.directory
    found = rows.read_finished(directory), rows_module.read_repeats(directory), cost.read(directory)
    if not found[0]:
        raise SystemExit(
            f"no finished run in {directory}: name the folder that has rows "
            f"(TASK-ARM-SEED{rows.SUFFIX}), DIR/rows of a proof that was run"
        )
    if arguments.command == "decide":
        print("\n".join(decide.markdown(found[0])))
        return
    torch.set_num_threads(1)  # a bootstrap's draw is little: threads beside other work wait for it
    starts = ladder.read_starts(directory)
    over_sizes = sizes.measured(found[0], found[2], starts)
    if arguments.command == "sizes":
        try:
            write_sizes(over_sizes, starts, found[0], found[1], arguments)
        except ValueError as error:
            raise SystemExit(str(error)) from error
        return
    if arguments.command == "table":
        print("\n".join(figures.markdown(figures.tables(*found))))
        return
    print(page.write_html(*found, arguments.out, over_sizes))
    if arguments.picture is not None:
        print(page.write_picture(found[0], arguments.picture))


def write_sizes(
    found: list[sizes.Measured],
    starts: ladder.Starts,
    all_rows: list[rows.Row],
    again: rows.Repeats,
    arguments: argparse.Namespace,
) -> None:
    """Print the table over sizes, and write it, the picture and the advice where they are wanted.
    Raises ValueError where there is nothing to draw or to say, or the page has no place for it.
    """
    lines = [
        *sizes.markdown(found, starts),
        *sizes.rewards(all_rows, again),
        *sizes.verdicts(found),
        *sizes.notes(all_rows, again),
    ]
    print("\n".join(lines))
    if arguments.picture is not None:
        print(page.write_sizes_picture(found, arguments.picture))
    if arguments.page is not None:
        said = arguments.page.read_text(encoding="utf-8")
        block = sizes.page_lines(lines, arguments.picture, arguments.page)
        arguments.page.write_text(sizes.with_block(said, block), encoding="utf-8")
        print(arguments.page)
    if arguments.advice is not None:
        write_json(arguments.advice, sizes.advice(found, all_rows))
        print(arguments.advice)


def climb(directory: Path, size: str, changes: list[str]) -> int:
    """Write the ladder's text and tokenizer where they are missing, then make the start."""
    data = directory / "data"
    if not (data / "tokenizer" / "tokenizer.json").is_file():
        ladder.write_text(data)
    if size == "text":
        return 0
    output = directory / f"start-{size}"
    keys = {
        "model": data / "tokenizer",
        "output": output,
        "data.train.path": data / "ladder.solutions.jsonl",
        "data.eval.multiply.path": data / "multiply.held_out.jsonl",
        **ladder.STARTS_OF[size].words(),
    }
    words = [word for key, value in keys.items() for word in (f"--{key}", value)] + changes
    return ladder.train_start(load_recipe(SftConfig, LADDER, list(map(str, words))))


def fine_tune(directory: Path, model: Path, precision: str, changes: list[str]) -> int:
    """``isobit sft`` on the solutions of both tasks, in one file."""
    data = directory / "data"
    solutions = [data / f"{task}.solutions.jsonl" for task in suite_module.TASKS]
    joined = data / "solutions.jsonl"
    joined.write_bytes(b"".join(path.read_bytes() for path in solutions))
    output = directory / ("start" if precision == "bf16" else f"start-{precision}")
    held_out = {task: data / f"{task}.held_out.jsonl" for task in suite_module.TASKS}
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
