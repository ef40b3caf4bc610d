"""What small runs on a CPU come to, to the bit, before and after a change of the code.

    python -m tools.golden record golden.json                     # do all runs, keep the digests
    python -m tools.golden check golden.json                      # again; exit 1 if one differs
    python -m tools.golden check golden.json --only fp8 resume    # some of them
    python -m tools.golden check golden.json --tree ../other/src  # by another source tree

Only what users have is touched: the command line, the keys of a recipe and the files of a run's
directory, so that modules may move freely in between.  Times, rates, paths, versions and the digest
of the kernels' source are left out.  A CPU with other instructions, or another torch, rounds
differently (docs/exactness.md), so a record holds for the machine that made it; ``check`` says
where it is on another.  Some runs repeat another one in several processes, or are killed and
resumed: those also have to come to the same as the one that they repeat.
"""

import argparse
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from tools.run_files import Record, differences, read_run, values

ROOT = Path(__file__).parents[1]
DEADLINE_S = 600
"""Of one command, which takes some seconds."""
ENGINE = re.compile(r"rollout/(shared_pages|preemptions|chunks)$")
"""Figures of an engine, which depend on the prompts that it has taken."""
NAMES = """
import json, platform, isobit, torch
print(json.dumps({"isobit": isobit.__file__, "python": platform.python_version(),
    "torch": torch.__version__, "instructions": torch.backends.cpu.get_cpu_capability()}))
"""

BASE = """
model = "starter"
precision = "fp8"
device = "cpu"
threads = 1
evaluation.every = 2
checkpoint.every = 1

[data]
train = { type = "jsonl", path = "starter:train.jsonl", limit = 200 }
eval.held_out = { type = "jsonl", path = "starter:held_out.jsonl", limit = 6 }
"""
RECIPES = {
    "train": f"""{BASE}
[rollout]
max_new_tokens = 12

[training]
steps = 3
prompts_per_step = 4
samples_per_prompt = 4
updates_per_batch = 2
tokens_per_microbatch = 96
learning_rate = 1e-3
schedule = "cosine"
warmup_updates = 2
""",
    "sft": f"""{BASE}
[training]
steps = 2
prompts_per_step = 8
learning_rate = 1e-3
""",
}
"""A recipe of each command; what a run has of its own is said behind it."""
REWARD = '''"""Differs within a group, whatever the policy has learnt."""


def reward(prompt, completion):
    return float(completion.token_ids[0] % 3 + len(completion.token_ids) % 2)
'''
TAUGHT = "reward.function=reward.py:reward reward.in_process=true"
GRADED = "reward.function=isobit.starter.tasks:correct_answer"
FP8 = f"{GRADED} reward.workers=1 training.steps=4 training.learning_rate=3e-4"
LAG = f"{TAUGHT} async.lag=1 algorithm.name=cispo"
ANSWERS = "data.train.completion=answer data.eval.held_out.completion=answer"
EXPERTS = f"""
{ANSWERS} training.learning_rate=1e-2 training.router_z=0.01
from_scratch.family=qwen3_moe from_scratch.hidden_size=72 from_scratch.intermediate_size=48
from_scratch.num_layers=2 from_scratch.num_heads=2 from_scratch.head_dim=32
from_scratch.num_experts=6 from_scratch.num_experts_per_tok=2
from_scratch.moe_intermediate_size=40 from_scratch.max_positions=128
"""


class CommandError(Exception):
    """A command that did not end as it should."""


