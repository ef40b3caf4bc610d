"""The lines that reinforcement learning prints: a step, and the end.

A run that learns nothing says so, and can stop.
"""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from isobit.config.recipes import RunConfig
from isobit.config.tables import CheckConfig
from isobit.models.folder import read_config
from isobit.observe.console import fit
from isobit.run.log import (
    RlSetSummary,
    RlSummary,
    SignalWatch,
    describe_step,
    describe_summary,
)
from isobit.run.loop import train
from isobit.run.resolved import resolve
from isobit.run.rl_run import prepare_rl
from isobit.store.checkpoint import folder_name
from isobit.store.resume import begin
from isobit.util.errors import NoSignalError

METRICS: dict[str, float] = {
    "reward/mean": 0.5,
    "response_length/mean": 12.25,
    "entropy": 0.125,
    "log_prob_diff/tokens_differing": 0,
    "log_prob_diff/tokens_compared": 3136,
    "tokens_per_s/rollout": 11000.4,
    "tokens_per_s/training": 7400.0,
    "time/rollout_s": 1.0,
    "time/grading_s": 0.25,
    "time/training_s": 2.0,
}


def line(metrics: dict[str, float], width: int | None = None, exact: bool = True) -> str:
    parts = fit(describe_step(3, 20, metrics, exact, seconds_left=54.0), width)
    return "  ".join(part.text for part in parts)


def styles(metrics: dict[str, float], exact: bool = True) -> dict[str, str]:
    parts = describe_step(3, 20, metrics, exact, seconds_left=54.0)
    return {part.text.split()[0]: part.style for part in parts if part.style}


def test_a_step_is_one_line() -> None:
    assert line(METRICS) == (
        "step  3/20  reward 0.500  length 12.2  entropy 0.125  differing 0 of 3136  rollout 11,000 "
        "tok/s  training 7,400 tok/s  3.2 s  54 s left"
    )


def test_a_terminal_of_80_columns_has_the_line_without_what_is_worth_least() -> None:
    assert line(METRICS, 80) == (
        "step  3/20  reward 0.500  length 12.2  entropy 0.125  0 differ  3.2 s  54 s left"
    )


@pytest.mark.parametrize(("taught", "says"), [(1, "no update"), (0, "no signal")])
def test_a_step_without_an_update_says_why(taught: int, says: str) -> None:
    without = {"updates/without_signal": 1 - taught, "log_prob_diff/tokens_compared": 0}
    metrics = {name: value for name, value in METRICS.items() if name != "entropy"} | without
    assert says in line(metrics) and "differing" not in line(metrics)


def test_tokens_that_differ_are_good_or_bad_where_none_may() -> None:
    some = METRICS | {"log_prob_diff/tokens_differing": 3, "routing_diff/tokens_differing": 1}
    assert styles(METRICS) == {"differing": "green"}
    assert styles(some) == {"differing": "bold red", "routings": "bold red"}
    assert styles(some, exact=False) == {}


def test_a_step_whose_rewards_all_failed_has_a_line() -> None:
    assert "no reward" in line({n: v for n, v in METRICS.items() if n != "reward/mean"})


SUMMARY = RlSummary(
    Path("runs/x"),
    "fp8",
    "fp8",
    20,
    0.55,
    0.9,
    200,
    90123,
    0,
    0.0,
    90123,
    0,
    0,
    112.4,
    60.0,
    9.5,
    {"held_out": RlSetSummary(200, 0.55, 0.9, None, None)},
)


def test_the_last_lines_hold_the_figures_and_the_places() -> None:
    assert describe_summary(SUMMARY) == [
        "held_out: accuracy 55.0% -> 90.0% (+35.0 points) on 200 problems",
        "fp8: 0 of 90,123 log-probabilities differ in rollout and training",
        "time: 112.4 s for 20 steps, 9.5 s for evaluation",
        "model: runs/x/model",
        "files: runs/x (summary.json, metrics.jsonl, completions.jsonl, tensorboard/, run.json)",
        "figures as a page: isobit report runs/x",
    ]


