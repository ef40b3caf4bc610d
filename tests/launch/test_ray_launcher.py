"""Ranks on a Ray cluster: where they are, what they are told, and what becomes of the others when
one dies.  One cluster of this machine for all tests.
"""

import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from isobit.cli.main import main
from isobit.launch import ray_launcher
from isobit.launch.local import with_restarts
from isobit.launch.ranks import RankError
from isobit.launch.ray_launcher import _Site, environments_of, launch_on_ray, open_to_all
from isobit.util.errors import ConfigError, Interrupted
from tests.launch.alive import is_alive, processes, wait_for_the_end_of

pytestmark = pytest.mark.skipif(
    find_spec("ray") is None, reason="the extra 'ray' is not installed: pip install 'isobit[ray]'"
)  # not imported here: it reads its environment when it is
FOLDER = Path(__file__).parent
TOY, TRAINED = str(FOLDER / "toy.py"), str(FOLDER / "trained.py")
RECIPE = str(FOLDER.parents[1] / "recipes" / "quickstart.toml")
SMALL = ["--training.steps", "5", "--data.train.limit", "20", "--training.prompts_per_step", "2"]
SMALL += ["--training.samples_per_prompt", "4", "--training.tokens_per_microbatch", "200"]
SMALL += ["--evaluation.every", "0", "--data.eval.held_out.limit", "4"]
SMALL += ["--threads", "1", "--checkpoint.every", "1", "--rollout.max_new_tokens", "8"]
HEAD = """
import os, sys
os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
import ray
context = ray.init("local", include_dashboard=False, num_cpus=3, logging_level="error")
print("address", context.address_info["gcs_address"], flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "token")
        patch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        head = subprocess.Popen(
            [sys.executable, "-c", HEAD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert head.stdout is not None
        address = next(line.split()[1] for line in head.stdout if line.startswith("address "))
        patch.setenv("RAY_ADDRESS", address)
        yield address
        head.communicate()
        assert head.returncode == 0


def on_ray(*arguments: str, size: int = 2) -> None:
    launch_on_ray(arguments, size, 1, "cpu", size)


def during(folder: Path, count: int, act: Callable[[list[int]], None]) -> threading.Thread:
    """Does something once all ranks run."""
    thread = threading.Thread(target=lambda: act(processes(folder, count)))
    thread.start()
    return thread


def parent(process: int) -> int:
    return int(Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[1])


def test_the_ranks_meet_and_the_first_is_shown(
    cluster: str, capfd: pytest.CaptureFixture[str]
) -> None:
    on_ray(TRAINED, "fine")
    assert "2 processes through Ray: 2 on " in capfd.readouterr().out
    on_ray(TOY, "fine", size=3)
    shown = capfd.readouterr().out
    assert "rank 0 of 3" in shown
    assert "rank 1 of" not in shown


def test_the_death_of_a_rank_ends_all(cluster: str, tmp_path: Path) -> None:
    with pytest.raises(RankError, match=r"rank 1 .* was killed by SIGKILL in training") as failed:
        on_ray(TOY, "killed", str(tmp_path))
    assert (failed.value.exit_code, failed.value.died) == (137, True)
    assert "  | rank 1 of 2" in str(failed.value)
    assert not any(is_alive(pid) for pid in processes(tmp_path, 2))


def test_a_reason_that_a_rank_knows_is_said(cluster: str) -> None:
    with pytest.raises(RankError, match=r"^rank 1: the disk is full$") as failed:
        on_ray(TOY, "error")
    assert (failed.value.exit_code, failed.value.died) == (2, False)


def test_the_death_of_an_actor_ends_all(cluster: str, tmp_path: Path) -> None:
    killer = during(tmp_path, 2, lambda pids: os.kill(parent(pids[1]), signal.SIGKILL))
    with pytest.raises(RankError, match=r"rank 1 .* is gone with its actor: ") as failed:
        on_ray(TOY, "sleep", str(tmp_path))
    killer.join()
    assert failed.value.died
    wait_for_the_end_of(processes(tmp_path, 2))


def test_the_death_of_both_parts_actors_ends_all(cluster: str, tmp_path: Path) -> None:
    """A rollouter's end waits for what the trainer says, which is gone, too."""

    def kill(pids: list[int]) -> None:
        for pid in reversed(pids):
            os.kill(parent(pid), signal.SIGKILL)

    killer = during(tmp_path, 2, kill)
    with pytest.raises(RankError, match=r"rank . .* is gone with its actor: "):
        launch_on_ray([TOY, "sleep", str(tmp_path)], 2, 1, "cpu", 2, 1)
    killer.join()
    wait_for_the_end_of(processes(tmp_path, 2))


