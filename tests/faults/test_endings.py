"""Every ending of a run but a second Ctrl-C leaves a checkpoint where the state is whole, and says
why it came.
"""

import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from isobit.config.recipes import RunConfig
from isobit.observe.run_record import read_run
from isobit.run.loop import train
from isobit.training.trainer import Trainer
from isobit.util.errors import Interrupted, NonFiniteError, StorageError
from isobit.util.files import file_sha256

MakeConfig = Callable[..., RunConfig]
Hook = Callable[[str], None]
IN_STEP_4 = 2 * 3 + 3 * 16 + 3


def checkpoints(config: RunConfig) -> set[str]:
    return {path.name for path in (config.output / "checkpoints").iterdir()}


def ending(root: Path) -> dict[str, Any]:
    return json.loads((root / "ending.json").read_text(encoding="utf-8"))


@pytest.mark.few(1)
@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt, GeneratorExit, ValueError])
def test_an_exception_of_any_kind_leaves_a_checkpoint_and_its_reason(
    error: type[BaseException],
    make_config: MakeConfig,
    monkeypatch: pytest.MonkeyPatch,
    expected: dict[str, Any],
    outcome: Callable[[Path], dict[str, Any]],
) -> None:
    """Such as a console raised, or a reward in the process of the run; in step 4, before a weight
    changes.
    """
    config = make_config()
    update, calls = Trainer.update, iter(range(1000))

    def fail(self: Trainer, *arguments: Any) -> Any:
        if next(calls) == 2 * 3:
            raise error("on purpose")
        return update(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "update", fail)
        with pytest.raises(error, match="on purpose"):
            train(config)
    assert checkpoints(config) == {"step_000002", "step_000003"}
    assert ending(config.output) == {
        "step": 3,
        "kind": error.__name__,
        "reason": f"{error.__name__}: on purpose",
        "checkpoint": 3,
    }
    train(config, resume=True)
    assert not (config.output / "ending.json").exists()
    assert outcome(config.output) == expected


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["SIGHUP", "SIGXCPU"])
def test_a_closed_terminal_and_a_limit_on_time_stop_like_sigterm(
    name: str, make_config: MakeConfig, hook: Hook
) -> None:
    config = make_config()
    hook(
        f"import os, signal\nif call == {IN_STEP_4}: hook.unlink(); os.kill(os.getpid(), "
        f"signal.{name})"
    )
    number = getattr(signal, name)
    before = signal.getsignal(number)
    with pytest.raises(Interrupted, match=f"stopped by {name}") as stopped:
        train(config)
    assert stopped.value.exit_code == 128 + number
    assert signal.getsignal(number) == before
    assert checkpoints(config) == {"step_000002", "step_000003"}
    assert ending(config.output)["reason"] == f"stopped by {name}"


def test_sigusr1_leaves_a_checkpoint_and_the_run_goes_on(
    make_config: MakeConfig,
    hook: Hook,
    expected: dict[str, Any],
    outcome: Callable[[Path], dict[str, Any]],
    capfd: pytest.CaptureFixture[str],
) -> None:
    config = make_config(checkpoint={"keep_last": 9})
    hook(
        f"import os, signal\nif call == {IN_STEP_4 + 16}: hook.unlink(); os.kill(os.getpid(), "
        "signal.SIGUSR1)"
    )
    before = signal.getsignal(signal.SIGUSR1)
    train(config)
    assert signal.getsignal(signal.SIGUSR1) == before
    assert checkpoints(config) == {f"step_00000{step}" for step in (2, 4, 5, 6)}
    printed = capfd.readouterr()
    assert "SIGUSR1: a checkpoint after this step, then on" in printed.err
    assert "checkpoint: " in printed.out and "step_000005" in printed.out
    assert outcome(config.output) == expected


def test_a_reward_that_sleeps_in_the_process_of_the_run_is_interrupted(
    make_config: MakeConfig, hook: Hook
) -> None:
    """A timer of the kernel stands for the user: nothing else runs meanwhile."""
    config = make_config()
    hook(
        f"import signal, time\nif call == {IN_STEP_4}:\n    hook.unlink()\n"
        "    signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGTERM))\n"
        "    signal.setitimer(signal.ITIMER_REAL, 0.05)\n    time.sleep(3600)"
    )
    with pytest.raises(Interrupted):
        train(config)
    assert checkpoints(config) == {"step_000002", "step_000003"}


