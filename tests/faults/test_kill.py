"""Kill -9 at random moments of ``isobit train``, checkpoint writing included, and resume until it
is done: the files of a run that nothing happened to.

``ISOBIT_KILLS=30 pytest tests/faults/test_kill.py -s`` kills each kind of run that often (by
default 3 times, or twice with a stage beside policy and optimiser) and prints where they fell.
"""

import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from isobit.config.run import RunConfig
from isobit.run.rl.loop import train

KILLS = int(os.environ.get("ISOBIT_KILLS", "3"))
STAGE_KILLS = int(os.environ.get("ISOBIT_KILLS", "2"))
LONGEST_DELAY_S = 1.2
"""After a line of output: about as long as the steps take together, with rewards that take their
time.
"""
STAGES: dict[str, dict[str, Any]] = {
    "fp32 moments": {},
    "fp8 moments": {"training": {"moments": "fp8"}},
    "ppo": {"algorithm": {"name": "ppo", "kl_coefficient": 0.01}},
    "kl, replay, reward model, lag": {
        "algorithm": {"kl_coefficient": 0.1},
        "reference": {"refresh_every": 4},
        "replay": {"fraction": 0.5, "max_staleness": 8},
        "async": {"lag": 1},
    },
}
"""What has a state of its own beside policy and optimiser: a value head, a reference model, a
buffer, weights that grade, batches that wait.
"""
SLOW_REWARD = "import time; time.sleep(0.003)"


class Attempt:
    """One process of ``isobit train --resume`` and what it printed."""

    def __init__(self, recipe: Path, output: Path) -> None:
        self.output = output
        self.newest = newest_checkpoint(output)
        self._printed = output.with_suffix(".log")
        with self._printed.open("w") as file:
            command = [
                sys.executable,
                "-m",
                "isobit.cli.main",
                "train",
                str(recipe),
                "--resume",
                "--output",
                str(output),
            ]
            self.process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)

    def kill(self, rng: random.Random, aim_at_writing: bool) -> bool:
        """Kill it some time after it began to load or to work, or milliseconds after a checkpoint
        begins; False if it was done before.
        """
        if aim_at_writing:
            self._wait(lambda: any((self.output / "checkpoints").glob(".step_*.partial")))
            time.sleep(rng.uniform(0, 0.006))
        else:
            line = rng.choice(
                ("r", "lm_head", "lm_head", "lm_head")
            )  # of its first line; and of the last before the first evaluation
            self._wait(lambda: line in self._printed.read_text())
            time.sleep(rng.uniform(0, LONGEST_DELAY_S))
        self.process.send_signal(signal.SIGKILL)
        return self.process.wait() == -signal.SIGKILL

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
        assert self.process.wait() == 0, self._printed.read_text()

    def _wait(self, happened: Callable[[], bool]) -> None:
        while not happened() and self.process.poll() is None:
            time.sleep(0.0005)


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


@pytest.mark.parametrize("stage", STAGES)
def test_killed_and_resumed_runs_leave_the_files_of_one_never_killed(
    stage: str,
    values: dict[str, Any],
    hook: Callable[[str], None],
    outcome: Callable[[Path], dict[str, Any]],
    reward_folder: Path,
    tmp_path: Path,
) -> None:
    hook(SLOW_REWARD)
    more, wanted = STAGES[stage], KILLS if stage.endswith("moments") else STAGE_KILLS
    longer = (
        values
        | more
        | {
            "training": values["training"] | {"steps": 18} | more.get("training", {}),
            "reward": values["reward"] | {"in_process": stage != "fp8 moments", "workers": 1},
            "checkpoint": {"every": 3},
        }
    )
    train(RunConfig.model_validate(longer | {"output": tmp_path / "uninterrupted"}))
    expected = outcome(tmp_path / "uninterrupted")
    rng = random.Random(wanted)
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(tomli_w.dumps(longer), encoding="utf-8")
    kills, runs, places = 0, 0, Counter[str]()
    while kills < wanted:
        output = tmp_path / f"run{runs}"
        runs += 1
        killed = True
        while killed and kills < wanted:
            attempt = Attempt(recipe, output)
            killed = attempt.kill(rng, aim_at_writing=rng.random() < 0.5)
            attempt.check_repeated()
            kills += killed
            places[state_of(output)] += killed
        if killed:
            attempt = Attempt(recipe, output)
            attempt.finish()
            attempt.check_repeated()
        assert outcome(output) == expected
        assert not list((output / "checkpoints").glob(".*"))
    print(
        f"\n{kills} kills in {runs} runs: "
        + ", ".join(f"{count} {where}" for where, count in sorted(places.items()) if count)
    )
