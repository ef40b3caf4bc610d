"""Files that grow go back to where a checkpoint was taken."""

from pathlib import Path

import pytest

from isobit.errors import CheckpointError, ConfigError
from isobit.store.directory import RunDirectory
from isobit.store.journal import check_positions, positions, rewind
from isobit.store.lock import locked


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    directory = RunDirectory(tmp_path)
    directory.tensorboard.mkdir()
    for path in (
        directory.metrics,
        directory.completions,
        directory.rewards,
        directory.tensorboard / "events.1",
    ):
        path.write_text("before\n")
    return directory


def test_everything_after_is_cut_but_the_rewards(directory: RunDirectory) -> None:
    recorded = positions(directory)
    assert recorded == dict.fromkeys(
        ("metrics.jsonl", "completions.jsonl", "rewards.jsonl", "tensorboard/events.1"), 7
    )
    for name in recorded:
        with (directory.root / name).open("a") as file:
            file.write("after\n")
    (directory.tensorboard / "events.2").write_text("after")
    check_positions(directory, recorded)
    rewind(directory, recorded)
    assert positions(directory) == {**recorded, "rewards.jsonl": 13}


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
