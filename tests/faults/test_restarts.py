"""A rollouter is killed, while it waits for the trainers and while it serves.  Under our launcher
rollouters come back and the trainers go on; where none does so, the run is started again without a
hand, as often as is allowed.  What the dead one was drawing is drawn again with the same seeds, and
graded once: the bytes are those of a run that nothing happened to.
"""

import json
import os
import signal
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from isobit.commands.replay import replay
from isobit.config.recipes import RunConfig
from isobit.launch.local import launch, with_restarts
from isobit.run.loop import train
from tests.faults.test_rank_deaths import without_the_machine
from tests.forked import called
from tests.forked_ranks import forked
from tests.tiny import json_lines
from tests.worlds import free_port


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


def check(
    root: Path, expected: dict[str, Any], outcome: Callable[[Path], dict[str, Any]], starts: int
) -> None:
    assert (root.parent / "starts").stat().st_size == starts
    assert without_the_machine(outcome(root)) == expected
    lines = [json.loads(line) for line in (root / "rewards.jsonl").read_text().splitlines()]
    asked = [json.dumps(line["prompts"]) for line in lines]
    assert len(asked) == 6 + 3, "each batch and each evaluation was graded once"


@pytest.fixture
def check_ahead(
    tmp_path: Path,
    expected_ahead: Callable[..., dict[str, Any]],
    outcome: Callable[[Path], dict[str, Any]],
) -> Callable[[int], None]:
    """Checks that the run of ``command`` took so many starts, and left what one process leaves."""
    return lambda starts: check(tmp_path / "run", expected_ahead(outcome), outcome, starts)


def run_once(words: list[str], size: int, rollouters: int) -> None:
    """Under our launcher, in a process of its own, which starts no run again."""
    launch(words, size, threads=1, rollouters=rollouters)


