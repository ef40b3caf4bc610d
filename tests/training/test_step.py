"""One step over graded groups: parts, epochs, old log-probabilities, exclusions and counts.

Whether an update has anything to learn from.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from isobit.algorithms.objective import Columns, LossOutputs, Shares
from isobit.algorithms.registry import build_algorithm
from isobit.config.algorithm import GrpoConfig, PpoConfig
from isobit.config.precision import Preset
from isobit.models.policy import Policy
from isobit.records.batch import PackedBatch, TokenScores
from isobit.records.sequence import TokenSequence
from isobit.records.text import Completion, Group
from isobit.training.comparison import Comparison
from isobit.training.step import cut_by_prompt, has_signal, train_on_groups
from isobit.training.trainer import Trainer
from isobit.util.errors import ConfigError

GRPO = build_algorithm(GrpoConfig())
MakeTrainer = Callable[..., Trainer]
MakeGroups = Callable[..., list[Group]]
Snapshot = Callable[[Policy], dict[str, torch.Tensor]]


class Recorder:
    """GRPO that keeps the old log-probabilities it was given."""

    def __init__(self) -> None:
        self.old: list[torch.Tensor] = []

    needs_values = False
    needs_greedy = False

    def credit(self, groups: Sequence[Group]) -> list[list[Columns | None]]:
        return GRPO.credit(groups)

    def shares(self, batches: Sequence[PackedBatch]) -> list[Shares]:
        return GRPO.shares(batches)

    def loss(self, scores: TokenScores, batch: PackedBatch, shares: Shares) -> LossOutputs:
        self.old.append(batch.old_log_probs)
        return GRPO.loss(scores, batch, shares)


def with_log_probs(completion: Completion, log_probs: Sequence[float]) -> Completion:
    sequence = completion.sequence
    return replace(completion, sequence=replace(sequence, log_probs=sequence.spread(log_probs)))


def shifted(groups: list[Group], difference: float) -> list[Group]:
    """The groups with other recorded log-probabilities than the trainer's."""
    return [
        replace(
            group,
            completions=[
                with_log_probs(c, [x + difference for x in c.log_probs]) for c in group.completions
            ],
        )
        for group in groups
    ]


def response_tokens(groups: Sequence[Group]) -> int:
    return sum(len(completion.token_ids) for group in groups for completion in group.completions)


@given(st.integers(1, 50), st.integers(1, 50))
def test_cut_by_prompt(num_groups: int, num_parts: int) -> None:
    parts = cut_by_prompt(num_groups, num_parts)
    assert [index for part in parts for index in part] == list(range(num_groups))
    assert len(parts) == num_parts
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_one_update_for_each_part_and_epoch(
    make_trainer: MakeTrainer, make_groups: MakeGroups
) -> None:
    trainer = make_trainer(updates_per_batch=2, epochs=3)
    groups = make_groups(trainer, num_groups=5)
    metrics = train_on_groups(trainer, groups, GRPO, exact=True)
    sizes = [response_tokens(groups[:2]), response_tokens(groups[2:])]
    assert [update.tokens for update in metrics.updates] == sizes * 3
    assert trainer.policy.version == 7
    assert (metrics.samples, metrics.metrics["updates/skipped"]) == (20, 0)


def test_only_the_first_update_is_on_policy(
    make_trainer: MakeTrainer, make_groups: MakeGroups
) -> None:
    trainer = make_trainer("fp8", updates_per_batch=2, learning_rate=0.01)
    first, second = train_on_groups(trainer, make_groups(trainer), GRPO, exact=True).updates
    assert first.metrics["ratio/max"] == first.metrics["ratio/mean"] == 1.0
    assert second.metrics["ratio/max"] > 1.001


def test_an_exact_flow_uses_the_recorded_log_probabilities_and_compares_the_first_part(
    make_trainer: MakeTrainer, make_groups: MakeGroups
) -> None:
    trainer = make_trainer("fp8", updates_per_batch=2, epochs=2)
    groups = make_groups(trainer)
    assert train_on_groups(trainer, groups, GRPO, exact=True).comparison == Comparison(
        response_tokens(groups[:2]), 0, 0.0
    )
    planted = shifted(make_groups(trainer, seed=1), 0.5)
    recorder = Recorder()
    metrics = train_on_groups(trainer, planted, recorder, exact=True)
    recorded = sorted(
        x for group in planted for completion in group.completions for x in completion.log_probs
    )
    assert sorted(torch.cat(recorder.old).tolist()) == pytest.approx(sorted(recorded * 2))
    tokens = response_tokens(planted[:2])
    assert (metrics.comparison.tokens_compared, metrics.comparison.tokens_differing) == (
        tokens,
        tokens,
    )
    assert metrics.comparison.max_abs_diff == pytest.approx(0.5, rel=1e-4)


