"""Whichever rank fails, and whoever has started it, its error is said once, and by no other."""

import re
import runpy
import socket
import sys
from pathlib import Path

import pytest

from isobit.run.cluster.deaths import RankError
from isobit.run.cluster.launcher import launch
from tests.forked import called, launched
from tests.worlds import environment, free_port

PROGRAM = str(Path(__file__).with_name("trained.py"))


@pytest.mark.parametrize(
    ("case", "text"),
    [
        ("all", "no such file"),
        ("agreed", "rank 1: no such file"),
        ("alone", "rank 1: no such file"),
    ],
)
def test_an_error_under_our_launcher(
    case: str, text: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(RankError) as failed:
        launch([PROGRAM, case], 2, threads=1)
    assert str(failed.value) == text
    assert failed.value.exit_code == 2
    assert "no such file" not in "".join(capfd.readouterr())


def test_a_fault_shows_its_traceback() -> None:
    with pytest.raises(RankError, match="ZeroDivisionError: no such file") as failed:
        launch([PROGRAM, "fault"], 2, threads=1)
    assert str(failed.value).startswith("rank 1 (")
    assert " ended with exit code 1 in training after " in str(failed.value)


def under_another_launcher(case: str, folder: Path) -> tuple[list[int | None], str]:
    """The exit codes of two ranks, and what they said."""
    port, logs = free_port(), [folder / f"{case}-{rank}" for rank in range(2)]
    ranks = [
        called(f"{__name__}:be_a_rank", log, case, environ=environment(rank, 2, port))
        for rank, log in enumerate(logs)
    ]
    for rank in ranks:
        rank.join()
    return [rank.exitcode for rank in ranks], "".join(log.read_text() for log in logs)


def be_a_rank(case: str) -> None:
    sys.argv = [PROGRAM, case]
    runpy.run_path(PROGRAM, run_name="__main__")


def test_an_error_under_another_launcher(tmp_path: Path) -> None:
    for case, lines in {"fine": 0, "all": 1, "agreed": 1}.items():
        codes, said = under_another_launcher(case, tmp_path)
        assert len([line for line in said.splitlines() if "no such file" in line]) == lines
        assert codes == {"fine": [0, 0], "all": [2, 2], "agreed": [4, 2]}[case]


@pytest.mark.parametrize(
    ("dead", "text"),
    [
        (1, "error: rank 1 (host, process ..) has ended in training without a word"),
        (0, "error: who keeps the board of the run (rank 0, host, process .., or a launcher) "),
    ],
)
def test_a_rank_dies_and_no_launcher_ends_the_other(
    dead: int, text: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It waits, as for NCCL, for ever."""
    monkeypatch.setenv("ISOBIT_SILENCE_S", "4")
    codes, said = under_another_launcher(f"{dead} dies", tmp_path)
    assert codes[dead] == -9
    assert codes[1 - dead] == 4
    said = said.replace(socket.gethostname(), "host")
    assert text in re.sub(r"process \d+", "process ..", said)


@pytest.mark.parametrize(
    ("case", "text"),
    [
        ("stopped", r"rank 1 \(.*, process \d+\) has been silent in training for \d+ s: ended"),
        ("asleep", r"rank 1 \(.*, process \d+\) has been silent in rollout for \d+ s: ended"),
        ("parted", r"have come apart, .*: rank 0 \(.*\) for messages, rank 1 \(.*\) for gather"),
    ],
)
def test_what_never_ends_is_ended(
    case: str, text: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("ISOBIT_SILENCE_S", "4")
    end = launched([PROGRAM, case], tmp_path / "log")
    assert end is not None and re.search(text, str(end)), end
