"""A full disk, a file too large, a directory that cannot be written: the run waits for space where
there may be some, stops, says how many bytes, and keeps what it had.
"""

import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from isobit.cli.main import main
from isobit.config.recipes import RunConfig
from isobit.models import saving
from isobit.models.safetensors import write_shards
from isobit.run.loop import train
from isobit.store import checkpoint as checkpoint_format
from isobit.store import disk_plan, waiting_writer
from isobit.util import disk_space
from isobit.util.disk_space import LineFile, disk_errors
from isobit.util.errors import NoSpaceError, StorageError
from tests.forked import ran

MakeConfig = Callable[..., RunConfig]


def test_too_little_space_is_said_before_anything_is_written(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config()
    monkeypatch.setattr(disk_plan, "free_bytes", lambda path: 1000)
    with pytest.raises(
        StorageError,
        match=r"disk: 4.42 MiB of 0.977 KiB free.*at most 3 at once.*lower checkpoint.keep_last",
    ):
        train(config)
    assert not config.output.exists()


def test_a_disk_that_has_filled_up_stops_the_run_before_the_write(
    make_config: MakeConfig,
    monkeypatch: pytest.MonkeyPatch,
    expected: dict[str, Any],
    outcome: Callable[[Path], dict[str, Any]],
) -> None:
    config = make_config(checkpoint={"keep_last": 1})
    with monkeypatch.context() as patch:
        checkpoints = config.output / "checkpoints"
        patch.setattr(
            disk_space,
            "free_bytes",
            lambda path: 1000 if (checkpoints / "step_000002").exists() else 10**12,
        )
        with pytest.raises(
            StorageError, match=r"the checkpoint of step 4 needs [\d,]+ bytes, but 1,000 are free"
        ):
            train(config)
    assert [path.name for path in checkpoints.iterdir()] == ["step_000002"], (
        "the last good one stays, however few are kept"
    )
    train(config, resume=True)
    assert outcome(config.output) == expected


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["masters.safetensors", "optimiser.safetensors", "manifest.json"])
def test_no_space_in_the_middle_of_a_write_leaves_the_last_checkpoint_and_no_rest(
    name: str,
    make_config: MakeConfig,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = make_config()
    sync = checkpoint_format.sync

    def full(path: Path) -> None:
        if path.name == name and path.parent.name == ".step_000004.partial":
            raise OSError(28, "No space left on device")
        sync(path)

    monkeypatch.setattr(checkpoint_format, "sync", full)
    with pytest.raises(
        StorageError,
        match=(
            r"the checkpoint of step 4 could not be written.*No space left.*needed: [\d,]+ "
            r"bytes, free: [\d,]+"
        ),
    ):
        train(config)
    assert [path.name for path in (config.output / "checkpoints").iterdir()] == ["step_000002"]
    assert "step_000002; once the cause is gone, go on with --resume" in capsys.readouterr().out


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "name", ["the checkpoint", "the model", "metrics.jsonl", "completions.jsonl", "rewards.jsonl"]
)
def test_a_save_goes_through_once_there_is_space(
    name: str,
    make_config: MakeConfig,
    monkeypatch: pytest.MonkeyPatch,
    expected: dict[str, Any],
    outcome: Callable[[Path], dict[str, Any]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The disk is full for three pauses, and nothing is lost or written twice."""
    config = make_config(checkpoint={"wait_for_space_s": 60})
    slept: list[float] = []
    monkeypatch.setattr(waiting_writer, "sleep", slept.append)
    monkeypatch.setattr(waiting_writer, "LOOK_S", 1000.0)  # a pause is one sleep
    sync, write = checkpoint_format.sync, LineFile.write

    def fill() -> None:
        if len(slept) < 3:
            raise OSError(28, "No space left on device")

    def full_sync(path: Path) -> None:
        if name == "the checkpoint" and path.name == "optimiser.safetensors":
            fill()
        sync(path)

    def full_write(file: LineFile, line: bytes, lasting: bool = False) -> None:
        if file._path.name == name and file._path.stat().st_size > 2000:
            with disk_errors(file._path, f"a line of {name}", len(line)):
                fill()
        write(file, line, lasting)

    def full_shards(*arguments: Any) -> Any:
        if name == "the model":
            fill()
        return write_shards(*arguments)

    monkeypatch.setattr(checkpoint_format, "sync", full_sync)
    monkeypatch.setattr(LineFile, "write", full_write)
    monkeypatch.setattr(saving, "write_shards", full_shards)
    train(config)
    assert slept == [2.0, 4.0, 8.0]
    assert outcome(config.output) == expected
    said = capsys.readouterr().out
    assert said.count("No space left on device") == 1, "once, and then rarely"
    assert "trying again for 60 s (checkpoint.wait_for_space_s)" in said and "free: " in said
    assert "there is room again, after 14 s: going on" in said


def test_a_signal_ends_the_waiting_for_space_at_once(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, pauses = make_config(checkpoint={"wait_for_space_s": 600}), list[float]()

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 7:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(waiting_writer, "sleep", sleep)
    first = config.output / "checkpoints" / "step_000002"
    monkeypatch.setattr(disk_space, "free_bytes", lambda path: 1000 if first.exists() else 10**12)
    with pytest.raises(NoSpaceError, match="the checkpoint of step 4 needs"):
        train(config)  # which is why there is no checkpoint where the signal stopped the run
    assert pauses == [0.5] * 7
    assert [path.name for path in first.parent.iterdir()] == ["step_000002"]


def test_a_file_size_quota_stops_the_run_with_bytes(values: dict[str, Any], tmp_path: Path) -> None:
    """A quota of the process's own (RLIMIT_FSIZE), below the size of the optimiser's state and
    above that of the masters.
    """
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(tomli_w.dumps({**values, "output": str(tmp_path / "run")}), encoding="utf-8")
    done = ran(f"{__name__}:train_within_a_quota", tmp_path, recipe)
    assert done.returncode == 2
    assert "the checkpoint of step 2 could not be written" in done.stderr
    assert (
        "File too large" in done.stderr and "needed: 1," in done.stderr and "free: " in done.stderr
    )
    assert not list((tmp_path / "run" / "checkpoints").iterdir())


def train_within_a_quota(recipe: Path) -> int:
    """In a process of its own."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (600_000, resource.RLIM_INFINITY))
    return main(["train", str(recipe)])


@pytest.mark.exhaustive
def test_a_small_file_system_stops_the_run_and_it_goes_on_with_more_space(
    values: dict[str, Any],
    make_config: MakeConfig,
    hook: Callable[[str], None],
    outcome: Callable[[Path], dict[str, Any]],
    expected: dict[str, Any],
    tmp_path: Path,
) -> None:
    """A tmpfs of 6 MiB, mounted in a namespace of the test's own; in step 5 a neighbour leaves it 1
    MiB.
    """
    config = make_config()
    recipe, small, kept = tmp_path / "recipe.toml", tmp_path / "small", tmp_path / "run"
    small.mkdir()
    recipe.write_text(tomli_w.dumps({**values, "output": str(small / "run")}), encoding="utf-8")
    hook(
        "import shutil\n"
        f"if call == 2 * 3 + 4 * 16 + 3: hook.unlink(); open({str(small / 'neighbour')!r}, "
        "'wb').write("
        f"bytes(shutil.disk_usage({str(small)!r}).free - (1 << 20)))"
    )
    script = (
        f"mount -t tmpfs -o size=6m tmpfs {small} || exit 99; "
        f"{sys.executable} -m isobit.cli.main train {recipe}; code=$?; cp -r {small}/run {kept}; "
        "exit $code"
    )
    done = subprocess.run(
        ["unshare", "-rm", "sh", "-c", script], capture_output=True, text=True, check=False
    )
    if done.returncode not in (0, 2) or "unshare failed" in done.stderr:
        pytest.skip(f"no namespace of our own here: {done.stderr[-200:]}")
    assert done.returncode == 2, "two checkpoints of 1.4 MB fit, a third beside them does not"
    assert "error: the checkpoint of step 6 needs 1," in done.stderr and "are free" in done.stderr
    assert sorted(path.name for path in (kept / "checkpoints").iterdir()) == [
        "step_000002",
        "step_000004",
    ]
    train(config, resume=True)
    assert outcome(kept) == expected


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_directory_that_cannot_be_written_is_refused_at_the_start(
    make_config: MakeConfig,
) -> None:
    config = make_config()
    train(config)
    config.output.chmod(0o500)
    try:
        with pytest.raises(StorageError, match="Permission denied"):
            train(config, resume=True)
    finally:
        config.output.chmod(0o700)


def test_a_directory_that_vanishes_stops_the_run(
    make_config: MakeConfig, hook: Callable[[str], None]
) -> None:
    config = make_config()
    hook(f"import shutil\nif call == 60: hook.unlink(); shutil.rmtree({str(config.output)!r})")
    with pytest.raises(StorageError, match="was removed while the run went on"):
        train(config)