@pytest.mark.few(2)
@pytest.mark.parametrize("preset", ["fp32", "bf16", "fp8-rollout", "fp8", "int8"])
def test_shared_prompts_change_no_log_probability_and_repeat(
    preset: Preset, make_trainer: MakeTrainer, make_groups: MakeGroups, snapshot: Snapshot
) -> None:
    """In several micro-batches, with old log-probabilities recorded and recomputed."""
    exact, left = preset != "fp8-rollout", list[dict[str, torch.Tensor]]()
    old = list[list[float]]()
    for shared in (False, True, True):
        trainer = make_trainer(preset, shared_prefix=shared, tokens_per_microbatch=80)
        groups, recorder = make_groups(trainer, samples=6), Recorder()
        metrics = train_on_groups(trainer, groups, recorder, exact=exact)
        assert metrics.comparison.tokens_compared == response_tokens(groups)
        assert metrics.comparison.tokens_differing == 0 < len(recorder.old)
        assert metrics.metrics["ratio/mean"] == metrics.metrics["ratio/max"] == 1.0
        old.append(sorted(torch.cat(recorder.old).tolist()))
        left.append(snapshot(trainer.policy))
    plain, first, again = left
    assert old[0] == old[1] == old[2]
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert any(not torch.equal(first[name], plain[name]) for name in first), "rows are shared"


def test_an_inexact_flow_recomputes_them_before_the_first_update(
    make_trainer: MakeTrainer, make_groups: MakeGroups
) -> None:
    trainer = make_trainer("fp8-rollout", updates_per_batch=2)
    groups = make_groups(
        trainer
    )  # recorded by the trainer itself, so these are the values to be recomputed
    recorder = Recorder()
    metrics = train_on_groups(trainer, shifted(groups, 0.5), recorder, exact=False)
    expected = sorted(
        x for group in groups for completion in group.completions for x in completion.log_probs
    )
    assert sorted(torch.cat(recorder.old).tolist()) == expected
    assert metrics.updates[0].metrics["ratio/max"] == 1.0
    tokens = response_tokens(groups)
    assert (metrics.comparison.tokens_compared, metrics.comparison.tokens_differing) == (
        tokens,
        tokens,
    )


def test_samples_without_a_reward_are_left_out(
    make_trainer: MakeTrainer, make_groups: MakeGroups
) -> None:
    trainer = make_trainer()
    groups = make_groups(trainer, num_groups=3)
    groups[0].rewards[2] = None
    groups[1].rewards[:] = [None, None, None, 1.0]
    metrics = train_on_groups(trainer, groups, GRPO, exact=True)
    assert (metrics.samples, metrics.excluded_samples) == (3 + 4, 1 + 4)
    left_out = len(groups[0].completions[2].token_ids) + response_tokens(groups[1:2])
    assert metrics.updates[0].tokens == response_tokens(groups) - left_out


def test_a_step_without_a_trainable_sample_makes_no_update(
    make_trainer: MakeTrainer, make_groups: MakeGroups, snapshot: Snapshot
) -> None:
    trainer = make_trainer()
    groups = make_groups(trainer, num_groups=2)
    for group in groups:
        group.rewards = [None] * 4
    before = snapshot(trainer.policy)
    metrics = train_on_groups(trainer, groups, GRPO, exact=True)
    assert metrics.updates == ()
    assert metrics.excluded_samples == 8
    assert "loss" not in metrics.metrics and metrics.metrics["updates/taken"] == 0
    assert all(torch.equal(before[name], master) for name, master in trainer.policy.masters.items())


def level(groups: list[Group]) -> list[Group]:
    """All rewards of each group equal, so that nothing is learnt from them."""
    for group in groups:
        group.rewards = [0.1] * len(group.rewards)
    return groups


