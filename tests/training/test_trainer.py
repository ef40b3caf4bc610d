"""The trainer: micro-batches add up, steps repeat, and what is not finite changes nothing."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from isobit.algorithms.advantages import group_advantages
from isobit.algorithms.objective import LossOutputs, Shares
from isobit.algorithms.registry import build_algorithm
from isobit.config.algorithm import GrpoConfig
from isobit.config.model_shape import Family
from isobit.config.precision import PrecisionConfig
from isobit.config.training import TrainingConfig
from isobit.models.families import FAMILIES
from isobit.models.policy import Policy, random_policy
from isobit.records.batch import PackedBatch, TokenScores
from isobit.records.packing import pack, sequences_of
from isobit.records.text import Group
from isobit.training.supervised import SupervisedObjective
from isobit.training.trainer import Trainer
from isobit.util.errors import NonFiniteError
from tests.models.policies import EXPERTS, delta_nets
from tests.training.conftest import INT8_BEFORE, TINY

GRPO = build_algorithm(GrpoConfig())
MakeTrainer = Callable[..., Trainer]
MakeGroups = Callable[..., list[Group]]
GradientsOf = Callable[..., dict[str, torch.Tensor]]
Snapshot = Callable[[Policy], dict[str, torch.Tensor]]


def batches_of(groups: Sequence[Group], budget: int) -> list[PackedBatch]:
    return pack(
        sequences_of(groups, [group_advantages(group.rewards, True) for group in groups]), budget
    )


class ScaledLoss:
    """The gradients of the supervised objective times a factor, which is the loss: infinity makes a
    loss, 3e38 only gradients, that are not finite.
    """

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def shares(self, batches: Sequence[PackedBatch]) -> list[Shares]:
        return SupervisedObjective().shares(batches)

    def loss(self, scores: TokenScores, batch: PackedBatch, shares: Shares) -> LossOutputs:
        loss = SupervisedObjective().loss(scores, batch, shares).loss
        return LossOutputs((loss - loss.detach() + 1) * self.factor)


class WholeStepShares:
    """GRPO on one micro-batch with the shares it has in a step of several."""

    def __init__(self, shares: Shares) -> None:
        self._shares = shares

    def shares(self, batches: Sequence[PackedBatch]) -> list[Shares]:
        return [self._shares]

    def loss(self, scores: TokenScores, batch: PackedBatch, shares: Shares) -> LossOutputs:
        return GRPO.loss(scores, batch, shares)


@pytest.mark.few(1)
@pytest.mark.parametrize(("preset", "tolerance"), [("fp32", 1e-6), ("bf16", 2**-9)])
def test_gradients_do_not_depend_on_the_cut(
    preset: str,
    tolerance: float,
    make_trainer: MakeTrainer,
    make_groups: MakeGroups,
    gradients_of: GradientsOf,
) -> None:
    """Against a reference in which each sequence is a batch of its own and FP64 adds the gradients
    up.

    In FP32 only the order of sums differs.  In BF16 a last bit of an FP32 GEMM can tip the rounding
    of a gradient between two operators, 2^-9 of that value, and all gradients in front of it see
    that.  How many of them tip depends on the processor's GEMM: 1e-4 of a gradient on one, 2.2e-4
    on another, and 2^-9 if all did.
    """
    trainer = make_trainer(preset)
    groups = make_groups(trainer)
    singles = batches_of(groups, 1)
    parts = [
        gradients_of(trainer, [batch], WholeStepShares(shares))
        for batch, shares in zip(singles, GRPO.shares(singles), strict=True)
    ]
    for budget in (64, 128, 4096):
        gradients = gradients_of(trainer, batches_of(groups, budget), GRPO)
        assert gradients.keys() == trainer.policy.masters.keys()
        for name, gradient in gradients.items():
            reference = torch.stack([part[name].double() for part in parts]).sum(0)
            error = float((gradient - reference).norm() / reference.norm())
            assert error < tolerance, f"{name} at {budget} tokens: {error:.2e}"


@pytest.mark.few(1)
@pytest.mark.parametrize("preset", ["fp8", "fp32", "bf16", "int8", "int8-linear", INT8_BEFORE])
def test_training_twice_gives_the_same_bits(
    preset: Any, make_trainer: MakeTrainer, make_groups: MakeGroups, snapshot: Snapshot
) -> None:
    results = []
    for _ in range(2):
        trainer = make_trainer(preset)
        for step in range(2):
            trainer.update(batches_of(make_groups(trainer, seed=step), 128), GRPO)
        results.append(snapshot(trainer.policy))
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])


def test_another_cut_rounds_otherwise_where_wgrad_is_in_int8(
    make_trainer: MakeTrainer, make_groups: MakeGroups, gradients_of: GradientsOf
) -> None:
    """By no more than the rounding itself: a scale covers the tokens of one micro-batch."""
    trainer = make_trainer("int8")
    groups = make_groups(trainer)
    found = [gradients_of(trainer, batches_of(groups, budget), GRPO) for budget in (64, 64, 128)]
    matrices = [name for name in found[0] if name.endswith("_proj.weight")]
    for name in matrices:
        once, again, other = (gradients[name].double() for gradients in found)
        assert torch.equal(once, again), name
        error = float((other - once).norm() / once.norm())
        assert 1e-3 < error < 0.05, f"{name}: {error:.2e}"


@pytest.mark.exhaustive
@pytest.mark.parametrize("moments", ["fp8", "fp32", "bf16"])
def test_going_on_from_what_was_stored_gives_the_same_bits(
    moments: str, make_trainer: MakeTrainer, make_groups: MakeGroups, snapshot: Snapshot
) -> None:
    straight, stopped = (make_trainer(moments=moments) for _ in range(2))
    groups = [make_groups(straight, seed=step) for step in range(4)]

    def train(trainer: Trainer, steps: range) -> None:
        for step in steps:
            trainer.update(batches_of(groups[step], 128), GRPO)

    train(straight, range(4))
    train(stopped, range(2))
    resumed = make_trainer(moments=moments)
    resumed.policy.restore(snapshot(stopped.policy), stopped.policy.version)
    resumed.restore(
        stopped.counters(), {name: tensor.clone() for name, tensor in stopped.moments().items()}
    )
    train(resumed, range(2, 4))
    assert all(
        torch.equal(master, resumed.policy.masters[name])
        for name, master in straight.policy.masters.items()
    )
    assert all(
        torch.equal(value, resumed.moments()[name]) for name, value in straight.moments().items()
    )
    kinds = {
        name.rpartition(".")[2]: str(tensor.dtype).removeprefix("torch.")
        for name, tensor in resumed.moments().items()
    }
    expected = {
        "fp32": {"exp_avg": "float32", "exp_avg_sq": "float32"},
        "bf16": {"exp_avg": "bfloat16", "exp_avg_sq": "bfloat16"},
        "fp8": {
            "exp_avg": "float8_e4m3fn",
            "exp_avg_sq": "uint8",
            "exp_avg_scale": "uint8",
            "exp_avg_sq_scale": "uint8",
        },
    }
    assert kinds == {"step": "float32", **expected[moments]}


@pytest.mark.few(1)
@pytest.mark.parametrize("family", sorted(FAMILIES, key=lambda name: name != "qwen3_5_text"))
def test_an_update_moves_every_master_and_publishes(
    family: Family, make_groups: MakeGroups, snapshot: Snapshot
) -> None:
    own = {"experts": EXPERTS.get(family)} | delta_nets(family, 2)
    config = replace(TINY, family=family, num_layers=2, **own)
    policy = random_policy(config, PrecisionConfig(preset="fp32"), seed=0)
    settings = TrainingConfig(tokens_per_microbatch=128, learning_rate=1e-3)
    trainer = Trainer(policy, settings, total_updates=10)
    before, version = snapshot(trainer.policy), trainer.policy.version
    batches = batches_of(make_groups(trainer), 128)
    log_probs = trainer.scorer.score(batches[0]).log_probs
    metrics = trainer.update(batches, GRPO)
    assert metrics.skipped is None
    assert metrics.metrics["grad_norm"] > 0
    assert trainer.policy.version == version + 1
    assert all(
        not torch.equal(before[name], master) for name, master in trainer.policy.masters.items()
    )
    assert not torch.equal(trainer.scorer.score(batches[0]).log_probs, log_probs), (
        "the published weights are still the old ones"
    )
    assert all(master.grad is None for master in trainer.policy.masters.values())


def test_metrics_of_an_update(make_trainer: MakeTrainer, make_groups: MakeGroups) -> None:
    trainer = make_trainer(warmup_updates=1)
    batches = batches_of(make_groups(trainer), 64)
    metrics = trainer.update(batches, GRPO)
    tokens = sum(batch.targets.numel() for batch in batches)
    advantages = torch.cat([batch.advantages for batch in batches])
    assert len(batches) > 1
    assert metrics.tokens == tokens
    assert metrics.metrics["learning_rate"] == pytest.approx(5e-4)
    assert metrics.metrics["loss"] == pytest.approx(-float(advantages.mean()), rel=1e-4), (
        "on-policy every ratio is 1"
    )
    assert metrics.metrics["ratio/mean"] == metrics.metrics["ratio/max"] == 1.0
    assert metrics.metrics["entropy"] == pytest.approx(math.log(128), rel=0.02), (
        "a random model is almost uniform"
    )


def test_the_first_forward_is_compared_with_what_was_recorded(
    make_trainer: MakeTrainer, make_groups: MakeGroups
) -> None:
    trainer = make_trainer("fp8")
    batches = batches_of(make_groups(trainer), 64)
    tokens = sum(batch.targets.numel() for batch in batches)
    batches[0].recorded_log_probs[2] += 0.25
    comparison = trainer.update(batches, GRPO, compare=True).comparison
    assert (comparison.tokens_compared, comparison.tokens_differing) == (tokens, 1)
    assert comparison.max_abs_diff == pytest.approx(0.25, rel=1e-4)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("factor", "reason"),
    [(math.inf, "the loss is inf"), (math.nan, "the loss is nan"), (3e38, "the gradient ")],
)
@pytest.mark.parametrize("preset", ["fp32", "int8"])
def test_a_step_that_is_not_finite_changes_nothing(
    preset: Any,
    factor: float,
    reason: str,
    make_trainer: MakeTrainer,
    make_groups: MakeGroups,
    snapshot: Snapshot,
) -> None:
    trainer, twin = (make_trainer(preset, max_skipped_updates=9) for _ in range(2))
    batches = batches_of(make_groups(trainer), 64)
    trainer.update(batches, GRPO)
    twin.update(batches, GRPO)
    before, version = snapshot(trainer.policy), trainer.policy.version
    metrics = trainer.update(batches, ScaledLoss(factor))
    assert metrics.skipped is not None
    assert metrics.skipped.startswith(reason)
    assert trainer.policy.version == version
    assert all(torch.equal(before[name], master) for name, master in trainer.policy.masters.items())
    trainer.update(batches, GRPO)
    twin.update(batches, GRPO)
    assert all(
        torch.equal(twin.policy.masters[name], master)
        for name, master in trainer.policy.masters.items()
    ), "Adam's state changed"


def test_a_gradient_that_is_not_finite_in_one_master_skips_the_step(
    make_trainer: MakeTrainer, make_groups: MakeGroups, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make_trainer()
    name = "layers.0.down_proj.weight"
    done = trainer.policy.gradient.done

    def with_nan(group: int) -> None:
        if name in trainer.policy.decoder.backward_groups()[group]:
            trainer.policy.gradient(name).index_fill_(0, torch.tensor([3]), math.nan)
        done(group)

    monkeypatch.setattr(trainer.policy.gradient, "done", with_nan)
    metrics = trainer.update(batches_of(make_groups(trainer), 64), GRPO)
    assert metrics.skipped == f"the gradient of {name} is not finite"


@pytest.mark.few(1)
@pytest.mark.parametrize(("norm", "skipped"), [(3e38, None), (1e39, "the gradient norm is 1e+39")])
def test_a_norm_that_only_fp64_holds_skips_the_step(
    norm: float,
    skipped: str | None,
    make_trainer: MakeTrainer,
    make_groups: MakeGroups,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The GPU's norm is FP64; clipped by it in FP32 the gradients would be zeros, and the step one
    without a gradient.
    """
    trainer = make_trainer()
    monkeypatch.setattr("isobit.training.trainer.gradient_norm", lambda *_: norm)
    metrics = trainer.update(batches_of(make_groups(trainer), 64), GRPO)
    assert metrics.skipped == skipped
    assert bool(trainer.moments()) == (skipped is None), (
        "Adam's state is that of a step that was taken"
    )


