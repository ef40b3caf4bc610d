"""A calibrated clip through the command's own function: its figures, its plan, its checkpoints.

Bounds of the clip from a BF16 shadow: when they are taken, from what, and who learns by them.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from isobit.algorithms.family import Grpo
from isobit.algorithms.objective import Shares
from isobit.algorithms.policy_gradient import ClipBounds, Terms
from isobit.algorithms.registry import build_algorithm
from isobit.commands.dry_run import plan_training
from isobit.config.algorithm import GrpoConfig, StepConfig
from isobit.config.precision import PrecisionConfig
from isobit.config.recipes import RunConfig
from isobit.kernels.spec import sizes
from isobit.models.folder import load_policy, read_config
from isobit.models.policy import Policy, random_policy
from isobit.records.batch import PackedBatch, TokenScores
from isobit.records.sequence import TokenSequence
from isobit.records.text import Group
from isobit.run.loop import train
from isobit.run.rl_run import read_rl
from isobit.training import calibration as module
from isobit.training.advantage_estimator import AdvantageEstimator
from isobit.training.calibration import (
    Calibration,
    build_calibration,
    calibrated_bounds,
    describe_shadow,
    shadow_of,
)
from isobit.training.step import Learner, StepMetrics
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


MakeTrainer = Callable[..., Trainer]
MakeGroups = Callable[..., list[Group]]
Snapshot = Callable[[Policy], dict[str, torch.Tensor]]
CONFIGURED = ClipBounds(0.02, 0.03)
CONFIG = GrpoConfig(clip_low=0.02, clip_high=0.03, calibrate_every=2)
Seen = tuple[ClipBounds, torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Watched(Grpo):
    """GRPO that keeps, for each micro-batch, its bounds, the log-ratios and the advantages."""

    seen: list[Seen] = field(default_factory=list)

    def surrogate(self, scores: TokenScores, batch: PackedBatch, shares: Shares) -> Terms:
        bounds = ClipBounds(self.config.clip_low, self.config.clip_high)
        ratio = scores.log_probs.detach().double() - batch.old_log_probs.double()
        self.seen.append((bounds, ratio, batch.advantages.double()))
        return Grpo.surrogate(self, scores, batch, shares)


def learner_of(trainer: Trainer, algorithm: Watched, calibrated: bool = True) -> Learner:
    judge = AdvantageEstimator(trainer, algorithm, StepConfig(), exact=True, max_new_tokens=0)
    return Learner(judge, None, Calibration(trainer, algorithm) if calibrated else None)


def pairs(log_ratios: torch.Tensor, advantages: torch.Tensor) -> list[tuple[float, float]]:
    return sorted(zip(log_ratios.tolist(), advantages.float().tolist(), strict=True))


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Every call of ``calibrated_bounds``, with what it gave."""
    calls: list[tuple[Any, ...]] = []

    def watched(*arguments: Any) -> ClipBounds:
        calls.append((*arguments, calibrated_bounds(*arguments)))
        return calls[-1][-1]

    monkeypatch.setattr(module, "calibrated_bounds", watched)
    return calls


def clip_of(step: StepMetrics) -> ClipBounds | None:
    """The bounds that a step reports."""
    low, high = (step.metrics.get(f"clip/{side}") for side in ("low", "high"))
    return None if low is None or high is None else ClipBounds(low, high)


def test_a_shadow_that_is_the_policy_changes_no_bit(
    make_trainer: MakeTrainer,
    make_groups: MakeGroups,
    snapshot: Snapshot,
    asked: list[tuple[Any, ...]],
) -> None:
    """In BF16, whose trainer is its own shadow."""
    outcomes = []
    for calibrated in (True, False):
        trainer = make_trainer("bf16", updates_per_batch=2, epochs=2, learning_rate=0.01)
        learner = learner_of(trainer, Watched(CONFIG), calibrated)
        metrics = [learner.learn(make_groups(trainer, seed=step), step) for step in (1, 2)]
        outcomes.append(snapshot(trainer.policy))
        assert [clip_of(one) for one in metrics] == [CONFIGURED if calibrated else None] * 2
    (log_ratios, shadow, _, _, given) = asked[0]
    assert len(asked) == 1 and torch.equal(log_ratios, shadow) and log_ratios.any()
    assert given == CONFIGURED
    assert all(torch.equal(outcomes[0][name], outcomes[1][name]) for name in outcomes[0])