@dataclass(frozen=True)
class Place:
    """A folder in which commands are done, and the source tree that does them."""

    folder: Path
    tree: Path

    def write(self) -> None:
        """Put the files here that the runs read."""
        for command, recipe in RECIPES.items():
            (self.folder / f"{command}.toml").write_text(recipe, encoding="utf-8")
        (self.folder / "reward.py").write_text(REWARD, encoding="utf-8")
        sums = [(a, b) for a in range(2, 8) for b in range(1, 5)]
        pairs = [
            json.dumps({"prompt": f"{a}+{b}=", "chosen": f"{a + b}", "rejected": f"{a + b + 1}"})
            for a, b in sums
        ]
        (self.folder / "pairs.jsonl").write_text("\n".join(pairs), encoding="utf-8")

    def start(self, words: str) -> subprocess.Popen[str]:
        """Begin a command of ``isobit``, in a group of processes of its own."""
        return subprocess.Popen(  # noqa: S603  (the words are those of this file)
            [sys.executable, "-m", "isobit.cli.main", *shlex.split(words)],
            cwd=self.folder,
            env=environment(self.tree),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def isobit(self, words: str) -> str:
        """What a command prints; it has to succeed."""
        process = self.start(words)
        try:
            said, errors = process.communicate(timeout=DEADLINE_S)
        except subprocess.TimeoutExpired as error:
            raise CommandError(f"isobit {words}: no end in {DEADLINE_S} s") from error
        finally:
            kill(process)
        if process.returncode != 0:
            tail = f"{said[-1500:]}{errors[-1500:]}"
            raise CommandError(f"isobit {words}: exit code {process.returncode}\n{tail}")
        return said

    def run(self, command: str, words: str, output: str = "run") -> Record:
        """What a run leaves in its directory."""
        self.isobit(f"{command} {command}.toml output={output} {words}")
        return read_run(self.folder, output)


Run: TypeAlias = Callable[[Place], Record]
"""What is done in a place, and what comes of it."""


def trained(words: str) -> Run:
    """A run of reinforcement learning and nothing else."""
    return lambda place: place.run("train", words)


def in_processes(words: str) -> Run:
    """The same in several processes, of whose engines each takes prompts as it has room for."""
    return lambda place: without_counts(place.run("train", words))


def printed(words: str) -> Run:
    """The JSON of a command that leaves nothing."""
    name = f"isobit {shlex.split(words)[0]}"
    return lambda place: {name: values(json.loads(place.isobit(f"{words} --json")))}


def resume(place: Place) -> Record:
    """The run ``fp8``, killed as soon as its second step is told of, and resumed."""
    metrics = place.folder / "run" / "metrics.jsonl"
    process = place.start(f"train train.toml output=run {FP8}")
    end = time.monotonic() + DEADLINE_S
    try:
        while process.poll() is None and time.monotonic() < end:
            if metrics.exists() and b'"step": 2' in metrics.read_bytes():
                break
            time.sleep(0.002)
    finally:
        kill(process)
    if process.returncode != -signal.SIGKILL:
        raise CommandError(f"ended with {process.returncode} before it could be killed")
    return place.run("train", f"{FP8} --resume")


def replay(place: Place) -> Record:
    """One step of a run done again by ``isobit replay``, which has to find it equal."""
    record = place.run("train", f"{TAUGHT} training.steps=2")
    place.isobit("replay run --step 2")
    return record


def experts(place: Place) -> Record:
    """A mixture of experts from random weights, fine-tuned and then trained by rewards."""
    tuned = place.run("sft", EXPERTS, "sft")
    return tuned | place.run("train", f"{TAUGHT} model=sft/model training.steps=2")


def preferences(place: Place) -> Record:
    """A reward model from pairs of answers, and a run that takes its scores."""
    data = "data.train.path=pairs.jsonl data.eval.held_out.path=pairs.jsonl"
    scorer = place.run("sft", f"objective=preference {data}", "scorer")
    return scorer | place.run("train", "reward.model=scorer/model training.steps=2")


RUNS: dict[str, Run] = {
    "fp8": trained(FP8),
    "processes": in_processes(f"{FP8} cluster.processes=2"),
    "resume": resume,
    "bf16": trained(
        f"{TAUGHT} precision=bf16 algorithm.name=gspo"
        " training.slots=2 training.moments=bf16 training.recompute=full"
    ),
    "fp8-rollout": trained(
        f"{TAUGHT} precision=fp8-rollout corrections='[{{type = \"tis\", max = 1.05}}]'"
    ),
    "int8": trained(
        f"{TAUGHT} precision=int8 precision.dgrad=fp8 precision.wgrad=bf16 algorithm.name=rloo"
        " training.recompute=mlp"
    ),
    "int8-backward": trained(f"{TAUGHT} precision=int8 algorithm.name=rloo training.recompute=mlp"),
    "ppo": trained(f"{TAUGHT} algorithm.name=ppo algorithm.kl_coefficient=0.01"),
    "kl": trained(
        f"{TAUGHT} algorithm.kl_coefficient=0.05 algorithm.entropy_coefficient=0.01"
        " reference.refresh_every=2 training.moments=fp8"
    ),
    "replay-buffer": trained(
        f"{TAUGHT} algorithm.name=dr_grpo replay.fraction=0.5 replay.sampling=advantage"
    ),
    "lag": trained(LAG),
    "rollouters": in_processes(f"{LAG} cluster.processes=2 cluster.rollouters=1"),
    "experts": experts,
    "sft": lambda place: place.run("sft", ANSWERS),
    "preferences": preferences,
    "dapo": trained(
        f"{GRADED} reward.in_process=true algorithm.name=dapo algorithm.max_refills=3"
        " algorithm.overlong_buffer=4 rollout.max_new_tokens=8 rollout.top_k=20 rollout.min_p=0.01"
    ),
    "eval": printed(
        "eval starter --data starter:held_out.jsonl --reward isobit.starter.tasks:correct_answer"
        " --precision fp8 --problems 12 --samples 2 --temperature 0.8 --max-new-tokens 12"
        " --threads 1"
    ),
    "verify": printed(
        "verify starter --precision fp8 --threads 1 --prompts 4 --samples 2 --max-new-tokens 80"
    ),
    "replay": replay,
}
REPEATS = {"processes": "fp8", "resume": "fp8", "rollouters": "lag"}
"""Runs -> the one that they repeat to the bit."""


def environment(tree: Path) -> dict[str, str]:
    """That of a command: one thread, and the package of the tree."""
    return {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}


def kill(process: subprocess.Popen[str]) -> None:
    """End a command and all that it has started, at once."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def machine(tree: Path) -> dict[str, str]:
    """What the bits depend on; the tree has to be the one that Python finds."""
    asked = [sys.executable, "-c", NAMES]
    told = subprocess.run(  # noqa: S603  (the words are those of this file)
        asked, check=False, env=environment(tree), capture_output=True, text=True
    )
    if told.returncode != 0:
        raise CommandError(f"import isobit: {told.stderr[-1500:]}")
    names = json.loads(told.stdout)
    package = Path(names.pop("isobit"))
    if not package.is_relative_to(tree):
        raise CommandError(f"Python takes isobit from {package}, not from {tree}")
    cpus = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    cpu = re.search(r"^model name\s*:\s*(.+)$", cpus, re.MULTILINE)
    return {"cpu": cpu[1] if cpu else "unknown", **names}


def without_counts(record: Record) -> Record:
    """Without the figures of engines."""
    return {
        file: {key: value for key, value in found.items() if not ENGINE.search(key)}
        for file, found in record.items()
    }


def do_runs(names: Iterable[str], tree: Path) -> Iterator[tuple[str, Record | CommandError]]:
    """Each run in a temporary folder, one after the other."""
    for name in names:
        begin = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="golden-") as folder:
            place = Place(Path(folder), tree)
            place.write()
            try:
                result = RUNS[name](place)
            except (CommandError, OSError, ValueError, KeyError) as error:
                result = CommandError(f"{type(error).__name__}: {error}")
        print(f"{name:<14} {time.monotonic() - begin:5.1f} s", flush=True)
        yield name, result


def comparable(record: Record) -> Record:
    """Without what the number of processes decides: their engines' counts, and the recipe."""
    kept = {file: found for file, found in record.items() if not file.endswith("run.json")}
    return without_counts(kept)


def complaints(
    results: Mapping[str, Record | CommandError], recorded: Mapping[str, Record]
) -> dict[str, list[str]]:
    """Run -> what is wrong: it failed, or differs from its record or from what it repeats."""
    found: dict[str, list[str]] = {}
    for name, result in results.items():
        if isinstance(result, CommandError):
            found[name] = [str(result)]
            continue
        found[name] = [*differences(recorded.get(name, result), result, ("recorded", "now"))]
        repeated = results.get(REPEATS.get(name, ""))
        if isinstance(repeated, dict):
            words = (f"in {REPEATS[name]}", f"in {name}")
            found[name] += differences(comparable(repeated), comparable(result), words)
    return {name: lines for name, lines in found.items() if lines}


def wanted(only: Sequence[str] | None, known: Iterable[str]) -> list[str]:
    """The runs to do, in their order, with those that they repeat."""
    names = set(only or known)
    names |= {REPEATS[name] for name in names if name in REPEATS}
    if missing := sorted(names - (RUNS.keys() & set(known))):
        raise CommandError(f"not both known and recorded: {', '.join(missing)}")
    return [name for name in RUNS if name in names]


def report(found: Mapping[str, Sequence[str]]) -> bool:
    """Print what is wrong with which runs; whether nothing is."""
    for name, lines in found.items():
        print(*(f"{name}: {line}" for line in lines), sep="\n")
    if found:
        print(f"wrong: {', '.join(found)}")
    return not found


def record(file: Path, only: Sequence[str] | None, tree: Path) -> bool:
    """Write what runs come to, if none is wrong in itself."""
    here = machine(tree)
    results = dict(do_runs(wanted(only, RUNS), tree))
    if fine := report(complaints(results, {})):
        text = json.dumps({"machine": here, "runs": results}, indent=1)
        file.write_text(f"{text}\n", encoding="utf-8")
        print(f"recorded in {file}")
    return fine


def check(file: Path, only: Sequence[str] | None, tree: Path) -> bool:
    """Whether runs come to what is recorded."""
    kept = json.loads(file.read_text(encoding="utf-8"))
    here = machine(tree)
    if kept["machine"] != here:
        print(f"recorded on another machine, {kept['machine']}; this one is {here}")
    results = dict(do_runs(wanted(only, kept["runs"]), tree))
    if fine := report(complaints(results, kept["runs"])):
        print("all equal")
    return fine


def main(argv: Sequence[str] | None = None) -> int:
    """The command; its exit code."""
    parser = argparse.ArgumentParser(prog="python -m tools.golden", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("command", choices=("record", "check"))
    parser.add_argument("file", type=Path)
    parser.add_argument("--only", nargs="+", choices=RUNS, metavar="NAME", help=", ".join(RUNS))
    parser.add_argument("--tree", type=Path, default=ROOT / "src", help="by default src of here")
    given = parser.parse_args(argv)
    do = record if given.command == "record" else check
    try:
        return 0 if do(given.file, given.only, given.tree.resolve()) else 1
    except CommandError as error:
        print(error)
        return 1


if __name__ == "__main__":
    sys.exit(main())
