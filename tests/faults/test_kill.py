"""Kill -9 at random moments of ``isobit train`` and ``isobit sft``, checkpoint writing included, of
the trainer, of a process that works for it, or of both at once; and resume until it is done: the
files of a run that nothing happened to.

``ISOBIT_KILLS=100 pytest tests/faults/test_kill.py -s`` shares so many kills out among the kinds of
run (by default 12) and prints where they fell.

A grader alone is not killed here: its completion then has no reward, by design
(``test_graders.py``), and the run is another.  It dies together with its trainer.
"""

import os
import random
import re
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest
import tomli_w

from isobit.config.recipes import RunConfig, SftConfig
from isobit.run.loop import train
from isobit.run.sft import sft
from tests.faults.test_rank_deaths import without_the_machine
from tests.forked import command
from tests.models.policies import delta_nets
from tests.tiny import save_tiny, tiny_model

Who = Literal["trainer", "worker", "both"]
LONGEST_DELAY_S = {"train": 1.2, "sft": 0.5}
"""After a line of output: about as long as the steps take together, with rewards that take their
time.
"""
SLOW_REWARD = "import time; time.sleep(0.003)"


@dataclass(frozen=True)
class Stage:
    """A kind of run, with what has a state of its own beside policy and optimiser."""

    tables: dict[str, Any] = field(default_factory=dict)
    command: Literal["train", "sft"] = "train"
    victims: tuple[Who, ...] = ("trainer",)
    processes: int = 1
    rollouters: int = 0
    """Processes that sample for the others."""
    is_hybrid: bool = False
    """Whether the model has a gated delta net."""


POOL = {"reward": {"in_process": False, "workers": 1}}
STAGES = {
    "fp32 moments": Stage(),
    "fp8 moments, graders": Stage(
        {"training": {"moments": "fp8"}} | POOL, victims=("trainer", "both")
    ),
    "ppo": Stage({"algorithm": {"name": "ppo", "kl_coefficient": 0.01}}),
    "int8, kl, replay, reward model, lag": Stage(
        {
            "precision": "int8",
            "algorithm": {"kl_coefficient": 0.1},
            "reference": {"refresh_every": 4},
            "replay": {"fraction": 0.5, "max_staleness": 8},
            "async": {"lag": 1},
        }
    ),
    "sft in int8, graders": Stage(
        {"precision": "int8"} | POOL, command="sft", victims=("trainer", "both")
    ),
    "lora, kl, scales a tensor": Stage(
        {
            "lora": {"rank": 4},
            "precision": {"preset": "fp8", "kv_scales": "per_tensor"},
            "algorithm": {"kl_coefficient": 0.1},
        }
    ),
    "lora on delta nets, int8": Stage({"lora": {"rank": 4}, "precision": "int8"}, is_hybrid=True),
    "rollout worker": Stage(
        {"async": {"lag": 1}}, victims=("trainer", "worker", "both"), processes=2, rollouters=1
    ),
}
KILLS = -(-int(os.environ.get("ISOBIT_KILLS", "12")) // len(STAGES))
"""Of each kind of run."""


class Attempt:
    """A command with ``--resume`` and what it printed."""

    def __init__(self, stage: Stage, recipe: Path, output: Path) -> None:
        self.output, self._stage = output, stage
        self.newest = newest_checkpoint(output)
        self._printed = output.with_suffix(".log")
        self._printed.write_text("")
        words = [stage.command, str(recipe), "--resume", "--output", str(output)]
        if stage.processes > 1:
            words += ["--cluster.processes", str(stage.processes)]
            words += ["--cluster.rollouters", str(stage.rollouters)]
        self._process = command(words, self._printed)

    def kill(self, who: Who, rng: random.Random, aim_at_writing: bool) -> bool:
        """Kill it some time after it began to load or to work, or milliseconds after a checkpoint
        begins; False if it was done before, or went on (``went_on``).
        """
        if aim_at_writing:
            self._wait(lambda: any((self.output / "checkpoints").glob(".step_*.partial")))
            time.sleep(rng.uniform(0, 0.006))
        else:
            line = rng.choice(
                ("r", "lm_head", "lm_head", "lm_head")
            )  # of its first line; and of the last before the first evaluation
            self._wait(lambda: line in self._printed.read_text())
            time.sleep(rng.uniform(0, LONGEST_DELAY_S[self._stage.command]))
        kill_at_once(self._victims(who))
        self._process.join()  # a launcher ends by itself, once one of its ranks is dead
        return self._process.exitcode != 0

    @property
    def went_on(self) -> bool:
        """Whether it has done without a rollouter that was killed, until that came back."""
        return "the rollouters are started again" in self._printed.read_text()

    def check_repeated(self) -> None:
        """The first step it did is the one after the newest checkpoint: only the steps since were
        repeated.
        """
        steps = [
            int(number)
            for number in re.findall(
                r"^step +(\d+)/", self._printed.read_text(), flags=re.MULTILINE
            )
        ]
        assert steps == list(range(self.newest + 1, self.newest + 1 + len(steps)))

    def finish(self) -> None:
        self._process.join()
        assert self._process.exitcode == 0, self._printed.read_text()

    def _victims(self, who: Who) -> list[int]:
        own = self._process.pid
        assert own is not None
        below = descendants(own)
        if self._stage.processes == 1:
            return [own] if who == "trainer" else [own, *below]
        ranks = {rank: pid for pid in below if (rank := rank_of(pid)) is not None}
        wanted = {"trainer": ["0"], "worker": ["1"], "both": ["0", "1"]}[who]
        return [ranks[rank] for rank in wanted if rank in ranks] or [own]

    def _wait(self, happened: Callable[[], bool]) -> None:
        while not happened() and self._process.is_alive():
            time.sleep(0.0005)


def kill_at_once(pids: Sequence[int]) -> None:
    """None of them sees the others die."""
    for number in (signal.SIGSTOP, signal.SIGKILL) if len(pids) > 1 else (signal.SIGKILL,):
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, number)