def learnt(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Copies of masters and moments."""
    found = dict(trainer.policy.masters) | trainer.moments()
    return {name: one.detach().clone() for name, one in found.items()}


def test_an_update_of_level_groups_is_left_out_whatever_momentum_there_is(
    make_trainer: MakeTrainer, make_groups: MakeGroups
) -> None:
    trainer = make_trainer()
    train_on_groups(trainer, make_groups(trainer), GRPO, exact=True)
    before = learnt(trainer)
    metrics = train_on_groups(trainer, level(make_groups(trainer, 2)), GRPO, exact=True)
    assert (metrics.updates, metrics.tokens, metrics.has_signal) == ((), 0, False)
    assert metrics.metrics["updates/without_signal"] == 1
    assert metrics.metrics["reward/level_groups"] == 2
    assert trainer.updates == 2, "the schedule goes on"
    after = learnt(trainer)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_an_update_of_level_groups_moves_weights_by_momentum_where_it_is_taken(
    make_trainer: MakeTrainer, make_groups: MakeGroups
) -> None:
    trainer = make_trainer(without_signal="take")
    train_on_groups(trainer, make_groups(trainer), GRPO, exact=True)
    before = learnt(trainer)
    metrics = train_on_groups(trainer, level(make_groups(trainer, 2)), GRPO, exact=True)
    assert metrics.updates[0].metrics["grad_norm"] == 0.0
    assert (metrics.metrics["updates/without_signal"], metrics.has_signal) == (1, False)
    after = learnt(trainer)
    assert not all(torch.equal(before[name], after[name]) for name in before)


def test_the_part_without_a_signal_alone_is_left_out(
    make_trainer: MakeTrainer, make_groups: MakeGroups
) -> None:
    trainer = make_trainer(updates_per_batch=2, epochs=2)
    groups = make_groups(trainer)
    level(groups[:2])
    metrics = train_on_groups(trainer, groups, GRPO, exact=True)
    assert (
        len(metrics.updates),
        metrics.metrics["updates/without_signal"],
        metrics.has_signal,
    ) == (2, 2, True)
    assert trainer.updates == 4
    assert metrics.comparison.tokens_compared == response_tokens(groups[2:])
    assert metrics.comparison.tokens_differing == 0, "no weight had changed before it"
    assert metrics.tokens == 2 * sum(
        one.sequence.length for group in groups[2:] for one in group.completions
    )


def test_what_learns_without_advantages_is_learnt(
    make_trainer: MakeTrainer, make_groups: MakeGroups
) -> None:
    """An entropy bonus has a gradient where all advantages are 0."""
    trainer = make_trainer()
    algorithm = build_algorithm(GrpoConfig(entropy_coefficient=0.1))
    metrics = train_on_groups(trainer, level(make_groups(trainer, 2)), algorithm, exact=True)
    assert metrics.has_signal and metrics.updates[0].metrics["grad_norm"] > 0.0


def test_skipped_updates_are_counted_with_their_reason(
    make_trainer: MakeTrainer, make_groups: MakeGroups
) -> None:
    trainer = make_trainer(updates_per_batch=2)
    groups = make_groups(trainer)
    first = groups[3].completions[0]
    groups[3].completions[0] = with_log_probs(first, [-1e4] * len(first.token_ids))
    metrics = train_on_groups(trainer, groups, GRPO, exact=True)
    assert metrics.metrics["updates/skipped"] == 1
    assert metrics.skip_reasons == ("the loss is inf",)
    assert metrics.metrics["loss"] == metrics.updates[0].metrics["loss"]


def test_more_parts_than_prompts_is_refused(
    make_trainer: MakeTrainer, make_groups: MakeGroups
) -> None:
    trainer = make_trainer(updates_per_batch=3)
    with pytest.raises(ConfigError, match=r"updates_per_batch is 3, but a step has 2 prompts"):
        train_on_groups(trainer, make_groups(trainer, num_groups=2), GRPO, exact=True)


def test_scalars_join_the_updates(make_trainer: MakeTrainer, make_groups: MakeGroups) -> None:
    trainer = make_trainer(epochs=2, learning_rate=0.01)
    metrics = train_on_groups(trainer, make_groups(trainer), GRPO, exact=True)
    scalars = metrics.metrics
    first, second = metrics.updates
    assert scalars["grad_norm"] == pytest.approx(
        (first.metrics["grad_norm"] + second.metrics["grad_norm"]) / 2
    )
    assert (
        scalars["ratio/max"] == max(first.metrics["ratio/max"], second.metrics["ratio/max"]) > 1.0
    )
    assert {
        "loss",
        "entropy",
        "learning_rate",
        "clip_fraction/low",
        "clip_fraction/high",
    } <= scalars.keys()


ONE = TokenSequence.of_answer((1,), (2, 3))


@pytest.mark.parametrize(
    ("config", "learns"),
    [
        (GrpoConfig(), False),
        (GrpoConfig(kl_coefficient=0.1), True),
        (GrpoConfig(kl_coefficient=0.1, kl_in="reward"), False),
        (GrpoConfig(entropy_coefficient=0.1), True),
        (PpoConfig(), True),
    ],
)
def test_terms_beside_the_advantages_are_learnt_from(
    config: GrpoConfig | PpoConfig, learns: bool
) -> None:
    assert has_signal([ONE.with_columns(advantages=0.0)], build_algorithm(config)) == learns


def test_one_token_with_an_advantage_is_a_signal_unless_a_correction_rejects_it() -> None:
    one = ONE.with_columns(advantages=(1.0, 0.0))
    assert has_signal([ONE, one], GRPO)
    assert not has_signal([replace(one, importance=one.spread((0.0, 1.0)))], GRPO)
    assert has_signal([replace(one, importance=one.spread((0.5, 0.0)))], GRPO)


def test_nothing_has_no_signal() -> None:
    assert not has_signal([], build_algorithm(PpoConfig()))


def test_an_algorithm_that_does_not_say_what_its_loss_has_is_taken_to_learn() -> None:
    assert has_signal([ONE], cast(Any, object()))