def test_too_many_skipped_updates_in_a_row_stop_the_training(
    make_trainer: MakeTrainer, make_groups: MakeGroups
) -> None:
    trainer = make_trainer(max_skipped_updates=2)
    batches = batches_of(make_groups(trainer), 128)
    trainer.update(batches, ScaledLoss(math.inf))
    trainer.update(batches, GRPO)
    trainer.update(batches, ScaledLoss(math.inf))
    with pytest.raises(
        NonFiniteError,
        match=(
            r"2 updates in a row were skipped, the last because the loss is inf; "
            r".*max_skipped_updates is 2"
        ),
    ):
        trainer.update(batches, ScaledLoss(math.inf))


def test_a_master_that_is_not_finite_is_an_error(
    make_trainer: MakeTrainer, make_groups: MakeGroups
) -> None:
    trainer = make_trainer("fp8")
    batches = batches_of(make_groups(trainer), 128)
    with torch.no_grad():
        trainer.policy.masters["layers.0.o_proj.weight"][0, 0] = math.nan
    trainer.policy.publish()
    with pytest.raises(NonFiniteError):
        trainer.update(batches, GRPO)
    assert all(master.grad is None for master in trainer.policy.masters.values())


def test_the_ratio_is_taken_to_the_old_log_probabilities(
    make_trainer: MakeTrainer, make_groups: MakeGroups
) -> None:
    trainer = make_trainer()
    batches = batches_of(make_groups(trainer), 4096)
    shifted = [
        replace(batch, recorded_log_probs=batch.recorded_log_probs - 1.0) for batch in batches
    ]
    assert trainer.update(shifted, GRPO).metrics["ratio/max"] == 1.0