def test_the_bounds_are_those_of_the_last_updates_ratios_and_learn_from_it_on(
    make_trainer: MakeTrainer,
    make_groups: MakeGroups,
    asked: list[tuple[Any, ...]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    planted = iter((0.0, 0.5))

    def by_shadow(_: Calibration, sequences: list[TokenSequence]) -> torch.Tensor:
        """0 for every token at first; then half of them have fallen below any bound."""
        tokens = sum(sequence.response_length for sequence in sequences)
        return -next(planted) * (torch.arange(tokens) % 2).double()

    monkeypatch.setattr(Calibration, "_by_shadow", by_shadow)
    trainer = make_trainer("fp8", updates_per_batch=2, learning_rate=0.01)
    algorithm = Watched(CONFIG)
    learner = learner_of(trainer, algorithm)
    learner.learn(make_groups(trainer, seed=1), 1)
    assert not asked and {bounds for bounds, _, _ in algorithm.seen} == {CONFIGURED}
    algorithm.seen.clear()

    groups = make_groups(trainer, seed=2)
    metrics = learner.learn(groups, 2)
    ((log_ratios, shadow, advantages, configured, given),) = asked
    assert shadow.tolist() == [0.0, -0.5] * (len(shadow) // 2) + [0.0] * (len(shadow) % 2)
    assert configured == CONFIGURED != given == clip_of(metrics)
    last = [one for one in algorithm.seen if one[0] == given]
    assert [bounds for bounds, _, _ in algorithm.seen] == [
        *[CONFIGURED] * (len(algorithm.seen) - len(last)),
        *[given] * len(last),
    ]
    ratios = torch.cat([ratio for _, ratio, _ in last])
    weights = torch.cat([weight for _, _, weight in last])
    assert len(ratios) == metrics.updates[-1].tokens, "the last update, and it alone"
    assert pairs(log_ratios, advantages) == pairs(ratios, weights)

    algorithm.seen.clear()
    assert clip_of(learner.learn(make_groups(trainer, seed=3), 3)) == given
    assert {bounds for bounds, _, _ in algorithm.seen} == {given}


def test_a_real_shadow_of_fp8_moves_the_bounds(
    make_trainer: MakeTrainer, make_groups: MakeGroups, asked: list[tuple[Any, ...]]
) -> None:
    trainer = make_trainer("fp8", updates_per_batch=2, learning_rate=0.01)
    learner = learner_of(trainer, Watched(CONFIG))
    learner.learn(make_groups(trainer), 2)
    ((log_ratios, shadow, _, _, given),) = asked
    noise = (log_ratios - shadow).std()
    assert 0 < noise < log_ratios.std(), "the same policies, in other formats"
    assert given != CONFIGURED


def test_the_shadow_is_the_masters_in_bf16(make_policy: Callable[..., Policy]) -> None:
    assert shadow_of(make_policy("fp8")).is_equal_to(make_policy("bf16"))
    assert not shadow_of(make_policy("fp8")).is_equal_to(make_policy("bf16", seed=1))


def test_a_value_head_has_no_shadow(make_policy: Callable[..., Policy]) -> None:
    config = replace(make_policy().config, value_head=True)
    critic = random_policy(config, PrecisionConfig(preset="fp8"), 0)
    assert shadow_of(critic).is_equal_to(make_policy("bf16"))


def test_the_weights_of_corrections_count(
    make_trainer: MakeTrainer, make_groups: MakeGroups, asked: list[tuple[Any, ...]]
) -> None:
    trainer = make_trainer("fp8")
    calibration = Calibration(trainer, Grpo(CONFIG))
    (group, *_) = make_groups(trainer)
    sequence = group.completions[0].sequence.with_columns(advantages=-1.0)
    sequence = replace(sequence, importance=np.float32(0.5) * sequence.loss_mask)
    begun = calibration.begin(2, [sequence])
    assert begun is not None
    trainer.policy.publish()
    calibration.finish(begun)
    assert set(asked[0][2].tolist()) == {-0.5}


def test_nothing_is_calibrated_by_what_is_replayed_or_by_weights_that_have_not_moved(
    make_trainer: MakeTrainer, make_groups: MakeGroups, asked: list[tuple[Any, ...]]
) -> None:
    trainer = make_trainer("fp8")
    calibration = Calibration(trainer, Grpo(CONFIG))
    (group, *_) = make_groups(trainer)
    sequences = [one.sequence.with_columns(advantages=-1.0) for one in group.completions]
    old = [replace(one, fresh=False) for one in sequences]
    assert calibration.begin(2, old) is None and calibration.begin(1, sequences) is None
    begun = calibration.begin(2, [*sequences, *old])
    assert begun is not None and list(begun.sequences) == sequences
    calibration.finish(begun)
    assert not asked and calibration.state() == {}


def test_its_state_goes_through_json(make_trainer: MakeTrainer) -> None:
    first, second = (Calibration(make_trainer(), Grpo(CONFIG)) for _ in range(2))
    assert first.state() == {} and first.bounds == CONFIGURED
    first._bounds = ClipBounds(0.1 + 0.2, 1 / 3)
    second.restore(json.loads(json.dumps(first.state())), {})
    assert second.bounds == first.bounds and second.algorithm.config.clip_low == 0.1 + 0.2
    second.restore({}, {})
    assert second.state() == {} and not second.tensors()
