"""Fine-tuning that is killed, stopped, or out of memory at any moment goes on to the bytes of a run
that nothing happened to.
"""

import json
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from isobit.cli.main import main
from isobit.config.recipes import SftConfig
from isobit.run.sft import sft
from isobit.starter.tasks import problems, question, worked_out
from isobit.store import disk_plan
from isobit.store.lock import locked
from isobit.training.comparison import UpdateMetrics
from isobit.training.trainer import Trainer
from isobit.util.errors import CheckpointError, ConfigError, Interrupted, StorageError
from tests.death import Death
from tests.faults.test_out_of_memory import little_memory
from tests.forked import command
from tests.tiny import with_sections

MakeConfig = Callable[..., SftConfig]
Hook = Callable[[str], None]
Outcome = Callable[[Path], dict[str, Any]]
SETS = 3
"""Rewards asked for by an evaluation."""


def write_rows(path: Path, held_out: bool, count: int) -> str:
    rows = (
        {"prompt": question(p), "completion": worked_out(p), "answer": str(sum(p))}
        for p in problems(held_out)[:count]
    )
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


@pytest.fixture(scope="session")
def tuning(place: Path) -> dict[str, Any]:
    """A run of 6 steps of 4 examples in FP8, a cosine, an evaluation every 2 steps and a checkpoint
    every 3.
    """
    return {
        "model": str(place / "model"),
        "output": str(place / "tuned"),
        "threads": 1,
        "data": {
            "train": {
                "type": "jsonl",
                "path": write_rows(place / "train.jsonl", held_out=False, count=10),
            },
            "eval": {
                "held_out": {
                    "type": "jsonl",
                    "path": write_rows(place / "held_out.jsonl", held_out=True, count=SETS),
                }
            },
        },
        "reward": {"function": f"{place / 'reward.py'}:reward", "in_process": True},
        "rollout": {"max_new_tokens": 6},
        "training": {
            "steps": 6,
            "prompts_per_step": 4,
            "learning_rate": 1e-3,
            "schedule": "cosine",
            "warmup_updates": 2,
        },
        "evaluation": {"every": 2},
        "checkpoint": {"every": 3},
    }


@pytest.fixture
def make_tuning(tuning: dict[str, Any], tmp_path: Path, place: Path) -> MakeConfig:
    """That run in a directory of the test's own; sections given replace keys.  A hook left by a
    test is removed.
    """
    (place / "hook.py").unlink(missing_ok=True)

    def make(**sections: Any) -> SftConfig:
        config = {**tuning, "output": tmp_path / "run"}
        return SftConfig.model_validate(with_sections(config, sections))

    return make


@pytest.fixture(scope="session")
def tuned(tuning: dict[str, Any], outcome: Outcome) -> dict[str, Any]:
    """The outcome of a run that nothing happens to."""
    config = SftConfig.model_validate(tuning)
    if not config.output.exists():
        sft(config)
    return outcome(config.output)


@contextmanager
def after_update(number: int, happens: Callable[[], Any]) -> Iterator[None]:
    """Something happens once when that many updates of the run are done, before the last of
    them is logged.
    """
    update = Trainer.update

    def watched(self: Trainer, *arguments: Any) -> UpdateMetrics:
        done = update(self, *arguments)
        if self.updates == number:
            happens()
        return done

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "update", watched)
        yield


def die() -> None:
    raise Death


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


class Attempt:
    """A process of ``isobit sft --resume``, killed when something is seen."""

    def __init__(self, recipe: Path, output: Path) -> None:
        self.printed = output.with_suffix(".log")
        self.printed.touch()
        self._process = command(["sft", str(recipe), "--resume"], self.printed)

    def kill_when(self, happened: Callable[[], bool]) -> None:
        while not happened():
            assert self._process.is_alive(), self.printed.read_text()
            time.sleep(0.0005)
        self._process.kill()
        self._process.join()
        assert self._process.exitcode == -signal.SIGKILL


