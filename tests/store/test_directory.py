"""A run's directory is its own, and its files go back to where a checkpoint was taken."""

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from isobit.config.recipes import RunConfig
from isobit.models.folder import read_config
from isobit.observe.metrics import MetricsWriter
from isobit.starter import starter_folder
from isobit.store.directory import RunDirectory, check_no_links, check_unused, write_json
from isobit.store.journals import EVENTS_SUFFIX, check_positions, positions, rewind
from isobit.store.lock import locked
from isobit.store.resume import begin
from isobit.util.errors import CheckpointError, ConfigError

MakeConfig = Callable[..., RunConfig]
SHAPE = read_config(starter_folder())


def test_a_new_and_an_empty_directory_are_taken(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for root in (tmp_path / "a" / "b", tmp_path / "empty"):
        check_unused(root)
    assert not (tmp_path / "a").exists(), "nothing is written"


def test_a_used_directory_is_refused_with_the_ways_out(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{}")
    with pytest.raises(ConfigError) as error:
        check_unused(tmp_path)
    for part in (str(tmp_path), "files of a run", "--output", f"rm -r {tmp_path}"):
        assert part in str(error.value)


@pytest.mark.parametrize("with_run", [False, True], ids=["no run", "a run"])
@pytest.mark.parametrize("place", ["home", "here", "above both"])
def test_nobody_is_advised_to_remove_more_than_a_run(
    place: str, with_run: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found at 12131fc: ``--output ~`` was answered with ``rm -r`` of the home directory."""
    home, here = tmp_path / "above" / "home", tmp_path / "above" / "here"
    for folder in (home, here):
        folder.mkdir(parents=True)
        (folder / "thesis.tex").touch()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(here)
    root = {"home": home, "here": Path(), "above both": tmp_path / "above"}[place]
    if with_run:
        (root / "run.json").touch()
    with pytest.raises(ConfigError, match="already holds files") as error:
        check_unused(root)
    assert "rm " not in str(error.value)


def test_files_that_are_no_run_are_not_advised_to_be_removed(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(ConfigError, match="files that are no run") as error:
        check_unused(tmp_path)
    assert "rm " not in str(error.value)


NAMES = (
    "run.json", ".run.json.partial", ".lock", "metrics.jsonl", "completions.jsonl", "rewards.jsonl",
    "digests.jsonl", "budget.jsonl", "tensorboard", "checkpoints", "model", "summary.json",
)  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_links_in_the_place_of_a_run_s_files_are_refused(
    name: str, tmp_path: Path, make_config: MakeConfig
) -> None:
    """Found at 12131fc: the target of a link was overwritten, or emptied."""
    target, root = tmp_path / "target", tmp_path / "run"
    target.mkdir()
    root.mkdir()
    (root / name).symlink_to(target)
    with pytest.raises(ConfigError, match=f"{name} is a link to {target}"):
        check_no_links(root)
    config = make_config(output=root)
    for resume in (False, True):
        with pytest.raises(ConfigError, match="is a link"), begin(config, SHAPE, resume, print):
            raise AssertionError
    assert [path.name for path in root.iterdir()] == [name]


def test_a_link_beside_a_file_that_is_replaced_is_not_followed(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_text("kept")
    (tmp_path / ".summary.json.partial").symlink_to(target)
    write_json(tmp_path / "summary.json", {"a": 1})
    assert target.read_text() == "kept"
    assert json.loads((tmp_path / "summary.json").read_text()) == {"a": 1}


def test_a_directory_that_is_no_run_keeps_no_lock(tmp_path: Path, make_config: MakeConfig) -> None:
    """Found at 12131fc: ``train --resume --output d`` left ``d/.lock``."""
    (tmp_path / "thesis.tex").touch()
    config = make_config(output=tmp_path)
    with pytest.raises(ConfigError, match="no run that"), begin(config, SHAPE, True, print):
        raise AssertionError
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_file_and_a_place_below_a_file_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="is a file"):
        check_unused(tmp_path / "file")
    with pytest.raises(ConfigError, match="nothing can be written"):
        check_unused(tmp_path / "file" / "run")


def test_json_replaces_the_old_file_as_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    write_json(path, {"a": 1})
    with pytest.raises(TypeError, match="not JSON serializable"):
        write_json(path, {"a": object()})
    assert json.loads(path.read_text()) == {"a": 1}
    write_json(path, {"a": float("nan")})
    assert json.loads(path.read_text()) == {"a": None}
    write_json(path, {"a": "é"})
    assert path.read_text(encoding="utf-8") == '{\n  "a": "é"\n}\n'
    assert [file.name for file in tmp_path.iterdir()] == ["summary.json"]


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


@pytest.mark.parametrize("lost", [1, 3, 4, 12, 19, 20, 21, 39, 40])
def test_what_was_cut_is_filled_up_to_where_the_next_line_begins(lost: int, tmp_path: Path) -> None:
    """In what repeated steps read; other files keep their whole lines, also where they have grown
    beyond the recorded size since.
    """
    directory = RunDirectory(tmp_path)
    line = b'{"weights": 123456}\n'
    read = (directory.rewards, directory.answers, directory.schedule, directory.budget)
    others = (directory.metrics, directory.completions, directory.digests)
    for path in (*read, *others):
        path.write_bytes(2 * line)
    recorded = positions(directory)
    for path in (*read, *others):
        os.truncate(path, len(2 * line) - lost)
    rewind(directory, recorded)
    kept = (len(2 * line) - lost) // len(line) * line
    for path in read:
        content = path.read_bytes()
        assert len(content) == len(2 * line) and content.startswith(kept)
        assert [json.loads(one) for one in content[len(kept) :].splitlines()] == [
            {"lost_bytes": len(2 * line) - len(kept)}
        ]
    assert [path.read_bytes() for path in others] == [kept] * 3
    for path in (*read, *others):
        with path.open("ab") as file:
            file.write(b'{"more": 1}\n' * 9)
    rewind(directory, recorded)
    for path in read:
        assert path.read_bytes().endswith(b'{"more": 1}\n' * 9)
        assert path.stat().st_size == len(2 * line) + 9 * 12
    for path in others:
        assert all(map(json.loads, path.read_bytes().splitlines()))
        assert len(2 * line) - 12 < path.stat().st_size <= len(2 * line)


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


def test_events_under_an_older_name_are_cut(directory: RunDirectory) -> None:
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
