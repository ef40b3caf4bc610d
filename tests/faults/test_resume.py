"""A run that stops and goes on is the run that never stopped; one that is not the same run is
refused.
"""

import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pyarrow import parquet
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from isobit.cli.main import main
from isobit.config.recipes import RunConfig
from isobit.run.log import RlLog
from isobit.run.loop import train
from isobit.util.errors import ConfigError, Interrupted, RewardError, StoppedAtOnce

MakeConfig = Callable[..., RunConfig]
Hook = Callable[[str], None]
STOP = "import os, signal\nif call == {call}: hook.unlink(); os.kill(os.getpid(), signal.{signal})"
EVALUATION, STEP = 3, 16
"""Rewards asked for by an evaluation and by a step."""


def stop(
    config: RunConfig, hook: Hook, call: int, name: str = "SIGTERM", resume: bool = False
) -> None:
    """Run until the signal that comes while reward number ``call`` is computed."""
    hook(STOP.format(call=call, signal=name))
    with pytest.raises(Interrupted):
        train(config, resume=resume)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "call",
    [
        EVALUATION - 1,  # in the first evaluation
        EVALUATION + 1,  # in step 1
        EVALUATION + 2 * STEP + 5,  # in step 3
        EVALUATION + 3 * STEP + 1,  # in the evaluation after step 3
        2 * EVALUATION + 6 * STEP + 1,  # in the last evaluation
    ],
)
def test_a_stopped_and_resumed_run_leaves_the_same_files(
    call: int,
    make_config: MakeConfig,
    hook: Hook,
    expected: dict[str, Any],
    outcome: Callable[[Path], dict[str, Any]],
) -> None:
    config = make_config()
    stop(config, hook, call)
    assert not (config.output / "model").exists(), "no half-trained model is left as the final one"
    train(config, resume=True)
    assert outcome(config.output) == expected


@pytest.mark.exhaustive
def test_no_step_appears_twice_in_tensorboard(make_config: MakeConfig, hook: Hook) -> None:
    config = make_config(training={"steps": 4})
    hook(
        "from isobit.util.errors import StoppedAtOnce\n"
        "if call == 3 + 3 * 16 + 3: hook.unlink(); raise StoppedAtOnce"
    )  # in step 4, with no checkpoint of step 3
    with pytest.raises(StoppedAtOnce):
        train(config)
    assert "step_000002" in {path.name for path in (config.output / "checkpoints").iterdir()}
    train(config, resume=True)
    steps = []
    for file in sorted((config.output / "tensorboard").iterdir()):
        steps += [event.step for event in EventAccumulator(str(file)).Reload().Scalars("loss")]
    assert steps == [1, 2, 3, 4]


def test_rewards_of_repeated_steps_are_not_asked_for_again(
    make_config: MakeConfig,
    hook: Hook,
    place: Path,
    outcome: Callable[[Path], dict[str, Any]],
    tmp_path: Path,
) -> None:
    """A reward that is no function of its arguments: a resumed run takes what was recorded."""
    (tmp_path / "moody.py").write_text(
        "import random\nsource = random.SystemRandom()\ndef reward(prompt, completion):\n    "
        "return source.random()\n",
        encoding="utf-8",
    )
    config = make_config(
        reward={"function": f"{tmp_path / 'moody.py'}:reward"},
        training={"steps": 3},
        checkpoint={"every": 0},
    )
    train(config)
    first = outcome(config.output)
    shutil.rmtree(config.output / "checkpoints")  # every step is repeated
    train(config, resume=True)
    assert outcome(config.output) == first


def test_a_finished_run_may_be_resumed_and_stays_as_it_is(
    make_config: MakeConfig,
    uninterrupted: Path,
    expected: dict[str, Any],
    outcome: Callable[[Path], dict[str, Any]],
) -> None:
    config = make_config()
    shutil.copytree(uninterrupted, config.output)
    train(config, resume=True)
    assert outcome(config.output) == expected