def descendants(pid: int) -> list[int]:
    """The processes below one, from /proc."""
    parents: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
    found = [pid]
    for one in found:
        found += [child for child, parent in parents.items() if parent == one]
    return found[1:]


def rank_of(pid: int) -> str | None:
    """Of a process that a launcher forked (``tests.forked_ranks``)."""
    with suppress(OSError):
        name = Path(f"/proc/{pid}/comm").read_text().strip()
        return name.removeprefix("rank ") if name.startswith("rank ") else None
    return None


def newest_checkpoint(output: Path) -> int:
    return max(
        (int(folder.name[5:]) for folder in (output / "checkpoints").glob("step_??????")), default=0
    )


def state_of(output: Path) -> str:
    if not output.exists():
        return "before the directory was made"
    if any((output / "checkpoints").glob(".step_*")):
        return "while a checkpoint was written or removed"
    return f"after the checkpoint of step {newest_checkpoint(output)}"


def tables_of(stage: Stage, values: dict[str, Any], reward_folder: Path) -> dict[str, Any]:
    """A run of 12 steps, with a checkpoint every 3."""
    found = values | {"training": values["training"] | {"steps": 12}, "checkpoint": {"every": 3}}
    if stage.command == "sft":
        columns = {"prompt": "prompt", "completion": "answer"}
        sets = values["data"]
        found["data"] = {
            "train": sets["train"] | columns,
            "eval": {name: source | columns for name, source in sets["eval"].items()},
        }
        for key in ("samples_per_prompt", "updates_per_batch"):
            del found["training"][key]
    for name, table in stage.tables.items():
        found[name] = {**found.get(name, {}), **table} if isinstance(table, dict) else table
    if "replay" in stage.tables:
        own = {"function": found["reward"]["function"]}
        parts = {"own": own, "model": {"model": str(reward_folder), "weight": 0.1}}
        found["reward"] = {"in_process": True, "parts": parts}
    return found


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", STAGES)
def test_killed_and_resumed_runs_leave_the_files_of_one_never_killed(
    name: str,
    values: dict[str, Any],
    hook: Callable[[str], None],
    outcome: Callable[[Path], dict[str, Any]],
    reward_folder: Path,
    tmp_path: Path,
) -> None:
    hook(SLOW_REWARD)
    stage = STAGES[name]
    if stage.is_hybrid:
        shape = tiny_model(family="qwen3_5_text", num_layers=2, **delta_nets("qwen3_5_text", 2))
        values["model"] = str(save_tiny(tmp_path / "hybrid", shape))
    longer = tables_of(stage, values, reward_folder)
    whole = longer | {"output": tmp_path / "uninterrupted"}
    if stage.command == "sft":
        sft(SftConfig.model_validate(whole))
    else:
        train(RunConfig.model_validate(whole))
    left = (lambda root: without_the_machine(outcome(root))) if stage.processes > 1 else outcome
    expected = left(tmp_path / "uninterrupted")
    rng = random.Random(KILLS)
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(tomli_w.dumps(longer), encoding="utf-8")
    kills, runs, places, killed_ones = 0, 0, Counter[str](), Counter[str]()
    while kills < KILLS:
        output = tmp_path / f"run{runs}"
        runs += 1
        killed = True
        while killed and kills < KILLS:
            attempt = Attempt(stage, recipe, output)
            who = rng.choice(stage.victims)
            killed = attempt.kill(who, rng, aim_at_writing=rng.random() < 0.5)
            attempt.check_repeated()
            kills += killed or attempt.went_on
            places["and the trainers went on" if attempt.went_on else state_of(output)] += (
                killed or attempt.went_on
            )
            killed_ones[who] += killed or attempt.went_on
        if killed:
            attempt = Attempt(stage, recipe, output)
            attempt.finish()
            attempt.check_repeated()
        assert left(output) == expected
        assert not list((output / "checkpoints").glob(".*"))
    print(
        f"\n{name}: {kills} kills in {runs} runs ("
        + ", ".join(f"{who} {count}" for who, count in sorted(killed_ones.items()) if count)
        + "): "
        + ", ".join(f"{count} {where}" for where, count in sorted(places.items()) if count)
    )
