"""Whichever rank fails, and whoever has started it, its error is said once, and by no other."""

import subprocess
import sys
from pathlib import Path

import pytest

from isobit.run.cluster.deaths import RankError
from isobit.run.cluster.launcher import launch
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


def test_under_another_launcher(capfd: pytest.CaptureFixture[str]) -> None:
    for case, lines in {"fine": 0, "all": 1, "agreed": 1}.items():
        port = free_port()
        ranks = [
            subprocess.Popen([sys.executable, PROGRAM, case], env=environment(rank, 2, port))
            for rank in range(2)
        ]
        codes = [rank.wait() for rank in ranks]
        said = [line for line in capfd.readouterr().err.splitlines() if "no such file" in line]
        assert len(said) == lines
        assert codes == {"fine": [0, 0], "all": [2, 2], "agreed": [4, 2]}[case]
