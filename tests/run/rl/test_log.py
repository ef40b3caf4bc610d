"""The lines that reinforcement learning prints: a step, and the end."""

from collections.abc import Callable
from pathlib import Path

from isobit.clock import Clock
from isobit.config.run import RunConfig
from isobit.models.folder import read_config
from isobit.observe.console import Console
from isobit.run.rl.log import RlLog, describe_step
from isobit.run.rl.setup import prepare_rl
from isobit.run.rl.summary import RlSetSummary, RlSummary, describe_summary
from isobit.store.checkpoint.start import begin

METRICS = {
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


def test_a_step_is_one_line() -> None:
    assert describe_step(3, 20, METRICS) == (
        "step  3/20  reward 0.500  length 12.2  entropy 0.125  differing 0 of 3136  rollout 11,000 "
        "tok/s  training 7,400 tok/s  3.2 s"
    )


def test_a_step_without_an_update_says_so() -> None:
    metrics = {name: value for name, value in METRICS.items() if name != "entropy"}
    assert "no update" in describe_step(1, 1, metrics)


def test_the_last_lines_hold_the_figures_and_the_places() -> None:
    sets = {"held_out": RlSetSummary(200, 0.55, 0.9, None, None)}
    summary = RlSummary(
        Path("runs/x"),
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
        sets,
    )
    assert describe_summary(summary) == [
        "held_out: accuracy 55.0% -> 90.0% (+35.0 points) on 200 problems",
        "fp8: 0 of 90,123 log-probabilities differ in rollout and training",
        "time: 112.4 s for 20 steps, 9.5 s for evaluation",
        "model: runs/x/model",
        "files: runs/x (summary.json, metrics.jsonl, completions.jsonl, tensorboard/, run.json)",
        "figures as a page: isobit report runs/x",
    ]


def test_a_log_installs_nothing_in_the_trainer(make_config: Callable[..., RunConfig]) -> None:
    """Whoever puts the run together says who hears of changes of the budget."""
    config = make_config()
    with begin(config, read_config(Path(config.model)), False, print) as start:
        run = prepare_rl(config)
        with RlLog(run, start, Console(), Clock()):
            assert run.trainer.budget.on_change is None
