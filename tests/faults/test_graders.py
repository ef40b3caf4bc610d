"""A run whose rewards are called by a pool of processes: a signal ends it while a reward hangs, a
kill leaves no process and no lock, and out come the files of a run that calls them itself.
"""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from isobit.cli.main import main
from isobit.run.loop import train
from isobit.util.errors import RewardError
from tests.forked import command

MakeConfig = Callable[..., Any]
Hook = Callable[[str], None]
HANG = """
import os, time
(hook.parent / "grader").write_text(f"{os.getpid()} {os.getppid()}")
if (hook.parent / "hang").exists() and call >= 20: time.sleep(3600)
"""
"""In step 2 or 3: a process counts its own calls."""


def exists(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.fixture
def recipe(values: dict[str, Any], tmp_path: Path) -> Path:
    reward = {"function": values["reward"]["function"], "workers": 2, "deadline_s": 3600}
    path = tmp_path / "recipe.toml"
    path.write_text(tomli_w.dumps({**values, "reward": reward, "output": str(tmp_path / "run")}))
    return path


def test_a_pool_gives_the_files_of_a_run_that_grades_itself(
    recipe: Path,
    make_config: MakeConfig,
    expected: dict[str, Any],
    outcome: Callable[[Path], dict[str, Any]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    make_config()  # removes the hook of another test
    assert main(["train", str(recipe)]) == 0
    assert "(Isobit's form: prompt, completion); 2 processes" in capsys.readouterr().out
    assert outcome(recipe.parent / "run") == expected


@pytest.mark.exhaustive
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_run_whose_reward_hangs_can_be_stopped_and_goes_on(
    how: signal.Signals,
    recipe: Path,
    place: Path,
    hook: Hook,
    expected: dict[str, Any],
    outcome: Callable[[Path], dict[str, Any]],
) -> None:
    hook(HANG)
    (place / "hang").touch()
    errors = recipe.with_suffix(".errors")
    first = command(["train", str(recipe)], recipe.with_suffix(".log"), errors)
    assert first.pid is not None
    try:
        record = recipe.parent / "run" / "rewards.jsonl"
        while not (record.exists() and len(record.read_text().splitlines()) >= 2):
            assert first.is_alive(), errors.read_text()
            time.sleep(0.01)
        time.sleep(0.5)  # into the middle of a step that does not end
        os.kill(first.pid, how)
        first.join()
    finally:
        (place / "hang").unlink()
        first.kill()
        first.join()
    if how is signal.SIGKILL:
        assert first.exitcode == -how
    else:
        assert first.exitcode == 128 + how and f"stopped by {how.name}" in errors.read_text()
    graders = [int(pid) for pid in (place / "grader").read_text().split()]
    while any(exists(pid) for pid in graders):
        time.sleep(0.01)
    assert main(["train", str(recipe), "--resume"]) == 0
    assert outcome(recipe.parent / "run") == expected


def test_a_run_leaves_no_process_however_it_ends(
    make_config: MakeConfig, place: Path, hook: Hook
) -> None:
    pids = place / "pids"
    pids.unlink(missing_ok=True)
    write = f"import os\nwith open({str(pids)!r}, 'a') as file: print(os.getpid(), file=file)\n"
    config = make_config(reward={"in_process": False, "workers": 2}, training={"steps": 2})
    hook(write)
    train(config)
    hook(write + "if call > 3: raise KeyError('answer')")
    with pytest.raises(RewardError, match="KeyError: 'answer'"):
        train(config.model_copy(update={"output": config.output.with_name("failed")}))
    graders = {int(pid) for pid in pids.read_text().split()}
    assert graders and not any(exists(pid) for pid in graders)


def test_random_numbers_of_a_reward_are_its_own(
    make_config: MakeConfig,
    hook: Hook,
    expected: dict[str, Any],
    outcome: Callable[[Path], dict[str, Any]],
) -> None:
    """Even in the process of the run, which draws from no generator of the process."""
    config = make_config()
    hook(
        "import random, numpy, torch\n"
        "for seed in (random.seed, numpy.random.seed, torch.manual_seed): seed(call)\n"
    )
    train(config)
    assert outcome(config.output) == expected
