"""Whatever the operating system answers for a checkpoint: it is named, and the one before used."""

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from isobit.config.recipes import RunConfig
from isobit.models.safetensors import Slice
from isobit.store import resume
from isobit.store.checkpoint import MANIFEST, MASTERS, OPTIMISER, STATE, Snapshot, write_checkpoint
from isobit.store.compatible import (
    DRAWN_BY,
    RESUMING,
    check_compatible,
    draws_others,
    flat,
    orders_others,
)
from isobit.store.directory import RunDirectory
from isobit.store.newest import newest_usable
from isobit.util.errors import CheckpointError, ConfigError

FILES = (MASTERS, OPTIMISER, STATE, MANIFEST)


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    """With the checkpoints of steps 1 and 2, of which the newest is to be damaged."""
    directory = RunDirectory(tmp_path)
    tensors = {"w": Slice.whole(torch.ones(4))}
    for step in (1, 2):
        state, description = {"files": {}}, {"config": {}, "environment": {}, "evaluation": {}}
        write_checkpoint(
            directory.checkpoints, Snapshot(step, tensors, tensors, state, description)
        )
    return directory


def dangle(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.with_name("gone"))


def loop(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.name)


def make_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGES: list[tuple[str, Callable[[Path], object]]] = [
    *((name, dangle) for name in FILES), *((name, loop) for name in FILES),
    *((name, make_folder) for name in FILES),
    (MANIFEST, lambda path: path.write_text('{"a":' * 100_000)),
    (MANIFEST, lambda path: path.write_text("[" * 100_000)),
    (MANIFEST, lambda path: path.write_bytes(b"\xff\xfe{}")),
    (MANIFEST, lambda path: path.write_text("[]")),
]  # fmt: skip


@pytest.mark.few(12)
@pytest.mark.parametrize(("name", "damage"), DAMAGES)
def test_one_that_cannot_be_read_is_passed_over(
    name: str, damage: Callable[[Path], object], directory: RunDirectory
) -> None:
    path = directory.checkpoints / "step_000002" / name
    damage(path)
    assert_passed_over(directory, path)


def test_a_manifest_of_another_run_is_not_believed(directory: RunDirectory, tmp_path: Path) -> None:
    other = RunDirectory(tmp_path / "other")
    tensors = {"w": Slice.whole(torch.zeros(4))}
    description = {"config": {}, "environment": {}, "evaluation": {}}
    snapshot = Snapshot(2, tensors, tensors, {"files": {}}, description)
    folder = write_checkpoint(other.checkpoints, snapshot)
    own = directory.checkpoints / folder.name
    shutil.copyfile(folder / MANIFEST, own / MANIFEST)
    assert "does not have the SHA-256 of what was written" in assert_passed_over(
        directory, own / MASTERS
    )


