"""Whichever rank fails, and whoever has started it, its error is said once, and by no other."""

import os
import re
import runpy
import signal
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from isobit.launch.local import launch
from isobit.launch.own_rank import watched
from isobit.launch.ranks import RankError
from isobit.parallel.world import run_on_all
from isobit.util.errors import PeerError
from tests.forked import Launched, called
from tests.worlds import environment, free_port

PROGRAM = str(Path(__file__).with_name("trained.py"))


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("case", "text"),
    [
        ("all", "no such file"),
        ("agreed", "rank 1: no such file"),
        ("alone", "rank 1: no such file"),
    ],
)
def test_an_error_under_our_launcher(case: str, text: str, tmp_path: Path) -> None:
    end = Launched([PROGRAM, case], tmp_path / "log").end()
    assert end is not None and str(end) == text
    assert end.exit_code == 2
    assert "no such file" not in (tmp_path / "log").read_text()


@pytest.mark.exhaustive
def test_a_fault_shows_its_traceback() -> None:
    with pytest.raises(RankError, match="ZeroDivisionError: no such file") as failed:
        launch([PROGRAM, "fault"], 2, threads=1)
    assert str(failed.value).startswith("rank 1 (")
    assert " ended with exit code 1 in training after " in str(failed.value)


@pytest.mark.exhaustive
def test_a_fault_is_named_before_the_frames_that_torch_prints_behind_it() -> None:
    """torch.distributed prints dozens when the store goes, over the traceback."""
    with pytest.raises(RankError) as failed:
        launch([PROGRAM, "fault, then frames"], 2, threads=1)
    first, *others = str(failed.value).splitlines()
    assert re.search(r" in training after \d+ s by ZeroDivisionError: no such file; it held", first)
    assert any(line.endswith(", in fail") for line in others), "the end of the traceback"
    assert not any("frame #" in line for line in others)


class UnderAnotherLauncher:
    """Two ranks, by a function of this module."""

    def __init__(self, case: str, folder: Path, what: str = "be_a_rank") -> None:
        port = free_port()
        self._logs = [folder / f"{case}-{rank}" for rank in range(2)]
        self._ranks = [
            called(f"{__name__}:{what}", log, case, environ=environment(rank, 2, port))
            for rank, log in enumerate(self._logs)
        ]

    def end(self) -> tuple[list[int | None], str]:
        """Their exit codes, and what they said."""
        for rank in self._ranks:
            rank.join()
        said = "".join(log.read_text() for log in self._logs)
        return [rank.exitcode for rank in self._ranks], said


def be_a_rank(case: str) -> None:
    sys.argv = [PROGRAM, case]
    runpy.run_path(PROGRAM, run_name="__main__")


def test_an_error_under_another_launcher(tmp_path: Path) -> None:
    for case, lines in {"fine": 0, "all": 1, "agreed": 1}.items():
        codes, said = UnderAnotherLauncher(case, tmp_path).end()
        assert len([line for line in said.splitlines() if "no such file" in line]) == lines
        assert codes == {"fine": [0, 0], "all": [2, 2], "agreed": [4, 2]}[case]


def be_a_script(case: str) -> int:
    """A program of a user's that calls functions, and goes on after an error of all ranks."""
    try:
        for _ in range(2):
            with watched() as world:
                if case == "raises":
                    run_on_all(world, lambda: 1 // world.rank)
                if case == "hangs" and world.rank == 1:
                    os.kill(os.getpid(), signal.SIGSTOP)
                world.barrier("both")
    except (PeerError, ZeroDivisionError) as error:
        print(type(error).__name__)
    print("the end")
    return 0


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("case", "codes", "said"),
    [
        ("fine", [0, 0], ["the end"] * 2),
        ("raises", [0, 0], ["PeerError", "ZeroDivisionError", "the end", "the end"]),
        ("hangs", [4, -9], ["error: rank 1 has been silent in starting for .. s: ended"]),
    ],
)
def test_a_script_of_several_processes_is_watched(
    case: str, codes: list[int], said: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ISOBIT_SILENCE_S", "3")
    ended, found = UnderAnotherLauncher(case, tmp_path, "be_a_script").end()
    found = re.sub(r"for \d+ s", "for .. s", re.sub(r" \(.*, process \d+\)", "", found))
    assert (ended, sorted(found.splitlines())) == (codes, said)


DEATHS = {
    1: "error: rank 1 (host, process ..) has ended in training without a word",
    0: "error: who keeps the board of the run (rank 0, host, process .., or a launcher) ",
}
HANGS = {
    "stopped": r"rank 1 \(.*, process \d+\) has been silent in training for \d+ s: ended",
    "asleep": r"rank 1 \(.*, process \d+\) has been silent in rollout for \d+ s: ended",
    "parted": r"have come apart, .*: rank 0 \(.*\) for all_gather, "
    r"rank 1 \(.*\) for all_gather_rows",
}


@dataclass(frozen=True)
class Waiting:
    """Runs that the watch ends, all at the same time: each takes seconds in which it does
    nothing.
    """

    deaths: Mapping[int, UnderAnotherLauncher]
    hangs: Mapping[str, Launched]


@pytest.fixture(scope="module")
def waiting(tmp_path_factory: pytest.TempPathFactory) -> Waiting:
    folder = tmp_path_factory.mktemp("waiting")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ISOBIT_SILENCE_S", "5")
        return Waiting(
            {dead: UnderAnotherLauncher(f"{dead} dies", folder) for dead in DEATHS},
            {case: Launched([PROGRAM, case], folder / case) for case in HANGS},
        )


@pytest.mark.few(1)
@pytest.mark.parametrize("dead", DEATHS)
def test_a_rank_dies_and_no_launcher_ends_the_other(dead: int, waiting: Waiting) -> None:
    """It waits, as for NCCL, for ever."""
    codes, said = waiting.deaths[dead].end()
    assert codes[dead] == -9
    assert codes[1 - dead] == 4
    said = said.replace(socket.gethostname(), "host")
    assert DEATHS[dead] in re.sub(r"process \d+", "process ..", said)


@pytest.mark.exhaustive
def test_a_death_that_costs_the_other_its_connection_is_told_once(tmp_path: Path) -> None:
    """As srun ends the tasks of a job: the watch names the rank, and gloo's error adds nothing."""
    codes, said = UnderAnotherLauncher("1 dies in a collective", tmp_path).end()
    assert codes == [4, -9]
    (line,) = (line for line in said.splitlines() if "error: " in line)
    assert re.search(r"rank 1 \(.*\) has ended in training without a word$", line)


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", HANGS)
def test_what_never_ends_is_ended(case: str, waiting: Waiting) -> None:
    end = waiting.hangs[case].end()
    assert end is not None and re.search(HANGS[case], str(end)), end
