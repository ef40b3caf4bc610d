"""Files that grow go back to where a checkpoint was taken."""

import errno
import os
from pathlib import Path

import pytest

from isobit.errors import CheckpointError, ConfigError
from isobit.observe.metrics import MetricsWriter
from isobit.store.directory import RunDirectory
from isobit.store.journal import EVENTS_SUFFIX, check_positions, positions, rewind
from isobit.store.lock import locked

EVENTS = "events.out.tfevents.{}" + EVENTS_SUFFIX


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    directory = RunDirectory(tmp_path)
    directory.tensorboard.mkdir()
    for path in (
        directory.metrics,
        directory.completions,
        directory.rewards,
        directory.digests,
        directory.tensorboard / EVENTS.format(1),
    ):
        path.write_text("before\n")
    return directory


def test_everything_after_is_cut_but_the_rewards(directory: RunDirectory) -> None:
    recorded = positions(directory)
    assert recorded == dict.fromkeys(
        (
            "metrics.jsonl",
            "completions.jsonl",
            "rewards.jsonl",
            "digests.jsonl",
            f"tensorboard/{EVENTS.format(1)}",
        ),
        7,
    )
    for name in recorded:
        with (directory.root / name).open("a") as file:
            file.write("after\n")
    (directory.tensorboard / EVENTS.format(2)).write_text("after")
    check_positions(directory, recorded)
    rewind(directory, recorded)
    assert positions(directory) == {**recorded, "rewards.jsonl": 13}


def test_what_the_run_did_not_write_stays(directory: RunDirectory, tmp_path: Path) -> None:
    """Found at 12131fc: resume removed every file in ``tensorboard/`` that it did not know."""
    recorded = positions(directory)
    foreign = tmp_path / "elsewhere"
    foreign.write_text("another run's")
    for name in ("thesis.tex", "events.out.tfevents.2.other-host", "events.v2"):
        (directory.tensorboard / name).write_text("not the run's")
    (directory.tensorboard / EVENTS.format(9)).symlink_to(foreign)
    rewind(directory, recorded)
    assert len(list(directory.tensorboard.iterdir())) == 5
    assert foreign.read_text() == "another run's"


def test_the_events_of_a_run_are_known_by_their_names(directory: RunDirectory) -> None:
    recorded = positions(directory)
    with MetricsWriter(directory.metrics, directory.tensorboard) as writer:
        for write in writer.writes(1, {"loss": 1.0}):
            write()
    rewind(directory, recorded)
    assert positions(directory) == recorded
    assert [path.name for path in directory.tensorboard.iterdir()] == [EVENTS.format(1)]


def test_events_of_a_run_begun_before_they_had_a_name_of_their_own(directory: RunDirectory) -> None:
    old = directory.tensorboard / "events.out.tfevents.1.host"
    old.write_text("before, and after")
    rewind(directory, {**positions(directory), f"tensorboard/{old.name}": 6})
    assert old.read_text() == "before"


def test_a_file_that_cannot_be_looked_at_rules_a_checkpoint_out(
    directory: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(path: Path, **_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    recorded = positions(directory)
    monkeypatch.setattr(Path, "stat", broken)
    with pytest.raises(CheckpointError, match=r"completions.jsonl|metrics.jsonl.*Input/output"):
        check_positions(directory, recorded)


def test_a_file_that_lost_bytes_is_named(directory: RunDirectory) -> None:
    recorded = positions(directory)
    directory.metrics.write_text("bef")
    with pytest.raises(CheckpointError, match=r"metrics.jsonl has 3 bytes, fewer than the 7"):
        check_positions(directory, recorded)
    directory.metrics.unlink()
    with pytest.raises(CheckpointError, match=r"metrics.jsonl is missing"):
        check_positions(directory, recorded)


def test_a_directory_is_held_by_one_and_free_afterwards(tmp_path: Path) -> None:
    for _ in range(2):
        with (
            locked(tmp_path),
            pytest.raises(ConfigError, match=r"in use by process \d+ on "),
            locked(tmp_path),
        ):
            pass


def test_a_forked_child_does_not_hold_the_directory(tmp_path: Path) -> None:
    """Found at 12131fc: what a reward had forked kept the lock of a trainer that was killed."""
    ready, (wait, done) = os.pipe(), os.pipe()
    with locked(tmp_path):
        child = os.fork()
        if child == 0:
            os.write(ready[1], b"x")
            os.close(done)
            os.read(wait, 1)  # until the parent is through
            os._exit(0)
        os.read(ready[0], 1)
    try:
        with locked(tmp_path):
            pass
    finally:
        os.close(done)
        os.waitpid(child, 0)
        for descriptor in (*ready, wait):
            os.close(descriptor)


def test_a_lock_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_text("kept")
    (tmp_path / ".lock").symlink_to(target)
    with pytest.raises(OSError, match="symbolic links"), locked(tmp_path):
        raise AssertionError
    assert target.read_text() == "kept"
