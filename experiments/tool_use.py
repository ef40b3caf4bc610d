"""Does a policy learn to use a tool?  Products that it cannot work out itself, and a calculator, in
the recipes ``tools_sft.toml`` and ``tools.toml``, for several flows and seeds.

    python -m experiments.tool_use run DIR --model starter [--arms fp8 int8] [--seeds 3] [--jobs 1]
        [--seconds S] [-- --KEY VALUE ..]
    python -m experiments.tool_use table ROWS .. [--page docs/environments.md]
        [--picture docs/pictures/tool_use.svg]

``run`` goes through phases, each of which is left out where its result is there:

    problems   DIR/data, by ``recipes/tools.py``
    start      DIR/start: the model, fine-tuned once on the transcripts
    before     how the model as it was, and the start, answer: greedily, with and without the tool
    runs       DIR/runs/ARM-SEED: reinforcement learning, ``--jobs`` side by side; the arm
               ``without-tool`` is ``fp8`` with no environment
    after      how what was learnt answers

When the seconds are over, what runs is told to write a checkpoint, and the exit status is 3: the
same command goes on.  ``DIR/rows`` has what tables and picture need, while it comes in:

    ARM-SEED.jsonl   ``run``: recipe and machine; ``step``: figures of each; ``evaluation``: the
                     rewards of the held-out problems, sampled at temperature 1
    answers.jsonl    ``answers``: a model, greedily on the same problems

Keys behind ``--`` change the runs, those that begin with ``sft.`` the fine-tuning:
``-- --training.steps 2 --sft.training.steps 2``.
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import tomli_w
import torch

from experiments.proof.figures import after, before, by_arm, differing, interval
from experiments.proof.page import accuracy_chart, write_accuracy
from experiments.proof.rows import FIGURES, Row, steps_of
from experiments.proof.runs import by_key, parted, words_of
from isobit.observe.intervals import wilson_interval
from isobit.store.journals import whole_lines

ROOT = Path(__file__).parent.parent
SFT, RL = ROOT / "recipes" / "tools_sft.toml", ROOT / "recipes" / "tools.toml"
LEFT = 3
"""Exit status: something is not finished."""
GRACE_S = 30.0
"""Seconds that a run may take from SIGTERM to a written checkpoint."""
KEEP_S = 5.0
"""Seconds between two looks for new rows."""
Changes = Mapping[str, str]
Line = dict[str, Any]

ARMS: dict[str, Changes] = {
    "fp8": {"precision": "fp8"},
    "int8": {"precision": '{preset = "int8", dgrad = "fp8", wgrad = "bf16"}'},
    "bf16": {"precision": "bf16"},
    "without-tool": {"precision": "fp8"},
}
WITHOUT = "without-tool"
FOLDER_SFT: Changes = {
    "data.chat": "true",
    "data.max_tokens": "256",
    "training.steps": "150",
    "training.learning_rate": "2e-4",
    "training.warmup_updates": "15",
}
"""What is otherwise for a pretrained model with a chat template than for the starter model."""
FOLDER_RL: Changes = {
    "training.learning_rate": "3e-5",
    "rollout.max_new_tokens": "96",
}
GREEDY: Changes = {"evaluation.temperature": "0.0", "evaluation.max_new_tokens": "256"}
"""Of answers before and after: room for a model that was not taught how to answer."""
REASONS_WITHOUT_SIGNAL, START = "untaught", "start"
ANSWERS = "answers.jsonl"
PERCENT = "{:.1%}"
ENDS = slice(5), slice(-5, None)
BEGIN, END = "<!-- figures: tool_use -->", "<!-- end of figures -->"
BLOCK = re.compile(f"{BEGIN}(.*?){END}", re.DOTALL)
KEPT = (*FIGURES, "episode/calls", "episode/results/error", "episode/results/malformed")
"""Of each step; a step without a tool has none of its episodes."""


class OverError(Exception):
    """The seconds are over."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What ``run`` is to do."""

    directory: Path
    model: str
    arms: Sequence[str]
    seeds: int
    jobs: int
    until: float
    """On the monotonic clock."""
    changes: Changes

    @property
    def is_starter(self) -> bool:
        return self.model == "starter"

    @property
    def names(self) -> list[str]:
        """All arms of a seed before the next seed."""
        return [f"{arm}-{seed}" for seed in range(self.seeds) for arm in self.arms]

    @property
    def rows(self) -> Path:
        return self.directory / "rows"

    def folder(self, name: str) -> str:
        """The model folder of ``untaught``, ``start`` or a run."""
        if name == REASONS_WITHOUT_SIGNAL:
            return self.model
        return str(self.directory / (name if name == START else f"runs/{name}") / "model")

    def is_made(self, name: str) -> bool:
        return Path(self.folder(name), "config.json").exists()

    def settings(self, arm: str) -> dict[str, str]:
        """What the runs of an arm change in the recipe, but for seed and output."""
        data = self.directory / "data"
        return {
            "model": self.folder(START),
            "data.train.path": str(data / "train.jsonl"),
            "data.eval.held_out.path": str(data / "held_out.jsonl"),
            "checkpoint.keep_last": "1",
            **({} if self.is_starter else FOLDER_RL),
            **ARMS[arm],
            **{key: value for key, value in self.changes.items() if not key.startswith("sft.")},
        }


