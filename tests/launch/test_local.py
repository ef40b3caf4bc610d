"""Whatever becomes of one rank, all end, with one reason.

A run goes on after the death of a rank, and only then.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from isobit.launch.local import launch, with_restarts
from isobit.launch.ranks import RankError
from isobit.util.errors import ConfigError
from tests.launch.alive import is_alive, processes, wait_for_the_end_of

TOY = str(Path(__file__).with_name("toy.py"))


def test_all_ranks_run_and_the_first_has_the_output(capfd: pytest.CaptureFixture[str]) -> None:
    launch([TOY, "fine"], 3)
    shown = capfd.readouterr().out
    assert "3 processes on " in shown
    assert "rank 0 of 3" in shown
    assert "rank 1" not in shown


def test_nobody_reads_the_terminal() -> None:
    launch([TOY, "stdin"], 2)


def test_an_exit_code_is_told_with_phase_memory_and_last_words(tmp_path: Path) -> None:
    with pytest.raises(RankError) as failed:
        launch([TOY, "exit", str(tmp_path)], 3)
    assert failed.value.exit_code == 3
    text = str(failed.value)
    assert "rank 1 (" in text
    assert f"process {processes(tmp_path, 3)[1]}) ended with exit code 3 in training after" in text
    assert "it held at most" in text
    assert "  | the last words" in text
    assert "rank 2" not in text
    assert not any(is_alive(pid) for pid in processes(tmp_path, 3))


def test_a_signal_is_named_with_what_it_may_mean() -> None:
    with pytest.raises(RankError, match=r"rank 1 .* was killed by SIGKILL in training") as failed:
        launch([TOY, "killed"], 2)
    assert failed.value.exit_code == 137
    assert "want of memory" in str(failed.value)


def test_a_traceback_is_shown() -> None:
    with pytest.raises(RankError, match="ValueError: of a fault") as failed:
        launch([TOY, "raise"], 2)
    assert failed.value.exit_code == 1


def test_who_does_not_listen_is_killed(tmp_path: Path) -> None:
    with pytest.raises(RankError, match=r"rank 1 .* exit code 3"):
        launch([TOY, "deaf", str(tmp_path)], 2, kill_s=0.3)
    assert not any(is_alive(pid) for pid in processes(tmp_path, 2))


def test_the_one_that_fails_is_named_though_another_was_gone_before() -> None:
    with pytest.raises(RankError) as failed:
        launch([TOY, "error"], 2)
    assert str(failed.value) == "rank 1: the disk is full"
    assert failed.value.exit_code == 2


def test_what_all_say_is_said_once() -> None:
    with pytest.raises(RankError) as failed:
        launch([TOY, "both"], 3)
    assert str(failed.value) == "the disk is full"


def started(folder: Path, case: str, count: int = 2) -> subprocess.Popen[str]:
    # what a shell starts with "&" ignores Ctrl-C, and so would all below it
    call = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
    call += f"from isobit.launch.local import launch; launch([{TOY!r}, {case!r}, "
    call += f"{str(folder)!r}], {count}, kill_s=0.3)"
    return subprocess.Popen(
        [sys.executable, "-c", call], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )


def test_two_runs_on_one_host_do_not_meet(tmp_path: Path) -> None:
    """Each takes a port of its own, and the end of one is none of the other."""
    folders = [tmp_path / "one", tmp_path / "other"]
    for folder in folders:
        folder.mkdir()
    runs = [started(folder, "sleep") for folder in folders]
    ranks = [processes(folder, 2) for folder in folders]
    ports = [
        {
            word.removeprefix("MASTER_PORT=")
            for word in Path(f"/proc/{pid}/environ").read_text().split("\0")
            if word.startswith("MASTER_PORT=")
        }
        for pids in ranks
        for pid in pids
    ]
    assert ports[0] == ports[1] != ports[2] == ports[3]
    runs[0].send_signal(signal.SIGTERM)
    runs[0].communicate()
    assert all(is_alive(pid) for pid in ranks[1])
    runs[1].send_signal(signal.SIGTERM)
    assert "stopped by SIGTERM" in runs[1].communicate()[1]


def test_no_orphans_when_the_launcher_is_killed(tmp_path: Path) -> None:
    launcher = started(tmp_path, "sleep")
    pids = processes(tmp_path, 2)
    launcher.kill()
    launcher.communicate()
    wait_for_the_end_of(pids)


@pytest.mark.few(2)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_reaches_all_once(number: signal.Signals, tmp_path: Path) -> None:
    launcher = started(tmp_path, "sleep")
    pids = processes(tmp_path, 2)
    launcher.send_signal(number)
    said = launcher.communicate()[1]
    assert f"isobit.util.errors.Interrupted: stopped by {number.name}" in said
    assert not any(is_alive(pid) for pid in pids)


def test_a_second_ctrl_c_ends_who_does_not_listen(tmp_path: Path) -> None:
    launcher = started(tmp_path, "stubborn")
    pids = processes(tmp_path, 2)
    launcher.send_signal(signal.SIGINT)
    wait_for_the_end_of(pids[:1])
    assert is_alive(pids[1])
    launcher.send_signal(signal.SIGINT)
    assert "stopped by SIGINT" in launcher.communicate()[1]
    assert not is_alive(pids[1])


def test_signals_of_the_caller_are_as_before() -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with pytest.raises(RankError):
        launch([TOY, "exit"], 2)
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_a_signal_to_one_rank_is_no_stop_of_the_user(tmp_path: Path) -> None:
    """Only what came to the launcher is: who else killed a rank is told of."""
    launcher = started(tmp_path, "sleep")
    os.kill(processes(tmp_path, 2)[1], signal.SIGTERM)
    assert "was killed by SIGTERM" in launcher.communicate()[1]


class Starts:
    def __init__(self, *errors: Exception | None) -> None:
        self.errors = list(errors)
        self.seen: list[tuple[list[str], bool]] = []

    def __call__(self, words: Sequence[str], again: bool) -> None:
        self.seen.append((list(words), again))
        if error := self.errors.pop(0):
            raise error


LOST = RankError("rank 1 was killed", 137, died=True)


def test_it_is_resumed_as_often_as_is_allowed(capsys: pytest.CaptureFixture[str]) -> None:
    starts = Starts(LOST, LOST, None)
    with_restarts(starts, ["train", "a.toml"], 2)
    again = (["train", "a.toml", "--resume"], True)
    assert starts.seen == [(["train", "a.toml"], False), again, again]
    assert capsys.readouterr().err.count("rank 1 was killed") == 2
    starts = Starts(LOST, LOST)
    with pytest.raises(RankError, match="rank 1 was killed"):
        with_restarts(starts, ["train", "a.toml", "--resume"], 1)
    assert starts.seen == [
        (["train", "a.toml", "--resume"], False),
        (["train", "a.toml", "--resume"], True),
    ]


@pytest.mark.parametrize("error", [RankError("the disk is full", 2), ConfigError("no such key")])
def test_what_would_happen_again_is_not_tried_again(error: Exception) -> None:
    starts = Starts(error)
    with pytest.raises(type(error)):
        with_restarts(starts, ["train"], 5)
    assert len(starts.seen) == 1


def test_ranks_of_this_host_are_started_again(
    capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Rank 1 is killed once both have spoken."""
    with_restarts(lambda words, again: launch(words, 2), [TOY, "once", str(tmp_path)], 1)
    shown = capfd.readouterr()
    assert shown.out.count("rank 0 of 2") == 2
    assert shown.err.count("was killed by SIGKILL") == 1
    assert "restarts left: 0" in shown.err