@pytest.mark.few(12)
@pytest.mark.parametrize("error", [errno.EIO, errno.EACCES, errno.ESTALE, errno.ENXIO])
@pytest.mark.parametrize("name", FILES)
def test_any_answer_of_the_disk(
    name: str, error: int, directory: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, opened = directory.checkpoints / "step_000002" / name, os.open

    def fails(file: Any, *arguments: Any, **options: Any) -> Any:
        if str(file) == str(path):
            raise OSError(error, os.strerror(error))
        return opened(file, *arguments, **options)

    monkeypatch.setattr(os, "open", fails)
    assert os.strerror(error) in assert_passed_over(directory, path)


def test_a_folder_that_cannot_be_listed_is_passed_over_with_its_manifest(
    directory: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, listed, opened = directory.checkpoints / "step_000002", Path.iterdir, os.open

    def refuse(path: Any) -> None:
        if str(path).startswith(str(folder)):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    def fails_to_list(path: Path) -> Any:
        refuse(path)
        return listed(path)

    def fails_to_open(file: Any, *arguments: Any, **options: Any) -> Any:
        refuse(file)
        return opened(file, *arguments, **options)

    monkeypatch.setattr(Path, "iterdir", fails_to_list)
    monkeypatch.setattr(os, "open", fails_to_open)
    assert "Permission denied" in assert_passed_over(directory, folder / MANIFEST)


def test_a_folder_of_checkpoints_that_cannot_be_listed_is_an_error(
    directory: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(path: Path) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(Path, "iterdir", fails)
    with pytest.raises(CheckpointError, match=r"checkpoints cannot be read: Input/output error"):
        newest_usable(directory, print)


def assert_passed_over(directory: RunDirectory, path: Path) -> str:
    """The line that says why."""
    lines: list[str] = []
    found = newest_usable(directory, lines.append)
    assert found is not None
    assert found.step == 1
    assert str(path) in lines[0]
    assert lines[0].startswith("checkpoint step_000002 cannot be used: ")
    assert lines[1:] == ["using the one before it: step_000001"]
    return lines[0]


@pytest.mark.parametrize(
    ("changed", "allowed", "forgotten"),
    [
        ("reward.function.source", ["reward"], ["rewards"]),
        ("environment.class.source", ["environment"], ["rewards", "answers", "schedule"]),
        ("environment.openenv", ["environment"], ["answers"]),
        ("data.train.content", ["data"], ["rewards", "answers", "schedule"]),
        ("data.eval.held_out.content", ["data"], []),
        ("rollout.temperature", ["rollout"], ["rewards", "answers", "schedule"]),
        ("rollout.max_sequences", [], []),
        ("precision.head", ["precision"], ["rewards", "answers", "schedule"]),
        ("precision.wgrad", ["precision"], []),
        ("reward.offload", [], []),
        ("training.learning_rate", ["training.learning_rate"], []),
    ],
)
def test_what_others_gave_ahead_of_the_checkpoint_is_not_given_again(
    changed: str, allowed: list[str], forgotten: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resume, "notes", lambda *_: [])
    dropped: list[str] = []
    recorded: Any = None
    start: Any = SimpleNamespace(
        changed={changed: ["a", "b"]},
        allowed=allowed,
        doing=RESUMING,
        rewards=SimpleNamespace(forget_ahead=lambda: dropped.append("rewards")),
        answers=SimpleNamespace(forget_ahead=lambda: dropped.append("answers")),
        schedule=SimpleNamespace(forget_ahead=lambda: dropped.append("schedule")),
    )
    resume.Start._say_changes(start, recorded, {})
    assert dropped == forgotten


def test_what_says_what_is_drawn_is_the_name_of_something(
    make_config: Callable[..., RunConfig],
) -> None:
    inputs = "model.config", "model.tokenizer", "model.tokens", "model.generation"
    keys = {*flat(make_config().model_dump(mode="json")), *inputs, "data.train.content"}
    for name in DRAWN_BY:
        assert any(key == name or key.startswith(f"{name}.") for key in keys), name
    assert draws_others(["rollout.stop_strings", "rollout.kv_pages"]) == ["rollout.stop_strings"]
    assert not draws_others([key for key in keys if key.startswith(("reward", "cluster", "check"))])
    assert [key for key in sorted(keys) if orders_others([key])] == [
        "data.shuffle",
        "data.train.content",
        "seed",
    ]


@pytest.mark.parametrize(
    ("lag", "steps", "step", "more", "refused"),
    [
        (1, 4, 4, 8, "step 5 would"),
        (3, 4, 4, 8, "steps 5 to 7 would"),
        (3, 4, 4, 6, "steps 5 to 6 would"),
        (2, 4, 3, 8, "step 5 would"),
        (2, 4, 2, 8, None),
        (2, 4, 0, 8, None),
        (0, 4, 4, 8, None),
        (2, 4, 4, 4, None),
        (2, 4, 2, 3, None),
    ],
)
def test_more_steps_are_refused_where_a_lag_would_have_sampled_them(
    lag: int,
    steps: int,
    step: int,
    more: int,
    refused: str | None,
    make_config: Callable[..., RunConfig],
) -> None:
    def values(steps: int) -> dict[str, Any]:
        config = make_config(training={"steps": steps}, **{"async": {"lag": lag}})
        return config.model_dump(mode="json")

    if refused is None:
        assert check_compatible(values(steps), values(more), step).keys() <= {"training.steps"}
        return
    with pytest.raises(ConfigError, match=rf"{refused} have been sampled before .* {step},"):
        check_compatible(values(steps), values(more), step)
    assert check_compatible(values(steps), values(more), step, ["training.steps"])