def run(plan: Plan) -> None:
    """All phases.  Raises OverError where the seconds are over, and CalledProcessError."""
    for part in ("rows", "logs"):
        (plan.directory / part).mkdir(parents=True, exist_ok=True)
    if not (plan.directory / "data" / "held_out.jsonl").exists():
        words = [] if plan.is_starter else ["--chat"]
        script = str(ROOT / "recipes" / "tools.py")
        finish(plan, {"problems": [script, str(plan.directory / "data"), *words]})
    if not plan.is_made(START):
        finish(plan, {START: start_command(plan)})
    answer(plan, "before", {REASONS_WITHOUT_SIGNAL: "bf16", START: "bf16"})
    left = [name for name in plan.names if not plan.is_made(name)]
    failure = None
    try:
        finish(plan, {name: run_command(plan, name) for name in left})
    except RuntimeError as error:  # the others answer nevertheless
        failure = error
    made = [name for name in plan.names if plan.is_made(name)]
    answer(plan, "after", {name: ARMS[name.rpartition("-")[0]]["precision"] for name in made})
    if failure is not None:
        raise failure


def answer(plan: Plan, phase: str, models: Changes) -> None:
    """Have each of ``models`` (name -> flow) answer that has not, in ``jobs`` processes."""
    known = {one["model"] for one in whole(plan.rows / ANSWERS) if not one["tool"]}
    left = [[name, plan.folder(name), flow] for name, flow in models.items() if name not in known]
    given = {"settings": plan.settings(plan.arms[0]), "out": str(plan.rows / ANSWERS)}
    commands: dict[str, list[str]] = {}
    for place in range(min(plan.jobs, len(left))):
        words = json.dumps({**given, "models": left[place :: plan.jobs]})
        commands[f"{phase}-{place}"] = ["-m", "experiments.tool_use", "answer", words]
    finish(plan, commands)


def start_command(plan: Plan) -> list[str]:
    settings = {
        "model": plan.model,
        "output": str(plan.directory / "start"),
        "data.train.path": str(plan.directory / "data" / "transcripts.jsonl"),
        "checkpoint.keep_last": "1",
        **({} if plan.is_starter else FOLDER_SFT),
        **{k.removeprefix("sft."): v for k, v in plan.changes.items() if k.startswith("sft.")},
    }
    return ["-m", "isobit.cli.main", "sft", str(SFT), "--resume", *words_of(settings)]