MOMENTS: dict[str, dict[str, int]] = {
    "while they load, and again": {"loading": 1, "idle": 1},
    "while trainers wait for the batch": {"rollout": 20},
    "while trainers learn": {"learning": 3},
    "when they have learnt": {"learnt": 2},
    "while weights are passed on": {"rows": 3},
    "in an evaluation": {"evaluation": 2},
    "as they come to the trainers": {"rollout": 20, "meeting": 1},
    "as they meet them": {"rollout": 20, "joining": 1},
    "three times in a row, with an answer between": {"rollout": 20, "idle": 3, "comparing": 2},
    "when all is done": {"end": 1},
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize(("size", "rollouters"), [(2, 1), (3, 1), (3, 2)], ids=str)
def test_rollouters_die_and_the_trainers_go_on(
    moment: str,
    size: int,
    rollouters: int,
    command: Callable[[dict[str, int]], list[str]],
    tmp_path: Path,
    check_ahead: Callable[[int], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One is killed; its part of the run comes back, however many ranks either part has."""
    monkeypatch.setenv("VICTIM", str(size - rollouters))
    words, log = command(MOMENTS[moment]), tmp_path / "log"
    words += ["--cluster.rollouters", str(rollouters)]
    code, said = ended(words, log, size, rollouters)
    assert code == 0, said
    deaths = said.count("the rollouters are started again")
    assert said.count("was killed by SIGKILL") == deaths
    if "end" in MOMENTS[moment]:  # there they come back unless trainers say first that all is done
        starts = (tmp_path / "starts").stat().st_size
        assert starts in (1, deaths + 1)
    else:
        assert deaths == len(MOMENTS[moment])
        starts = deaths + 1
    check_ahead(starts)


@pytest.mark.exhaustive
def test_rollouters_of_adapters_come_back_after_trainers_have_learnt(
    values: dict[str, Any],
    command: Callable[[dict[str, int]], list[str]],
    tmp_path: Path,
    outcome: Callable[[Path], dict[str, Any]],
) -> None:
    """They are sent the adapters and scales a tensor of their question, not those of now."""
    more = {"lora": {"rank": 4}, "precision": {"preset": "fp8", "kv_scales": "per_tensor"}}
    words = command({"learnt": 3})
    recipe = tmp_path / "recipe.toml"
    whole = {**values, **more, "async": {"lag": 1}}
    recipe.write_text(tomli_w.dumps({**whole, "output": str(tmp_path / "run")}), encoding="utf-8")
    train(RunConfig.model_validate({**whole, "output": tmp_path / "whole"}))
    words += ["--cluster.rollouters", "1"]
    code, said = ended(words, tmp_path / "log")
    assert code == 0, said
    check(tmp_path / "run", without_the_machine(outcome(tmp_path / "whole")), outcome, starts=2)


def ended(
    words: list[str], log: Path, size: int = 2, rollouters: int = 1
) -> tuple[int | None, str]:
    """The exit code of the launcher, and what was said."""
    launcher = called("tests.faults.test_restarts:run_once", log, words, size, rollouters)
    launcher.join()
    return launcher.exitcode, log.read_text()


def test_rollouters_that_die_before_they_answer_end_the_run_at_the_third_time(
    command: Callable[[dict[str, int]], list[str]], tmp_path: Path
) -> None:
    code, said = ended(command({"loading": 1, "idle": 1, "weights": 1}), tmp_path / "log")
    assert code != 0
    assert said.count("the rollouters are started again") == 2
    assert "rank 1 is not started again, since its part of the run has died 3 times" in said
    assert "RankError: rank 1 (" in said
    assert "was killed by SIGKILL" in said.partition("RankError: ")[2]


def test_an_error_of_a_rollouter_and_the_death_of_a_trainer_end_the_run(
    command: Callable[[dict[str, int]], list[str]],
    hook: Callable[[str], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    words = command({"training": 3})
    monkeypatch.setenv("VICTIM", "0")
    code, said = ended(words, tmp_path / "log")
    assert code != 0
    assert "RankError: rank 0 (" in said
    monkeypatch.setenv("VICTIM", "none")
    hook("raise ValueError")
    code, failed = ended([*words, "--resume"], tmp_path / "log")
    assert code != 0
    assert "RankError: " in failed
    assert "rewards" in failed.partition("RankError: ")[2]
    assert "are started again" not in said + failed


@pytest.mark.exhaustive
def test_a_rollouter_that_hangs_is_ended_and_comes_back(
    command: Callable[[dict[str, int]], list[str]],
    tmp_path: Path,
    check_ahead: Callable[[int], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ISOBIT_SILENCE_S", "6")
    words = command({"rollout": 20})
    words[3] = str(int(signal.SIGSTOP))
    code, said = ended(words, tmp_path / "log")
    assert code == 0, said
    assert said.count("isobit: rank 1 (") == said.count("has been silent in ") == 1
    check_ahead(2)


@pytest.mark.few(1)
@pytest.mark.parametrize("freely", [False, True], ids=["lag", "freely"])
def test_a_signal_does_not_wait_for_rollouters_that_come_back(
    freely: bool,
    command: Callable[[dict[str, int]], list[str]],
    tmp_path: Path,
    check_ahead: Callable[[int], None],
) -> None:
    """Here they hang before they have met the trainers, who save, and go on with --resume."""
    words, log = command({"rollout": 20, "loading": 1}), tmp_path / "log"
    words[3] = f"{int(signal.SIGKILL)},{int(signal.SIGSTOP)}"
    if freely:
        words += ["--async.lag", "0", "--async.max_staleness", "2"]
    launcher = called("tests.faults.test_restarts:run_once", log, words, 2, 1)
    starts = tmp_path / "starts"
    while not starts.exists() or starts.stat().st_size < 2:
        time.sleep(0.01)
    launcher.terminate()
    launcher.join()
    assert launcher.exitcode != 0
    assert "Interrupted: stopped by SIGTERM" in log.read_text().partition("are started again")[2]
    assert json_lines(tmp_path / "run" / "metrics.jsonl")
    code, said = ended([*words, "--resume"], log)
    assert code == 0, said
    if freely:
        assert replay(tmp_path / "run", say=lambda _: None).differences == []
    else:
        check_ahead(3)


def test_rollouters_do_not_come_back_with_another_reward(
    place: Path,
    command: Callable[[dict[str, int]], list[str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reward = tmp_path / "reward.py"
    reward.write_text((place / "reward.py").read_text(encoding="utf-8"), encoding="utf-8")
    words = [*command({"rollout": 20}), "--reward.function", f"{reward}:reward"]
    monkeypatch.setenv("EDITED", str(reward))
    code, said = ended(words, tmp_path / "log")
    assert code != 0
    assert "has read another reward.function.source than rank 0 has: it has changed" in said


FREELY: dict[str, dict[str, int]] = {
    "while a batch is drawn": {"rollout": 20},
    "while trainers learn": {"learning": 3},
    "when they have learnt, and as it is drawn again": {"learnt": 2, "rollout": 1},
    "while they compare": {"opening": 3},
    "in an evaluation": {"evaluation": 2},
    "as they meet the trainers": {"rollout": 20, "joining": 1},
    "while weights are passed on": {"rows": 3},
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("moment", FREELY)
@pytest.mark.parametrize(("size", "rollouters"), [(2, 1), (3, 2)], ids=str)
def test_rollouters_that_draw_freely_die_and_each_trajectory_counts_once(
    moment: str,
    size: int,
    rollouters: int,
    command: Callable[[dict[str, int]], list[str]],
    tmp_path: Path,
) -> None:
    """What is left is one run, which is repeated to the last bit."""
    words, log, root = command(FREELY[moment]), tmp_path / "log", tmp_path / "run"
    words += ["--cluster.rollouters", str(rollouters), "--async.lag", "0"]
    words += ["--async.max_staleness", "2"]
    code, said = ended(words, log, size, rollouters)
    assert code == 0, said
    assert said.count("the rollouters are started again") == len(FREELY[moment])
    check_counted_once(root)


def check_counted_once(root: Path, steps: int = 6) -> None:
    """What is left is one run of each trajectory once, which is repeated to the last bit."""
    lines = json_lines(root / "schedule.jsonl")
    assert [line["step"] for line in lines] == [*range(1, steps + 1)]
    learnt = [name for line in lines for name in line["learns"]]
    assert len({tuple(name) for name in learnt}) == len(learnt) == steps * 4
    assert [name for names in trained(root) for name in names] == learnt
    metrics = [line for line in json_lines(root / "metrics.jsonl") if "loss" in line]
    assert sum(line["log_prob_diff/tokens_differing"] for line in metrics) == 0
    assert replay(root, say=lambda _: None).differences == []


def trained(root: Path) -> list[list[list[Any]]]:
    """The prompts of each grading of a step, in the order of the run."""
    graded = [line["prompts"] for line in json_lines(root / "rewards.jsonl")]
    return [names for names in graded if names[0][0].startswith("train")]


@pytest.mark.exhaustive
@pytest.mark.parametrize("moment", [{"idle": 3}, {"learning": 1}], ids=str)
def test_a_batch_that_only_its_line_names_is_drawn_again(
    moment: dict[str, int],
    command: Callable[[dict[str, int]], list[str]],
    uninterrupted: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first start waits in vain for the first group's rewards, and so hands over a batch that
    the second one, which need not wait, would not choose.  It dies before the trainers begin to
    learn from it: the second one could draw on beside them.
    """
    monkeypatch.setenv("UNGRADED", "1")
    words, root = command(moment), tmp_path / "run"
    words += ["--async.lag", "0", "--async.max_staleness", "2"]
    words += ["--rollout.max_sequences", "4", "--rollout.max_new_tokens", "40"]
    words += ["--training.steps", "3"]
    code, said = ended(words, tmp_path / "log")
    assert code == 0, said
    assert said.count("the rollouters are started again") == 1
    first_prompts = trained(uninterrupted)[0]
    assert json_lines(root / "schedule.jsonl")[0]["learns"] != first_prompts
    check_counted_once(root, steps=3)


def start_again(words: list[str], restarts: int) -> None:
    """Under our launcher, in a process of its own."""
    with_restarts(lambda words, _: launch(words, 2, threads=1), words, restarts)


@pytest.mark.exhaustive
def test_our_launcher(
    command: Callable[[dict[str, int]], list[str]],
    tmp_path: Path,
    check_ahead: Callable[[int], None],
) -> None:
    words, log = command({"idle": 4, "rollout": 20}), tmp_path / "log"
    launcher = called("tests.faults.test_restarts:start_again", log, words, 2)
    launcher.join()
    said = log.read_text()
    assert launcher.exitcode == 0, said
    assert said.count("rank 1 (") == said.count("was killed by SIGKILL in ") == 2
    assert "restarts left: 0" in said
    check_ahead(3)


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
    check_ahead: Callable[[int], None],
) -> None:
    words = ["--nnodes", "1", "--nproc-per-node", "2", "--max-restarts", "1"]
    words += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port()}"]
    words += [*command({"rollout": 20}), "--resume"]
    log, environ = tmp_path / "log", {**os.environ, "OMP_NUM_THREADS": "1"}
    agent = called("tests.faults.test_restarts:start_torchrun", log, words, environ=environ)
    agent.join()
    assert agent.exitcode == 0, log.read_text()[-2000:]
    check_ahead(2)
