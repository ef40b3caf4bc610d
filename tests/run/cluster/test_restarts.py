"""A run goes on after the death of a rank, and only then."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from isobit.errors import ConfigError
from isobit.run.cluster.deaths import RankError
from isobit.run.cluster.launcher import launch
from isobit.run.cluster.restarts import with_restarts

TOY = str(Path(__file__).with_name("toy.py"))


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