def run_command(plan: Plan, name: str) -> list[str]:
    arm, _, seed = name.rpartition("-")
    settings = {
        **plan.settings(arm),
        "seed": seed,
        "output": str(plan.directory / "runs" / name),
    }
    recipe = RL
    if arm == WITHOUT:
        recipe = plan.directory / "without_tool.toml"
        table = tomllib.loads(RL.read_text(encoding="utf-8"))
        del table["environment"]
        recipe.write_text(tomli_w.dumps(table), encoding="utf-8")
    return ["-m", "isobit.cli.main", "train", str(recipe), "--resume", *words_of(settings)]


def finish(plan: Plan, commands: Mapping[str, Sequence[str]]) -> None:
    """Run Python commands, ``jobs`` side by side, each with a log, and keep the rows of runs while
    they come in.  Raises OverError when the seconds are over, and RuntimeError where one failed,
    when all have ended.
    """
    waiting, live = list(commands.items()), dict[str, subprocess.Popen[bytes]]()
    failed: list[str] = []
    kept = time.monotonic()
    try:
        while waiting or live:
            while waiting and len(live) < plan.jobs:
                name, words = waiting.pop(0)
                live[name] = start_process(words, plan.directory / "logs" / f"{name}.log")
                print(f"{name} begins or goes on", flush=True)
            if time.monotonic() > plan.until:
                raise OverError
            time.sleep(0.5)
            for name in [name for name, one in live.items() if one.poll() is not None]:
                status = live.pop(name).returncode
                failed += [name] if status else []
                print(f"{name} ended with {status}", flush=True)
            if time.monotonic() > kept + KEEP_S:
                keep_rows(plan)
                kept = time.monotonic()
    finally:
        stop(live.values())
        keep_rows(plan)
    if failed:
        logs = plan.directory / "logs"
        raise RuntimeError(f"{', '.join(failed)} failed: see {logs}/{failed[0]}.log")


