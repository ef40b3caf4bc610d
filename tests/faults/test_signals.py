"""SIGTERM and Ctrl-C: a checkpoint and a documented exit code; a second Ctrl-C ends at once, and
nothing half done is kept.
"""

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from isobit.cli.main import main
from isobit.config.recipes import RunConfig
from isobit.run.interruption import Interruption
from isobit.run.loop import train
from isobit.training.optimiser import AdamW
from isobit.training.trainer import Trainer
from isobit.util.errors import StoppedAtOnce
from tests.forked import command

MakeConfig = Callable[..., RunConfig]
Hook = Callable[[str], None]
IN_STEP_4 = 2 * 3 + 3 * 16 + 3


@pytest.fixture
def recipe(values: dict[str, Any], tmp_path: Path) -> Path:
    import tomli_w

    path = tmp_path / "recipe.toml"
    path.write_text(tomli_w.dumps({**values, "output": str(tmp_path / "run")}), encoding="utf-8")
    return path


@pytest.mark.few(1)
@pytest.mark.parametrize(("name", "code"), [("SIGTERM", 143), ("SIGINT", 130)])
def test_a_signal_ends_the_run_with_a_checkpoint_and_its_code(
    name: str,
    code: int,
    recipe: Path,
    make_config: MakeConfig,
    hook: Hook,
    capfd: pytest.CaptureFixture[str],
) -> None:
    make_config()
    hook(
        f"import os, signal\nif call == {IN_STEP_4}: hook.unlink(); os.kill(os.getpid(), "
        f"signal.{name})"
    )
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    assert main(["train", str(recipe)]) == code
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
    shown = capfd.readouterr()
    assert f"{name}: stopping where it is safe" in shown.err
    assert f"stopped by {name}" in shown.err
    assert "step_000003; go on with --resume" in shown.out
    assert (recipe.parent / "run" / "checkpoints" / "step_000003" / "manifest.json").is_file()
    assert main(["train", str(recipe), "--resume"]) == 0


def test_a_second_ctrl_c_ends_at_once(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config()
    update = Trainer.update
    calls = iter(range(1000))

    def twice(self: Trainer, *arguments: Any) -> Any:
        if next(calls) == 2 * 3:
            for _ in range(2):
                os.kill(os.getpid(), signal.SIGINT)
        return update(self, *arguments)

    monkeypatch.setattr(Trainer, "update", twice)
    with pytest.raises(StoppedAtOnce):
        train(config)
    assert {path.name for path in config.output.joinpath("checkpoints").iterdir()} == {
        "step_000002"
    }
    assert not (config.output / "model").exists()


@pytest.mark.few(1)
@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_a_policy_half_updated_is_never_saved(
    error: type[BaseException],
    make_config: MakeConfig,
    monkeypatch: pytest.MonkeyPatch,
    expected: dict[str, Any],
    outcome: Callable[[Path], Any],
) -> None:
    """Cut off between the optimiser's change of the masters and their publication, in the second
    update of step 3.
    """
    config = make_config()
    step = AdamW.step
    calls = iter(range(1000))

    def cut_off(self: AdamW, *arguments: Any) -> None:
        step(self, *arguments)
        if next(calls) == 5:
            raise error

    with monkeypatch.context() as patch:
        patch.setattr(AdamW, "step", cut_off)
        with pytest.raises(error):
            train(config)
    assert not (config.output / "model").exists()
    assert {path.name for path in config.output.joinpath("checkpoints").iterdir()} == {
        "step_000002"
    }
    train(config, resume=True)
    assert outcome(config.output) == expected


def test_an_error_between_two_updates_of_a_step_keeps_the_weights_but_no_checkpoint(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    update = Trainer.update
    calls = iter(range(1000))

    def fail(self: Trainer, *arguments: Any) -> Any:
        if next(calls) == 5:
            raise MemoryError
        return update(self, *arguments)

    config = make_config()
    monkeypatch.setattr(Trainer, "update", fail)
    with pytest.raises(MemoryError):
        train(config)
    assert (config.output / "model" / "model.safetensors").is_file()
    assert {path.name for path in config.output.joinpath("checkpoints").iterdir()} == {
        "step_000002"
    }


def test_signals_switched_off_by_the_caller_stay_off() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with Interruption() as interruption:
            os.kill(os.getpid(), signal.SIGINT)
            interruption.check()
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_outside_the_main_thread_signals_are_left_alone() -> None:
    seen: list[Any] = []

    def work() -> None:
        with Interruption():
            seen.append(signal.getsignal(signal.SIGTERM))

    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [before]


def test_two_processes_on_one_directory(recipe: Path, hook: Hook) -> None:
    """The second is refused with the holder's process; once the first is killed, the directory is
    free.
    """
    hook("import time\nif call == 5: time.sleep(3600)")  # it is killed long before
    logs = [recipe.with_suffix(f".{name}") for name in ("first", "second", "errors")]
    first = command(["train", str(recipe)], logs[0])
    try:
        while not (recipe.parent / "run" / "rewards.jsonl").exists():
            assert first.is_alive(), logs[0].read_text()
            time.sleep(0.01)
        refused = command(["train", str(recipe), "--resume"], *logs[1:])
        refused.join()
        assert refused.exitcode == 2
        assert f"in use by process {first.pid} on " in logs[2].read_text()
    finally:
        first.kill()
        first.join()
    hook("")
    assert main(["train", str(recipe), "--resume"]) == 0