def test_it_is_started_again(cluster: str, capfd: pytest.CaptureFixture[str]) -> None:
    with_restarts(lambda words, again: on_ray(*words), [TOY, "once"], 1)
    shown = capfd.readouterr()
    assert shown.out.count("rank 0 of 2") == 2
    assert "was killed by SIGKILL" in shown.err
    assert "restarts left: 0" in shown.err


def test_a_run_whose_actor_dies_has_the_bytes_of_one_process(
    cluster: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    alone, on_two = tmp_path / "alone", tmp_path / "two"
    assert main(["train", RECIPE, "--output", str(alone), *SMALL]) == 0

    def kill() -> None:
        wait_until((on_two / "checkpoints" / "step_000001").exists)
        os.kill(parent(rank_of(on_two, 1)), signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    ray = ["--cluster.launcher", "ray", "--cluster.processes", "2", "--cluster.restarts", "1"]
    assert main(["train", RECIPE, "--output", str(on_two), *SMALL, *ray]) == 0
    killer.join()
    assert re.search(r"rank 1 .* is gone with its actor", capfd.readouterr().err)
    check_bytes(on_two, alone)


@pytest.mark.parametrize("who", ["the rank", "its actor"])
def test_a_rollouter_that_dies_comes_back_and_the_trainer_goes_on(
    cluster: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], who: str
) -> None:
    alone, on_two, trainers = tmp_path / "alone", tmp_path / "two", list[int]()
    small = [*SMALL, "--training.steps", "12", "--async.lag", "1"]
    assert main(["train", RECIPE, "--output", str(alone), *small]) == 0

    def kill() -> None:
        wait_until((on_two / "checkpoints" / "step_000002").exists)
        rollouter = rank_of(on_two, 1)
        os.kill(rollouter if who == "the rank" else parent(rollouter), signal.SIGKILL)
        trainers.append(rank_of(on_two, 0))
        wait_until((on_two / "checkpoints" / "step_000010").exists)
        trainers.append(rank_of(on_two, 0))

    killer = threading.Thread(target=kill)
    killer.start()
    ray = ["--cluster.launcher", "ray", "--cluster.processes", "2", "--cluster.rollouters", "1"]
    assert main(["train", RECIPE, "--output", str(on_two), *small, *ray]) == 0
    killer.join()
    said = capfd.readouterr().err
    how = "was killed by SIGKILL" if who == "the rank" else "is gone with its actor"
    assert re.search(rf"rank 1 .* {how}", said)
    assert "the rollouters are started again, for the first time" in said
    assert trainers[0] == trainers[1]
    check_bytes(on_two, alone)


def check_bytes(run: Path, other: Path) -> None:
    """Both have drawn, rewarded and learnt the same."""
    for name in ("completions.jsonl", "rewards.jsonl", "digests.jsonl", "model/model.safetensors"):
        assert (run / name).read_bytes() == (other / name).read_bytes(), name


def wait_until(there: Callable[[], bool]) -> None:
    while not there():
        time.sleep(0.01)


def rank_of(output: Path, number: int) -> int:
    """The process of a rank of the run that writes there."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().split(b"\0")
            place = (folder / "environ").read_bytes().split(b"\0")
        except OSError:
            continue  # it has ended, or is not ours
        if str(output).encode() in words and f"RANK={number}".encode() in place:
            return int(folder.name)
    raise AssertionError(f"no rank {number} of {output}")


def test_a_signal_reaches_all(cluster: str, tmp_path: Path) -> None:
    sender = during(tmp_path, 2, lambda pids: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(Interrupted, match="SIGTERM"):
        on_ray(TOY, "sleep", str(tmp_path))
    sender.join()
    assert not any(is_alive(pid) for pid in processes(tmp_path, 2))


def test_no_orphans_when_the_driver_is_killed(cluster: str, tmp_path: Path) -> None:
    call = "from isobit.launch.ray_launcher import launch_on_ray; "
    call += f"launch_on_ray([{TOY!r}, 'sleep', {str(tmp_path)!r}], 2, 1, 'cpu', 2)"
    driver = subprocess.Popen([sys.executable, "-c", call], stderr=subprocess.DEVNULL)
    pids = processes(tmp_path, 2)
    driver.kill()
    driver.wait()
    wait_for_the_end_of(pids)


def test_too_many_are_refused_and_fewer_taken_where_that_is_allowed(
    cluster: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError, match=r"4 processes take 1 CPU each, .* room for 3 of them"):
        on_ray(TOY, "fine", size=4)
    launch_on_ray([TOY, "fine"], 4, 1, "cpu", 1)
    assert "rank 0 of 3" in capfd.readouterr().out


def test_places_that_others_hold_are_waited_for_and_named(
    cluster: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(ray_launcher, "PLACE_S", 0.5)
    call = "from isobit.launch.ray_launcher import launch_on_ray; "
    call += f"launch_on_ray([{TOY!r}, 'sleep', {str(tmp_path)!r}], 2, 1, 'cpu', 2)"
    other = subprocess.Popen([sys.executable, "-c", call], stderr=subprocess.DEVNULL)
    processes(tmp_path, 2)
    try:
        with pytest.raises(ConfigError, match="no 2 places of 1 CPU have become free"):
            on_ray(TOY, "fine")
    finally:
        other.terminate()
        assert other.wait() != 0


def test_a_directory_that_a_host_does_not_have_is_named(
    cluster: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "getcwd", lambda: "/no/such/place")
    with pytest.raises(ConfigError, match=r"has no directory '/no/such/place': .* all hosts see"):
        on_ray(TOY, "fine")


def test_an_address_where_nobody_listens_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{one.getsockname()[1]}"
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(ConfigError, match=f"RAY_ADDRESS = '{address}' cannot be joined"):
        on_ray(TOY, "fine")


def test_who_has_no_ray_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"pip install 'isobit\[ray\]'"):
        on_ray(TOY, "fine")


def test_what_ranks_are_told_of_their_places() -> None:
    sites = [
        _Site("a", "10.0.0.1", "one", ("2",), 16),
        _Site("a", "10.0.0.1", "one", ("5",), 16),
        _Site("b", "10.0.0.2", "two", ("0",), 4),
    ]
    told = environments_of(sites, 1234, None)
    assert [place["CUDA_VISIBLE_DEVICES"] for place in told] == ["2,5", "2,5", "0"]
    assert [place["LOCAL_RANK"] for place in told] == ["0", "1", "0"]
    assert [place["LOCAL_WORLD_SIZE"] for place in told] == ["2", "2", "1"]
    same = {"WORLD_SIZE": "3", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "1234"}
    assert all(same.items() <= place.items() for place in told)
    assert {place["OMP_NUM_THREADS"] for place in told} == {"4"}, "the same everywhere"
    assert {place["OMP_NUM_THREADS"] for place in environments_of(sites, 1, 3)} == {"3"}


@pytest.mark.parametrize(
    ("address", "mode", "is_open"),
    [
        ("10.0.0.1:6379", None, True),
        ("10.0.0.1:6379", "disabled", True),
        ("10.0.0.1:6379", "token", False),
        ("127.0.0.1:6379", None, False),
        ("[::1]:6379", None, False),
        ("head.example.org:6379", None, True),
    ],
)
def test_a_cluster_without_a_token_is_warned_of(
    address: str, mode: str | None, is_open: bool
) -> None:
    environment = {} if mode is None else {"RAY_AUTH_MODE": mode}
    warning = open_to_all(address, environment)
    assert (warning is not None) == is_open
    assert warning is None or address in warning
