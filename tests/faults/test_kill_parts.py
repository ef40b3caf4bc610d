"""Kill -9 of the trainer and of what samples for it, servers or a rollouter, at random moments,
under ``async.max_staleness``: no trajectory is lost or counted twice, and what is left is one run,
which one process repeats to the last bit.  A server comes back alone.

``ISOBIT_KILLS=50 pytest tests/faults/test_kill_parts.py --rest -s`` kills so often (by default 6
times) and prints who died when.
"""

import os
import random
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from isobit.commands.replay import replay
from tests.faults.test_kill import Attempt, Stage
from tests.forked import called
from tests.serve.servers import KEY, Running, serving
from tests.tiny import json_lines

KILLS = int(os.environ.get("ISOBIT_KILLS", "6"))
STEPS, LONGEST_DELAY_S = 10, 4.0
SLOW_REWARD = "import time; time.sleep(0.01)"


class Parts:
    """Two servers and a trainer, of which one at a time is killed and started again."""

    def __init__(self, stack: ExitStack, folder: Path, place: Path) -> None:
        self._folder, self._place = folder, place
        self._stacks = [stack.enter_context(ExitStack()) for _ in range(2)]
        self.servers = [self._serve(index, "0") for index in range(2)]
        self.trainer: BaseProcess | None = None
        self._log = place / "trainer.log"
        self._log.write_text("")

    def train(self, recipe: Path, output: Path) -> BaseProcess:
        words = ["train", str(recipe), "--resume", "--output", str(output)]
        environ = os.environ | {"SERVER_KEY": KEY}
        self.trainer = called("isobit.cli.main:main", self._log, words, environ=environ)
        return self.trainer

    def kill(self, who: str) -> None:
        """A server is started again at its address; the trainer is not."""
        if who == "trainer":
            assert self.trainer is not None
            self.trainer.kill()
            self.trainer.join()
            return
        index = int(who[-1])
        port = self.servers[index].port
        self._stacks[index].close()  # kills it
        self.servers[index] = self._serve(index, str(port))

    def said(self) -> str:
        return self._log.read_text()

    def _serve(self, index: int, port: str) -> Running:
        place = self._place / f"server{index}"
        place.mkdir(exist_ok=True)
        words = ("--precision", "fp8", "--allow-weight-updates", str(place), "--port", port)
        return self._stacks[index].enter_context(serving(self._folder, place, *words))


def check_left(output: Path, groups: int) -> None:
    """One whole run: each trajectory learnt from once, and equal when it is repeated."""
    lines = json_lines(output / "schedule.jsonl")
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    learnt = [tuple(name) for line in lines for name in line["learns"]]
    assert len(set(learnt)) == len(learnt) == groups
    graded = [
        line
        for line in json_lines(output / "rewards.jsonl")
        if line["prompts"][0][0].startswith("train")
    ]
    assert [tuple(name) for line in graded for name in line["prompts"]] == learnt
    assert len({line["completions"] for line in graded}) == STEPS
    metrics = [line for line in json_lines(output / "metrics.jsonl") if "loss" in line]
    assert sum(line["log_prob_diff/tokens_differing"] for line in metrics) == 0
    said = list[str]()
    assert replay(output, say=said.append).differences == [], said


@pytest.mark.exhaustive
def test_each_part_dies_and_comes_back_alone(
    values: dict[str, Any],
    hook: Callable[[str], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SERVER_KEY", KEY)
    hook(SLOW_REWARD)
    rng, deaths, runs = random.Random(KILLS), list[str](), 0
    with ExitStack() as stack:
        parts = Parts(stack, Path(values["model"]), tmp_path)
        urls = [f"http://127.0.0.1:{one.port}" for one in parts.servers]
        rollout = {"engine": "http", "servers": urls, "server_key": "env:SERVER_KEY"}
        training = values["training"] | {"steps": STEPS}
        recipe = tmp_path / "recipe.toml"
        tables = values | {
            "training": training,
            "precision": "fp8",
            "rollout": values.get("rollout", {}) | rollout,
            "async": {"max_staleness": 3},
            "checkpoint": {"every": 3},
        }
        recipe.write_text(tomli_w.dumps(tables), encoding="utf-8")
        while len(deaths) < KILLS:
            output = tmp_path / f"run{runs}"
            runs += 1
            trainer = parts.train(recipe, output)
            while trainer.is_alive():
                if len(deaths) < KILLS:
                    time.sleep(rng.uniform(0, LONGEST_DELAY_S))
                    who = rng.choice(("trainer", "server0", "server1"))
                    if trainer.is_alive():
                        parts.kill(who)
                        deaths.append(who)
                        if who == "trainer":
                            trainer = parts.train(recipe, output)
                with suppress(TimeoutError):
                    trainer.join(0.05)
            assert trainer.exitcode == 0, parts.said()
            check_left(output, STEPS * training["prompts_per_step"])
    print(f"\n{len(deaths)} kills in {runs} runs: {', '.join(deaths)}")


@pytest.mark.exhaustive
def test_a_trainer_and_its_rollouter_die_and_come_back_together(
    values: dict[str, Any], hook: Callable[[str], None], tmp_path: Path
) -> None:
    hook(SLOW_REWARD)
    stage = Stage(victims=("trainer", "worker", "both"), processes=2, rollouters=1)
    training = values["training"] | {"steps": STEPS}
    tables = {"training": training, "async": {"max_staleness": 3}, "checkpoint": {"every": 3}}
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(tomli_w.dumps(values | tables), encoding="utf-8")
    rng, deaths, runs = random.Random(KILLS), list[str](), 0
    while len(deaths) < KILLS:
        output, was_killed = tmp_path / f"run{runs}", True
        runs += 1
        while was_killed and len(deaths) < KILLS:
            attempt, who = Attempt(stage, recipe, output), rng.choice(stage.victims)
            was_killed = attempt.kill(who, rng, aim_at_writing=rng.random() < 0.5)
            attempt.check_repeated()
            deaths += [who] * (was_killed or attempt.went_on)
        if was_killed:
            attempt = Attempt(stage, recipe, output)
            attempt.finish()
            attempt.check_repeated()
        check_left(output, STEPS * training["prompts_per_step"])
    print(f"\n{len(deaths)} kills in {runs} runs: {', '.join(deaths)}")