def start_process(words: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
    with log.open("ab") as said:
        return subprocess.Popen(  # noqa: S603 (this file)
            [sys.executable, *words],
            cwd=ROOT,
            stdout=said,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )


def stop(live: Iterable[subprocess.Popen[bytes]]) -> None:
    """Tell processes to write a checkpoint, and wait for it."""
    processes = list(live)
    for one in processes:
        one.terminate()
    for one in processes:
        try:
            one.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            one.kill()


def keep_rows(plan: Plan) -> None:
    """Write the rows of all runs that have begun."""
    for name in plan.names:
        output = plan.directory / "runs" / name
        if (output / "run.json").exists() and (output / "metrics.jsonl").exists():
            text = "".join(json.dumps(line) + "\n" for line in lines_of(name, output))
            out = plan.rows / f"{name}.jsonl"
            if not out.exists() or out.read_text(encoding="utf-8") != text:
                out.write_text(text, encoding="utf-8")


def lines_of(name: str, output: Path) -> Iterator[Line]:
    """The rows of a run, finished or not."""
    described = json.loads((output / "run.json").read_text(encoding="utf-8"))
    arm, _, seed = name.rpartition("-")
    who = {"arm": arm, "seed": int(seed)}
    parts = {
        part: described.get(part) for part in ("config", "inputs", "device", "versions", "bits")
    }
    yield {"kind": "run", **who, **parts}
    metrics = whole(output / "metrics.jsonl")
    graded = [
        [reward for (reward,) in line["rewards"]]
        for line in whole(output / "rewards.jsonl")
        if line["prompts"][0][0].startswith("held_out/")
    ]
    for line in steps_of(metrics):
        yield {"kind": "step", **who, **{name: line.get(name) for name in ("step", *KEPT)}}
    evaluations = [line for line in metrics if "eval/held_out/accuracy" in line]
    for line, rewards in zip(evaluations, graded, strict=False):  # one may still be written
        yield {"kind": "evaluation", **who, "step": line["step"], "rewards": rewards}


def whole(path: Path) -> list[Line]:
    """The whole lines of a file of JSON lines, which may be written meanwhile."""
    return [json.loads(line) for line in whole_lines(path, 0)]


def answer_all(given: Mapping[str, Any]) -> None:
    """What ``answer`` starts: each model answers the held-out problems greedily, with the tool
    where it was shown how, then without.
    """
    import isobit

    for name, folder, flow in given["models"]:
        settings = {**given["settings"], "precision": flow, **GREEDY}
        config = isobit.load_config(RL, words_of({**settings, "output": "nowhere"}))
        for has_tool in (False,) if name == REASONS_WITHOUT_SIGNAL else (True, False):
            tools = {} if has_tool else {"environment": None}
            found = isobit.evaluate(folder, config.model_copy(update=tools))["held_out"]
            who = {"kind": "answers", "model": name, "tool": has_tool, "precision": flow}
            with Path(given["out"]).open("a", encoding="utf-8") as rows:
                rows.write(json.dumps({**who, **found.figures()}) + "\n")


def runs_of(rows: Path) -> list[Line]:
    """The runs in a folder of rows, finished or not, as ``experiments.proof`` has them."""
    found: list[Line] = []
    for path in sorted(rows.glob("*-[0-9]*.jsonl")):
        lines = whole(path)
        if lines and any(line["kind"] == "evaluation" for line in lines):
            steps = [line for line in lines if line["kind"] == "step"]
            names = ("step", *KEPT)
            found.append(
                {
                    **lines[0],
                    "task": lines[0]["config"]["model"],
                    "steps": {name: [one.get(name) for one in steps] for name in names},
                    "evaluations": [line for line in lines if line["kind"] == "evaluation"],
                }
            )
    return found


def greedy_table(folders: Sequence[Path]) -> Iterator[str]:
    """Markdown: how each model answers greedily, with the tool and without."""
    yield "| greedy accuracy | without the tool | with the tool |"
    yield "|---|---:|---:|"
    for folder in folders:
        answers = {(one["model"], one["tool"]): one for one in whole(folder / ANSWERS)}
        kinds = {"as it was": [REASONS_WITHOUT_SIGNAL], "fine-tuned: the start": [START]}
        for arm, runs in by_arm(runs_of(folder)).items():
            kinds[f"after `{arm}`"] = [f"{arm}-{run['seed']}" for run in runs]
        for text, names in kinds.items():
            cells = (greedy(answers, names, has_tool) for has_tool in (False, True))
            yield f"| {folder.name}, {text} | {' | '.join(cells)} |"


def learning_table(folders: Sequence[Path]) -> Iterator[str]:
    """Markdown: a line for each arm, of answers as they are sampled in training."""
    columns = "steps", "before", "after", "by seed", "points", "calls an episode", "differing"
    yield f"| sampled | {' | '.join(columns)} |"
    yield f"|---|{'---:|' * len(columns)}"
    for folder in folders:
        for arm, runs in by_arm(runs_of(folder)).items():
            first, last = (torch.tensor([of(run) for run in runs]) for of in (before, after))
            cells = (
                ", ".join(map(str, sorted({len(run["steps"]["step"]) for run in runs}))),
                with_interval(first, PERCENT),
                with_interval(last, PERCENT),
                ", ".join(f"{fmean(after(run)):.1%}" for run in runs),
                with_interval(last - first, "{:+.1f}", 100),
                calls(runs),
                differing(runs),
            )
            yield f"| {folder.name}, `{arm}` | {' | '.join(cells)} |"


def greedy(answers: Mapping[tuple[str, bool], Line], names: Iterable[str], has_tool: bool) -> str:
    """The accuracy of each of the models, of a single one with its 95% interval (Wilson)."""
    found = [answers[name, has_tool] for name in names if (name, has_tool) in answers]
    if len(found) == 1:
        low, high = found[0]["interval"]
        return f"{found[0]['accuracy']:.1%} [{low:.1%}, {high:.1%}] of {found[0]['problems']}"
    return ", ".join(f"{one['accuracy']:.1%}" for one in found) or "-"


def calls(runs: Iterable[Row]) -> str:
    """The mean number of calls in an episode, of the first and the last steps."""
    found = [run["steps"]["episode/calls"] for run in runs]
    ends = [[one or 0.0 for column in found for one in column[part]] for part in ENDS]
    return " to ".join(f"{fmean(some):.2f}" if some else "-" for some in ends)


def with_interval(values: torch.Tensor, form: str, unit: float = 1.0) -> str:
    """[seeds, problems] -> the mean and its 95% interval (``experiments.proof.figures``), which is
    no narrower than Wilson's of an event that none of the problems had.
    """
    mean, (low, high) = float(values.double().mean()), interval(values)
    least = wilson_interval(0, values.shape[1])[1]
    low, high = min(low, mean - least), max(high, mean + least)
    if form == PERCENT:
        low, high = max(low, 0.0), min(high, 1.0)
    return f"{form} [{form}, {form}]".format(*(unit * one for one in (mean, low, high)))


def report(folders: Sequence[Path], picture: Path | None, page: Path | None) -> None:
    """Print the tables of folders of rows, whose names are those of the models; draw the picture,
    and put the tables into a page, where wanted.
    """
    for folder in folders:
        if not runs_of(folder):
            raise SystemExit(f"no run in {folder}: name the folder that has ARM-SEED.jsonl")
    torch.set_num_threads(1)
    tables = "\n".join([*greedy_table(folders), "", *learning_table(folders)])
    print(tables)
    if picture is not None:
        charts = [(folder.name, accuracy_chart(runs_of(folder), ARMS)) for folder in folders]
        print(write_accuracy([(name, one) for name, one in charts if one is not None], picture))
    if page is not None:
        if picture is not None:
            place = os.path.relpath(picture, page.parent)
            tables += f"\n\n![Held-out accuracy over the steps, arm by arm]({place})"
        said = page.read_text(encoding="utf-8")
        page.write_text(with_tables(said, tables), encoding="utf-8")


def with_tables(page: str, tables: str) -> str:
    """The page with these tables between its marks.  Raises ValueError for one without marks."""
    parts = BLOCK.split(page)
    if len(parts) != 3:
        raise ValueError(f"the page has no block {BEGIN} .. {END}, where the tables belong")
    return f"{parts[0]}{BEGIN}\n\n{tables}\n\n{END}{parts[2]}"


def main() -> int:
    words, changes = parted(sys.argv[1:])
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("run")
    command.add_argument("directory", type=Path)
    command.add_argument("--model", required=True, help="starter, or a Hugging Face folder")
    command.add_argument("--arms", nargs="+", choices=ARMS, default=["fp8", "int8"])
    command.add_argument("--seeds", type=int, default=3)
    command.add_argument("--jobs", type=int, default=1)
    command.add_argument("--seconds", type=float, default=float("inf"))
    commands.add_parser("answer").add_argument("given", type=json.loads)
    table = commands.add_parser("table")
    table.add_argument("rows", type=Path, nargs="+")
    table.add_argument("--picture", type=Path)
    table.add_argument("--page", type=Path)
    arguments = parser.parse_args(words)
    match arguments.command:
        case "answer":
            answer_all(arguments.given)
        case "table":
            report(arguments.rows, arguments.picture, arguments.page)
        case _:
            until = time.monotonic() + arguments.seconds
            directory: Path = arguments.directory.absolute()
            sizes = arguments.arms, arguments.seeds, arguments.jobs
            model: str = arguments.model
            model = model if model == "starter" else str(Path(model).absolute())
            signal.signal(signal.SIGTERM, lambda *_: sys.exit(LEFT))  # runs end with this process
            plan = Plan(directory, model, *sizes, until, by_key(changes))
            try:
                run(plan)
            except OverError:
                print("the seconds are over: the same command goes on", flush=True)
                return LEFT
    return 0


if __name__ == "__main__":
    sys.exit(main())