@pytest.mark.exhaustive
def test_killed_in_training_and_while_a_checkpoint_is_written_it_leaves_the_same_files(
    tuning: dict[str, Any], outcome: Outcome, tmp_path: Path
) -> None:
    longer = tuning | {
        "training": tuning["training"] | {"steps": 36},
        "checkpoint": {"every": 10},
        "evaluation": {"every": 20},
    }
    sft(SftConfig.model_validate(longer | {"output": tmp_path / "whole"}))
    recipe, output = tmp_path / "recipe.toml", tmp_path / "run"
    recipe.write_text(tomli_w.dumps(longer | {"output": str(output)}), encoding="utf-8")
    first = Attempt(recipe, output)
    first.kill_when(lambda: "step 14/36" in first.printed.read_text())
    checkpoints = output / "checkpoints"
    Attempt(recipe, output).kill_when(
        lambda: any(
            name.startswith(".step_") and name > ".step_000020" for name in names(checkpoints)
        )
    )
    assert 10 <= int(max(name for name in names(checkpoints) if name.startswith("step_"))[5:]) < 36
    assert main(["sft", str(output), "--resume"]) == 0
    assert outcome(output) == outcome(tmp_path / "whole")
    assert not list(checkpoints.glob(".*"))


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("call", "checkpoints"),
    [(SETS - 1, None), (SETS + 2, ["step_000002"]), (3 * SETS + 1, ["step_000003", "step_000006"])],
    ids=["the first", "the one after step 2", "the last"],
)
def test_stopped_in_an_evaluation_it_goes_on_there(
    call: int,
    checkpoints: list[str] | None,
    make_tuning: MakeConfig,
    hook: Hook,
    tuned: dict[str, Any],
    outcome: Outcome,
) -> None:
    config = make_tuning()
    hook(
        f"import os, signal\nif call == {call}: hook.unlink(); os.kill(os.getpid(), signal.SIGTERM)"
    )
    with pytest.raises(Interrupted):
        sft(config)
    assert (names(config.output / "checkpoints") if config.output.exists() else None) == checkpoints
    sft(config, resume=True)
    assert outcome(config.output) == tuned


@pytest.mark.few(1)
@pytest.mark.parametrize(("name", "code"), [("SIGTERM", 143), ("SIGINT", 130)])
def test_a_signal_in_a_step_ends_the_run_with_a_checkpoint_its_weights_and_its_code(
    name: str,
    code: int,
    make_tuning: MakeConfig,
    tuned: dict[str, Any],
    outcome: Outcome,
    capfd: pytest.CaptureFixture[str],
) -> None:
    config = make_tuning()
    recipe = config.output.with_name("recipe.toml")
    recipe.write_text(
        tomli_w.dumps(config.model_dump(mode="json", exclude_none=True)), encoding="utf-8"
    )
    with after_update(4, lambda: os.kill(os.getpid(), getattr(signal, name))):
        assert main(["sft", str(recipe)]) == code
    assert "step_000004; go on with --resume" in capfd.readouterr().out
    assert names(config.output / "checkpoints") == ["step_000003", "step_000004"]
    assert (config.output / "model" / "model.safetensors").is_file()
    assert main(["sft", str(recipe), "--resume"]) == 0
    assert "resuming" in capfd.readouterr().out
    assert outcome(config.output) == tuned


def test_a_second_ctrl_c_ends_at_once_and_writes_nothing_more(
    make_tuning: MakeConfig, tuned: dict[str, Any], outcome: Outcome
) -> None:
    config = make_tuning()
    with (
        after_update(5, lambda: [os.kill(os.getpid(), signal.SIGINT) for _ in range(2)]),
        pytest.raises(KeyboardInterrupt),
    ):
        sft(config)
    assert names(config.output / "checkpoints") == ["step_000003"]
    assert not (config.output / "model").exists()
    sft(config, resume=True)
    assert outcome(config.output) == tuned


