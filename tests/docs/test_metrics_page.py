"""The table of metrics, ``docs/metrics.md`` and what runs write: none knows a metric that another
lacks.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from isobit.config.recipes import RunConfig, SftConfig
from isobit.config.reward import RewardConfig
from isobit.records.metrics import METRICS
from isobit.records.text import Completion, Prompt
from isobit.run.loop import train
from isobit.run.sft import sft
from tools.metrics_page import PAGE, with_tables

ON_A_GPU = {
    "memory/rollout_peak_gib",
    "memory/training_peak_gib",
    "time/offload_s",
}  # (tests/run/test_turns.py writes them)
OF_ROLLOUTERS = {"time/waiting_s"}  # (tests/run/test_rollouters.py writes it)
OF_VLLM = {"time/update_s"}  # (tests/rollout/test_vllm_engine.py)
OF_EXPERTS = {
    "routing_diff/tokens_compared",
    "routing_diff/tokens_differing",
    "router/balance",
    "router/z",
    "router/busiest",
    "router/idle",
}  # (tests/run/test_moe.py writes them)
OF_CALIBRATION = {"clip/low", "clip/high"}  # (tests/training/test_calibration.py writes them)
OF_EPISODES = {
    "episode/turns",
    "episode/calls",
    "episode/turn_rewards",
    "episode/turn_reward/NAME",
    "episode/results/NAME",
    "rollout/kept_tokens",
    "episode/ended/NAME",
    "episode/failed/NAME",
}  # (tests/run/test_environment.py reads them)
OF_RANKS = {
    "waiting/mean_s",
    "waiting/max_s",
    "waiting/min_s",
    "waiting/min_rank",
}  # (tests/run/test_ranks.py writes them)
SUBSTITUTES = {
    r"@\d+$": "@K",
    r"^eval/held_out/": "eval/SET/",
    r"^reward/(first|second)/": "reward/NAME/",
    r"^no_signal/.+": "no_signal/NAME",
}
ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "recipes"


def written(folder: Path) -> set[str]:
    lines = [
        json.loads(line)
        for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    names = {name for line in lines for name in line if name != "step"}
    for written, documented in SUBSTITUTES.items():
        names = {re.sub(written, documented, name) for name in names}
    return names


def with_all_there_is(make_config: Callable[..., RunConfig], output: Path) -> RunConfig:
    """A reference model, a value head, replay and corrections in two functions, and several
    rewards.
    """
    kl = {"kl_coefficient": 0.1, "kl_estimator": "k3", "kl_in": "loss"}
    algorithm = {"name": "ppo", "dual_clip": 3.0, **kl}
    precision = {"preset": "fp8-rollout", "kv_scales": "per_tensor", "kv_calibration": "engine"}
    config = make_config(
        output=output,
        precision=precision,
        algorithm=algorithm,
        replay={"fraction": 0.5},
        corrections=[{"type": "tis"}],
        check={"repeat_every": 1},
    )
    part = {"function": f"{__file__}:first_token"}
    parts = {"first": part, "second": part}
    reward = RewardConfig.model_validate({"parts": parts, "in_process": True})
    return config.model_copy(update={"reward": reward})


def first_token(prompt: Prompt, completion: Completion) -> float:
    """A reward that differs within a group, and so do PPO's returns."""
    return completion.token_ids[0] / 100


@pytest.mark.exhaustive
def test_runs_write_every_metric_of_the_table_and_no_other(
    make_config: Callable[..., RunConfig], tmp_path: Path
) -> None:
    config = make_config(evaluation={"temperature": 1.0, "samples": 2})
    train(config)
    train(with_all_there_is(make_config, tmp_path / "all"))
    refilled = {"name": "dapo", "max_refills": 1}
    updates = {"updates_per_batch": 2, "prompts_per_step": 2}
    train(
        make_config(
            output=tmp_path / "refilled", algorithm=refilled, training=updates,
            rollout={"max_new_tokens": 5, "speculation": 2},
        )
    )  # fmt: skip
    examples = {"type": "jsonl", "path": "starter:train.jsonl", "completion": "answer", "limit": 4}
    supervised = {
        "model": config.model,
        "output": tmp_path / "sft",
        "data": {
            "train": examples,
            "eval": {"held_out": examples | {"path": "starter:held_out.jsonl"}},
        },
        "training": {"steps": 1, "prompts_per_step": 2},
    }
    sft(SftConfig.model_validate(supervised))
    sft(
        SftConfig.model_validate(
            supervised | {"objective": "distil", "output": tmp_path / "distil"}
        )
    )
    train(make_config(output=tmp_path / "taught", teacher={"precision": "fp32"}))
    pairs, others = (
        {"type": "jsonl", "path": str(RECIPES / f"{name}.jsonl"), "limit": 4}
        for name in ("preferences", "preferences_held_out")
    )
    preferences = {
        **supervised,
        "objective": "preference",
        "output": tmp_path / "preferences",
        "data": {"train": pairs, "eval": {"held_out": others}},
    }
    sft(SftConfig.model_validate(preferences))
    names = ("all", "refilled", "sft", "distil", "taught", "preferences")
    runs = (config.output, *(tmp_path / name for name in names))
    elsewhere = (
        ON_A_GPU | OF_ROLLOUTERS | OF_VLLM | OF_EXPERTS | OF_EPISODES | OF_RANKS | OF_CALIBRATION
    )
    assert elsewhere.union(*map(written, runs)) == set(METRICS)


def test_the_page_is_written_from_the_table() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert with_tables(page) == page, "make schema"
    for metric in METRICS.values():
        assert metric.unit and metric.help, metric.name
        assert "|" not in f"{metric.unit}{metric.help}{metric.healthy}", metric.name
