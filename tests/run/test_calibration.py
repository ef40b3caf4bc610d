"""A calibrated clip through the command's own function: its figures, its plan, its checkpoints."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from isobit.algorithms.registry import build_algorithm
from isobit.config.run import RunConfig
from isobit.kernels.spec import sizes
from isobit.models.folder import load_policy, read_config
from isobit.run.calibration import build_calibration, describe_shadow
from isobit.run.plan import plan_training
from isobit.run.rl.loop import train
from isobit.run.rl.setup import read_rl
from isobit.training.calibration import shadow_of
from isobit.training.trainer import Trainer

MakeConfig = Callable[..., RunConfig]
WriteReward = Callable[[str], str]
CALIBRATED: dict[str, Any] = {
    "algorithm": {"clip_low": 0.001, "clip_high": 0.001, "calibrate_every": 2},
    "training": {"updates_per_batch": 2, "prompts_per_step": 4, "samples_per_prompt": 6},
}
BOUNDS = ("clip/low", "clip/high")


def steps(output: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (output / "metrics.jsonl").open(encoding="utf-8")]
    return [line for line in lines if "reward/mean" in line]


def test_bounds_are_figures_of_every_step_where_they_are_calibrated(
    make_config: MakeConfig, write_reward: WriteReward
) -> None:
    reward = write_reward("return float(completion.token_ids[0] % 2)")
    train(make_config(reward, **CALIBRATED))
    first, second = steps(make_config().output)
    assert [first[name] for name in BOUNDS] == [0.001, 0.001]
    assert [second[name] for name in BOUNDS] != [0.001, 0.001]


def test_without_it_there_is_neither_figure_nor_shadow(make_config: MakeConfig) -> None:
    config = make_config()
    train(config)
    assert not any(name in line for line in steps(config.output) for name in BOUNDS)
    policy = load_policy(Path(config.model), config.precision)
    trainer = Trainer(policy, config.training, 2)
    assert describe_shadow(config, policy.config) is None
    assert build_calibration(config, build_algorithm(config.algorithm), trainer) is None


def test_the_plan_knows_the_shadow_to_the_byte(make_config: MakeConfig) -> None:
    config = make_config(**CALIBRATED)
    planned = describe_shadow(config, read_config(Path(config.model)))
    assert planned is not None and (planned.name, planned.table) == ("BF16 shadow", "algorithm")
    shadow = shadow_of(load_policy(Path(config.model), config.precision))
    assert planned.weight_bytes(sizes) == shadow.num_bytes
    assert any("BF16 shadow" in line for line in plan_training(config, read_rl).describe(None))