def test_a_damaged_checkpoint_is_named_and_the_one_before_it_used(
    make_tuning: MakeConfig,
    tuned: dict[str, Any],
    outcome: Outcome,
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = make_tuning()
    sft(config)
    masters = config.output / "checkpoints" / "step_000006" / "masters.safetensors"
    masters.write_bytes(masters.read_bytes()[:-1] + b"x")
    sft(config, resume=True)
    assert "checkpoint step_000006 cannot be used" in capsys.readouterr().out
    assert outcome(config.output) == tuned
    shutil.rmtree(config.output / "checkpoints" / "step_000003")
    masters.write_bytes(masters.read_bytes()[:-1] + b"x")
    with pytest.raises(CheckpointError, match="no checkpoint in"):
        sft(config, resume=True)


def test_another_configuration_and_other_data_are_refused(
    make_tuning: MakeConfig, tmp_path: Path
) -> None:
    rows = [
        {
            "chat": [
                {"role": "user", "content": f"{n}+1="},
                {"role": "assistant", "content": str(n + 1)},
            ]
        }
        for n in range(4)
    ]
    path = tmp_path / "chats.jsonl"
    data = {"train": {"type": "jsonl", "path": str(path), "messages": "chat"}, "chat": True}
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    folder = tmp_path / "chatting"
    shutil.copytree(make_tuning().model, folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(
        json.dumps(settings | {"chat_template": template})
    )
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = make_tuning(data=data, training={"steps": 1}, model=str(folder))
    sft(config)
    changed = make_tuning(
        data=data, training={"steps": 1, "learning_rate": 1e-2}, model=str(folder), seed=3
    )
    with pytest.raises(
        ConfigError,
        match=r"2 keys differ\n  seed: 0 in the run, 3 now\n"
        r"  training.learning_rate: 0.001 in the run",
    ):
        sft(changed, resume=True)
    rows[1]["chat"][1]["content"] = "7"  # the prompts stay as they are
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(ConfigError, match=r"data\.train\.content: SHA-256"):
        sft(config, resume=True)


def test_too_little_space_is_said_before_anything_is_written(
    make_tuning: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_plan, "free_bytes", lambda path: 1000)
    for start in (
        {},
        {
            "from_scratch": {
                "hidden_size": 128,
                "intermediate_size": 128,
                "num_layers": 9,
                "num_heads": 4,
            }
        },
    ):
        config = make_tuning(**start)
        size = r"1\.\d+ MiB, at most 2" if not start else r"\d\d\.\d MiB, at most 2"
        with pytest.raises(
            StorageError,
            match=(
                rf"disk: .* of 0.977 KiB free.*checkpoints of {size} at once.*lower "
                r"checkpoint.keep_last"
            ),
        ):
            sft(config)
        assert not config.output.exists()


def test_a_second_process_is_refused(make_tuning: MakeConfig) -> None:
    config = make_tuning(training={"steps": 1})
    sft(config)
    with (
        locked(config.output),
        pytest.raises(ConfigError, match=f"in use by process {os.getpid()} on "),
    ):
        sft(config, resume=True)


@pytest.mark.exhaustive
def test_rewards_of_repeated_evaluations_are_not_asked_for_again(
    make_tuning: MakeConfig, outcome: Outcome, tmp_path: Path
) -> None:
    (tmp_path / "moody.py").write_text(
        "import random\nsource = random.SystemRandom()\ndef reward(prompt, completion):\n    "
        "return source.random()\n",
        encoding="utf-8",
    )
    config = make_tuning(reward={"function": f"{tmp_path / 'moody.py'}:reward"})
    sft(config)
    first = outcome(config.output)
    shutil.rmtree(config.output / "checkpoints")  # every step is repeated
    sft(config, resume=True)
    assert outcome(config.output) == first


@pytest.mark.exhaustive
def test_random_weights_go_on_too_and_no_reward_leaves_no_record(
    make_tuning: MakeConfig, outcome: Outcome, tmp_path: Path
) -> None:
    start = {
        "model": str(make_tuning().model),
        "from_scratch": {
            "hidden_size": 128,
            "intermediate_size": 128,
            "num_layers": 1,
            "num_heads": 2,
        },
        "reward": None,
    }
    outcomes = []
    for name in ("whole", "broken"):
        config = make_tuning(output=tmp_path / name, **start)
        if name == "broken":
            with after_update(5, die), pytest.raises(Death):
                sft(config)
        sft(config, resume=True)
        assert not (config.output / "rewards.jsonl").exists()
        (config.output / "rewards.jsonl").touch()  # for ``outcome``
        outcomes.append(outcome(config.output))
    assert outcomes[0] == outcomes[1]


def test_the_lowest_loss_is_kept_as_the_best(make_tuning: MakeConfig) -> None:
    best = {"every": 0, "keep_last": 1, "keep_best": "eval/held_out/loss"}
    config = make_tuning(
        checkpoint=best,
        evaluation={"every": 1},
        training={"learning_rate": 3e-2, "schedule": "constant"},
    )
    sft(config)
    lines = [
        json.loads(line) for line in (config.output / "metrics.jsonl").read_text().splitlines()
    ]
    losses = {
        line["step"]: line["eval/held_out/loss"]
        for line in lines
        if "eval/held_out/loss" in line and line["step"]
    }
    lowest = min(losses, key=losses.__getitem__)
    assert names(config.output / "checkpoints") == sorted({f"step_{lowest:06}", "step_000006"})
    with pytest.raises(
        ConfigError,
        match=(
            r"keep_best is 'eval/held_out/pass@2'.*name one of eval/held_out/accuracy, "
            r"eval/held_out/loss"
        ),
    ):
        sft(make_tuning(output="nowhere", checkpoint={"keep_best": "eval/held_out/pass@2"}))


@pytest.mark.exhaustive
@pytest.mark.parametrize(("dies_after", "every"), [(5, 3), (6, 5)])
def test_a_killed_run_makes_a_change_of_the_budget_again(
    dies_after: int,
    every: int,
    make_tuning: MakeConfig,
    outcome: Outcome,
    tuned: dict[str, Any],
    tmp_path: Path,
) -> None:
    """The memory falls short in step 5, right after an evaluation; the newest checkpoint is older
    than the change, or holds it.  The evaluation made again knows of the change: no loss may
    depend on it.
    """
    settings: dict[str, Any] = {
        "training": {"tokens_per_microbatch": 64},
        "checkpoint": {"every": every},
    }
    whole = make_tuning(output=tmp_path / "whole", **settings)
    with little_memory(update=4, tokens=32):
        sft(whole)
    budget = (whole.output / "budget.jsonl").read_bytes()
    assert json.loads(budget) == {"step": 5, "update": 4, "old": 64, "new": 32}
    expected = outcome(whole.output)
    assert expected["masters.safetensors"] != tuned["masters.safetensors"], (
        "else this shows nothing"
    )
    config = make_tuning(**settings)
    with little_memory(update=4, tokens=32), after_update(dies_after, die), pytest.raises(Death):
        sft(config)
    sft(config, resume=True)
    assert (outcome(config.output), (config.output / "budget.jsonl").read_bytes()) == (
        expected,
        budget,
    )


def test_a_dry_run_says_what_it_takes_and_touches_nothing(
    make_tuning: MakeConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = make_tuning()
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(
        tomli_w.dumps(config.model_dump(mode="json", exclude_none=True)), encoding="utf-8"
    )
    before = names(tmp_path)
    assert main(["sft", str(recipe), "--dry-run"]) == 0
    printed = capsys.readouterr().out
    for part in (
        "data: 10 examples, each seen 2.4 times; held out: 3 in held_out",
        "steps: 6 of 4 examples",
        "KV pages",
        "at most 2 at once",
    ):
        assert part in printed
    assert names(tmp_path) == before
    assert main(["sft", str(recipe), "--dry-run", "--rollout.max_new_tokens", "250"]) == 2
    assert "max_new_tokens = 250" in capsys.readouterr().err
