"""A rollouter is killed, while it waits for the trainers and while it serves: the run is started
again by whoever has started it, without a hand, as often as is allowed; what the dead one was
drawing is drawn again with the same seeds, and graded once: the bytes are those of a run that
nothing happened to.
"""

import json
import os
import signal
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from isobit.config.recipes import RunConfig
from isobit.launch.local import launch, with_restarts
from isobit.run.loop import train
from tests.faults.test_rank_deaths import without_the_machine
from tests.forked import called
from tests.forked_ranks import forked
from tests.worlds import free_port

PROGRAM = str(Path(__file__).with_name("rank.py"))


@pytest.fixture(scope="session")
def expected_ahead(
    shared_values: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[Callable[[Path], dict[str, Any]]], dict[str, Any]]:
    """The outcome of one process with a lag of 1."""
    root = tmp_path_factory.mktemp("ahead") / "run"

    def of(outcome: Callable[[Path], dict[str, Any]]) -> dict[str, Any]:
        if not root.exists():
            ahead = {**shared_values, "output": root, "async": {"lag": 1}}
            train(RunConfig.model_validate(ahead))
        return without_the_machine(outcome(root))

    return of


@pytest.fixture
def command(
    values: dict[str, Any], tmp_path: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[dict[str, int]], list[str]]:
    """``rank.py`` with a run of one trainer and one rollouter, in ``tmp_path / "run"``, and with
    where the rollouter dies in each start.
    """
    (place / "hook.py").unlink(missing_ok=True)
    recipe = tmp_path / "recipe.toml"
    run = {"output": str(tmp_path / "run"), "async": {"lag": 1}, "cluster": {"rollouters": 1}}
    recipe.write_text(tomli_w.dumps({**values, **run}), encoding="utf-8")
    monkeypatch.setenv("STARTS", str(tmp_path / "starts"))

    def of(ends: dict[str, int]) -> list[str]:
        calls = ",".join(map(str, ends.values()))
        return [PROGRAM, ",".join(ends), calls, str(int(signal.SIGKILL)), "train", str(recipe)]

    return of


def check(
    root: Path, expected: dict[str, Any], outcome: Callable[[Path], dict[str, Any]], starts: int
) -> None:
    assert (root.parent / "starts").stat().st_size == starts
    assert without_the_machine(outcome(root)) == expected
    lines = [json.loads(line) for line in (root / "rewards.jsonl").read_text().splitlines()]
    asked = [json.dumps(line["prompts"]) for line in lines]
    assert len(asked) == 6 + 3, "each batch and each evaluation was graded once"


def start_again(words: list[str], restarts: int) -> None:
    """Under our launcher, in a process of its own."""
    with_restarts(lambda words, _: launch(words, 2, threads=1), words, restarts)


@pytest.mark.exhaustive
def test_our_launcher(
    command: Callable[[dict[str, int]], list[str]],
    tmp_path: Path,
    expected_ahead: Callable[..., dict[str, Any]],
    outcome: Callable[[Path], dict[str, Any]],
) -> None:
    words, log = command({"idle": 4, "rollout": 20}), tmp_path / "log"
    launcher = called("tests.faults.test_restarts:start_again", log, words, 2)
    launcher.join()
    said = log.read_text()
    assert launcher.exitcode == 0, said
    assert said.count("rank 1 (") == said.count("was killed by SIGKILL in ") == 2
    assert "restarts left: 0" in said
    check(tmp_path / "run", expected_ahead(outcome), outcome, starts=3)


def start_torchrun(words: list[str]) -> None:
    """Its agent, in a process of its own, which forks the ranks that it would start."""
    agent = import_module("torch.distributed.run")
    handler = "torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler"
    vars(import_module(handler))["Popen"] = forked
    agent.main(words)


@pytest.mark.exhaustive
def test_torchrun(
    command: Callable[[dict[str, int]], list[str]],
    tmp_path: Path,
    expected_ahead: Callable[..., dict[str, Any]],
    outcome: Callable[[Path], dict[str, Any]],
) -> None:
    words = ["--nnodes", "1", "--nproc-per-node", "2", "--max-restarts", "1"]
    words += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port()}"]
    words += [*command({"rollout": 20}), "--resume"]
    log, environ = tmp_path / "log", {**os.environ, "OMP_NUM_THREADS": "1"}
    agent = called("tests.faults.test_restarts:start_torchrun", log, words, environ=environ)
    agent.join()
    assert agent.exitcode == 0, log.read_text()[-2000:]
    check(tmp_path / "run", expected_ahead(outcome), outcome, starts=2)