def test_resume_begins_a_run_where_there_is_none(
    make_config: MakeConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    config = make_config(training={"steps": 1})
    train(config, resume=True)
    assert "nothing to resume" in capsys.readouterr().out


def test_files_that_are_no_run_are_refused(make_config: MakeConfig) -> None:
    config = make_config()
    config.output.mkdir()
    (config.output / "thesis.tex").write_text("")
    with pytest.raises(ConfigError, match="no run that could be resumed"):
        train(config, resume=True)
    assert (config.output / "thesis.tex").exists()


def test_another_configuration_is_refused_with_all_keys_and_both_values(
    make_config: MakeConfig,
) -> None:
    train(make_config(training={"steps": 2}))
    before = sorted((path, path.stat().st_mtime_ns) for path in make_config().output.rglob("*"))
    changed = make_config(
        training={"steps": 3, "learning_rate": 1e-2}, precision={"preset": "bf16"}, seed=5
    )
    with pytest.raises(ConfigError) as error:
        train(changed, resume=True)
    for line in (
        "4 keys differ",
        "precision.preset: 'fp8' in the run, 'bf16' now",
        "seed: 0 in the run, 5 now",
        "training.learning_rate: 0.001 in the run, 0.01 now",
        "training.steps: 2 in the run, 3 now",  # a cosine reaches its end where the run ends
    ):
        assert line in str(error.value)
    assert sorted(
        (path, path.stat().st_mtime_ns)
        for path in make_config().output.rglob("*")
        if path.name != ".lock"
    ) == [pair for pair in before if pair[0].name != ".lock"]


@pytest.mark.exhaustive
def test_what_may_change_may_and_more_steps_are_those_of_a_longer_run(
    make_config: MakeConfig, outcome: Callable[[Path], dict[str, Any]], tmp_path: Path
) -> None:
    constant = {"schedule": "constant", "steps": 6}
    config = make_config(training=constant, output=tmp_path / "long")
    train(config)
    train(make_config(training={**constant, "steps": 3}))
    small = {"max_sequences": 3, "max_batched_tokens": 70, "kv_pages": 6}
    train(
        make_config(
            training=constant,
            rollout=small,
            checkpoint={"every": 5, "keep_last": 1},
            evaluation={"every": 3},
        ),
        resume=True,
    )
    names = (
        "model/model.safetensors",
        "completions.jsonl",
        "digests",
        "masters.safetensors",
        "optimiser.safetensors",
    )
    short, long = outcome(tmp_path / "run"), outcome(config.output)
    assert {name: short[name] for name in names} == {name: long[name] for name in names}
    resumed = json.loads((tmp_path / "run" / "run.json").read_text())["resumed"]
    assert resumed[0]["step"] == 3 and resumed[0]["changed"]["training.steps"] == [3, 6]


def test_other_training_prompts_are_refused(make_config: MakeConfig, tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    lines = [json.dumps({"prompt": f"{n}+1=", "answer": str(n + 1)}) for n in range(6)]
    path.write_text("\n".join(lines), encoding="utf-8")
    config = make_config(
        data={"train": {"type": "jsonl", "path": str(path)}}, training={"steps": 2}
    )
    train(config)
    path.write_text(
        "\n".join([*lines[:-1], json.dumps({"prompt": "5+1=", "answer": "7"})]), encoding="utf-8"
    )
    with pytest.raises(ConfigError, match=r"data\.train\.content: SHA-256 .* in the run"):
        train(config, resume=True)


@pytest.mark.exhaustive
def test_a_run_that_failed_goes_on_once_its_reward_is_mended(
    make_config: MakeConfig,
    hook: Hook,
    expected: dict[str, Any],
    outcome: Callable[[Path], dict[str, Any]],
) -> None:
    config = make_config()
    hook("if call >= 3 + 2 * 16: raise KeyError('answer')")
    with pytest.raises(RewardError):
        train(config)
    assert {path.name for path in (config.output / "checkpoints").iterdir()} == {"step_000002"}
    hook("")
    train(config, resume=True)
    assert outcome(config.output) == expected


def test_the_threads_of_the_run_are_kept(
    make_config: MakeConfig, hook: Hook, capsys: pytest.CaptureFixture[str]
) -> None:
    config = make_config(threads=None, training={"steps": 1})
    train(config)
    torch.set_num_threads(2)
    train(config, resume=True)
    assert torch.get_num_threads() == 1
    assert "going on with 1 threads, as before, rather than 2" in capsys.readouterr().out


def test_the_command_line_resumes_from_recipe_or_directory(
    values: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import tomli_w

    recipe = tmp_path / "recipe.toml"
    recipe.write_text(tomli_w.dumps({**values, "output": str(tmp_path / "run")}), encoding="utf-8")
    assert (
        main(["train", str(recipe), "--training.schedule", "constant", "--training.steps", "1"])
        == 0
    )
    assert (
        main(
            [
                "train",
                str(recipe),
                "--resume",
                "--training.schedule=constant",
                "--training.steps",
                "2",
            ]
        )
        == 0
    )
    assert main(["train", str(tmp_path / "run"), "--resume", "--training.steps", "3"]) == 0
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["steps"] == 3
    assert main(["train", str(recipe)]) == 2
    assert "--resume" in capsys.readouterr().err


@pytest.mark.exhaustive
def test_interrupted_again_while_it_takes_rewards_from_the_record(
    make_config: MakeConfig,
    monkeypatch: pytest.MonkeyPatch,
    uninterrupted: Path,
    expected: dict[str, Any],
    outcome: Callable[[Path], dict[str, Any]],
) -> None:
    """Steps 3 to 6 were graded, and only the checkpoint of step 2 is left; resumed, the run is
    stopped after step 3: the gradings of steps 4 to 6 lie before its new checkpoint in the file,
    and behind it in the run.
    """
    config = make_config()
    shutil.copytree(uninterrupted, config.output)
    for step in (4, 6):
        shutil.rmtree(config.output / "checkpoints" / f"step_{step:06}", ignore_errors=True)
    log_step = RlLog.step

    def stopped(log: RlLog, step: int, *rest: Any) -> None:
        log_step(log, step, *rest)
        if step == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(RlLog, "step", stopped)
        with pytest.raises(Interrupted):
            train(config, resume=True)
    assert (config.output / "checkpoints" / "step_000003").exists()
    train(config, resume=True)
    assert outcome(config.output) == expected


def kept(root: Path) -> dict[str, list[dict[str, Any]]]:
    folder = root / "completions"
    return {path.name: parquet.read_table(path).to_pylist() for path in sorted(folder.iterdir())}


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "call", [EVALUATION + 1, EVALUATION + 3 * STEP + 1, 2 * EVALUATION + 3 * STEP + 2]
)
@pytest.mark.parametrize("error", ["Interrupted", "StoppedAtOnce"])
def test_no_completion_is_lost_or_doubled_by_a_kill_and_a_resume(
    error: str, call: int, make_config: MakeConfig, hook: Hook, tmp_path: Path
) -> None:
    sections = {"training": {"steps": 4}, "tracking": {"completions": "all"}}
    whole = make_config(output=tmp_path / "whole", **sections)
    train(whole)
    config = make_config(**sections)
    if error == "Interrupted":
        stop(config, hook, call)
    else:
        hook(
            "from isobit.util.errors import StoppedAtOnce\n"
            f"if call == {call}: hook.unlink(); raise StoppedAtOnce"
        )
        with pytest.raises(StoppedAtOnce):
            train(config)
    (config.output / "completions").mkdir(parents=True, exist_ok=True)
    (config.output / "completions/.step_000004.parquet").write_bytes(b"torn")
    train(config, resume=True)
    found = kept(config.output)
    assert found == kept(whole.output)
    assert {name: len(rows) for name, rows in found.items()} == {
        **{f"evaluation_{step:06}.parquet": EVALUATION for step in (0, 3, 4)},
        **{f"step_{step:06}.parquet": STEP for step in range(1, 5)},
    }
    rewards = [row["reward"] for row in found["step_000002.parquet"]]
    figures = [json.loads(line) for line in (config.output / "metrics.jsonl").open()]
    (mean,) = (row["reward/mean"] for row in figures if row["step"] == 2 and "loss" in row)
    assert sum(rewards) / len(rewards) == pytest.approx(mean)


def test_as_many_completions_are_kept_as_asked_for(make_config: MakeConfig) -> None:
    config = make_config(tracking={"completions": 5}, training={"steps": 1})
    train(config)
    sizes = {name: len(rows) for name, rows in kept(config.output).items()}
    assert sizes["step_000001.parquet"] == 5 and sizes["evaluation_000000.parquet"] == EVALUATION
    (first, *_) = kept(config.output)["step_000001.parquet"]
    assert len(first["token_ids"]) == len(first["log_probs"]) == first["tokens"]
    assert first["reward_parts"] == []