@pytest.mark.exhaustive
def test_printing_to_a_reader_who_has_gone_changes_nothing(
    make_config: MakeConfig,
    monkeypatch: pytest.MonkeyPatch,
    expected: dict[str, Any],
    outcome: Callable[[Path], dict[str, Any]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    read, write = os.pipe()
    os.close(read)
    config = make_config()
    with monkeypatch.context() as patch, open(write, "w") as gone:
        patch.setattr(sys, "stdout", gone)
        train(config)
    assert outcome(config.output) == expected
    assert capsys.readouterr().err.count("standard output cannot be written") == 1


def test_weights_that_are_not_finite_are_written_nowhere(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One weight becomes NaN in step 4, after which a checkpoint is due; only one is kept."""
    config = make_config(checkpoint={"keep_last": 1})
    update, calls = Trainer.update, iter(range(1000))

    def planted(self: Trainer, *arguments: Any) -> Any:
        made = update(self, *arguments)
        if next(calls) == 2 * 3 + 1:
            with torch.no_grad():
                self.policy.masters["norm.weight"][5] = torch.nan
        return made

    monkeypatch.setattr(Trainer, "update", planted)
    with pytest.raises(NonFiniteError, match=r"the weights of norm\.weight are not finite"):
        train(config)
    assert checkpoints(config) == {"step_000002"}
    assert not (config.output / "model").exists()
    assert "no more could be saved: the weights of norm.weight" in capsys.readouterr().out
    assert ending(config.output)["kind"] == "NonFiniteError"


def test_a_directory_that_is_moved_gets_its_last_checkpoint_where_it_is(
    make_config: MakeConfig,
    hook: Hook,
    tmp_path: Path,
    expected: dict[str, Any],
    outcome: Callable[[Path], dict[str, Any]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    config, moved = make_config(), tmp_path / "elsewhere"
    hook(
        f"if call == {IN_STEP_4}: hook.unlink(); "
        f"__import__('os').rename({str(config.output)!r}, {str(moved)!r})"
    )
    with pytest.raises(StorageError, match=f"was moved to {moved} while the run went on"):
        train(config)
    assert not config.output.exists()
    config = make_config(output=moved)
    assert checkpoints(config) == {"step_000002", "step_000003"}
    assert f"go on with --output {moved} --resume" in capsys.readouterr().out
    train(config, resume=True)
    assert outcome(moved) == expected


@pytest.mark.exhaustive
def test_a_directory_that_is_removed_is_made_again_and_can_be_resumed(
    make_config: MakeConfig,
    hook: Hook,
    expected: dict[str, Any],
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = make_config()
    hook(
        f"import shutil\nif call == {IN_STEP_4}: hook.unlink(); "
        f"shutil.rmtree({str(config.output)!r})"
    )
    with pytest.raises(StorageError, match="was removed while the run went on"):
        train(config)
    assert checkpoints(config) == {"step_000003"}
    train(config, resume=True)
    model = config.output / "model" / "model.safetensors"
    assert file_sha256(model) == expected["model/model.safetensors"]
    assert "was removed: it is made again" in capsys.readouterr().out


def test_another_run_in_the_place_of_a_removed_directory_is_left_alone(
    make_config: MakeConfig, hook: Hook, capsys: pytest.CaptureFixture[str]
) -> None:
    config = make_config()
    hook(
        f"import os, shutil\nif call == {IN_STEP_4}: hook.unlink(); "
        f"shutil.rmtree({str(config.output)!r}); os.mkdir({str(config.output)!r})"
    )
    with pytest.raises(StorageError, match="was removed while the run went on"):
        train(config)
    assert "is another directory now, and not this run's" in capsys.readouterr().out
    assert not list(config.output.iterdir())


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "name", ["completions.jsonl", "metrics.jsonl", "rewards.jsonl", "digests.jsonl"]
)
def test_a_lost_file_of_lines_costs_its_lines_and_no_checkpoint(
    name: str,
    values: dict[str, Any],
    make_config: MakeConfig,
    expected: dict[str, Any],
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = make_config()
    shutil.copytree(values["output"], config.output)
    (config.output / name).unlink()
    shutil.rmtree(config.output / "checkpoints" / "step_000006")
    train(config, resume=True)
    said = capsys.readouterr().out
    assert f"{name} is missing" in said and "none has all of its lines; using step_000004" in said
    for file in ("masters.safetensors", "optimiser.safetensors"):
        made = config.output / "checkpoints" / "step_000006" / file
        assert file_sha256(made) == expected[file]
    lines = (config.output / name).read_bytes().splitlines()
    assert lines and all(json.loads(line) for line in lines)


def test_a_line_separator_in_a_text_is_no_end_of_a_line(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n', encoding="utf-8")
    (tmp_path / "completions.jsonl").write_text(
        '{"step": 1, "prompt": "a\u2028b\u2029c\x85d"}\n' * 3, encoding="utf-8"
    )
    run = read_run(tmp_path)
    assert len(run.completions) == 3
    assert not [problem for problem in run.problems if "lines" in problem]