def test_the_last_lines_say_what_was_compared() -> None:
    """Seen before: "0 of 80 differ" of 312 tokens, and "0 of 0 differ" without an update."""

    def line(**changes: Any) -> str:
        return describe_summary(replace(SUMMARY, **changes))[1]

    assert "compared" not in line(tokens_learnt=90_123)
    assert line(tokens_compared=80, tokens_learnt=320, compared="those of x") == (
        "fp8: 0 of 80 log-probabilities differ in rollout and training; compared were 25%, those "
        "of x"
    )
    assert line(tokens_compared=0) == (
        "fp8: no log-probability was compared, since no completion was learnt from"
    )


def test_the_end_of_a_run_says_how_many_steps_taught_nothing() -> None:
    def last_lines(steps: int) -> str:
        return "\n".join(describe_summary(replace(SUMMARY, steps_without_signal=steps)))

    assert "signal" not in last_lines(0)
    assert "no signal in 3 of 20 steps: " in last_lines(3)
    assert "warning: no step had a signal" in last_lines(20)


def test_a_log_installs_nothing_in_the_trainer(make_config: Callable[..., RunConfig]) -> None:
    """Whoever puts the run together says who hears of changes of the budget."""
    config = make_config()
    with begin(config, read_config(Path(config.model)), False, print) as start:
        run = prepare_rl(resolve(config))
        with run.open_log(start):
            assert run.trainer.budget.on_change is None


def notes(watch: SignalWatch, *signals: bool) -> list[int]:
    """The steps that something is printed about."""
    said = []
    for step, has_signal in enumerate(signals, start=1):
        watch.count(has_signal, {} if has_signal else {"level": 8})
        if watch.notes():
            said.append(step)
    return said


def test_a_line_after_each_so_many_steps_in_a_row() -> None:
    assert notes(SignalWatch(CheckConfig(no_signal_steps=2)), *[False] * 5) == [2, 4]
    row = (False, True, False, False, False)
    assert notes(SignalWatch(CheckConfig(no_signal_steps=3)), *row) == [5]
    ignored = CheckConfig(no_signal_steps=1, on_no_signal="ignore")
    assert notes(SignalWatch(ignored), *[False] * 3) == []


def test_the_line_says_why_of_all_the_steps_that_it_is_about() -> None:
    watch = SignalWatch(CheckConfig(no_signal_steps=2))
    watch.count(False, {"zero": 16})
    assert watch.notes() == []
    watch.count(False, {"zero": 12, "failed": 4})
    (line,) = watch.notes()
    assert "the last 2 steps had no signal: 32 completions, 4 without a valid reward and 28" in line
    assert "fine-tune it first" in line
    watch.count(True, {})
    watch.count(False, {"failed": 16})
    watch.count(False, {"failed": 16})
    assert "32 completions, all without a valid reward" in watch.notes()[0]


def test_a_run_without_a_signal_changes_no_byte_counts_it_and_can_stop(
    make_config: Callable[..., RunConfig], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Seen before: exit 0, an update by momentum in each step and no word of it."""
    reward = tmp_path / "nothing.py"
    reward.write_text("def nothing(prompt, completion):\n    return 0.0\n")
    config = make_config(
        f"{reward}:nothing",
        training={"steps": 9, "without_signal": "skip"},
        check={"on_no_signal": "stop", "no_signal_steps": 2},
    )
    with pytest.raises(NoSignalError, match=r"the last 2 steps had no signal.*all with reward 0"):
        train(config)
    said = capsys.readouterr().out
    assert said.count("no signal") == 3, "in each step's line, and a note about the first"
    metrics = (config.output / "metrics.jsonl").read_text().splitlines()
    lines = [json.loads(line) for line in metrics]
    steps = [line for line in lines if "updates/taken" in line]
    assert [line["updates/taken"] for line in steps] == [0, 0]
    assert [line["updates/without_signal"] for line in steps] == [1, 1]
    assert (config.output / "checkpoints" / folder_name(2)).is_dir()
    assert weights(config.output / "model") == weights(Path(config.model))


def weights(model: Path) -> bytes:
    return (model / "model.safetensors").read_bytes()
