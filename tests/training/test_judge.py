"""What a step makes of its completions before it learns: every column, for every setting."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from isobit.algorithms.registry import build_algorithm
from isobit.config.algorithm import (
    AlgorithmConfig,
    Correction,
    GrpoConfig,
    NormaliseCorrection,
    TisCorrection,
)
from isobit.models.frozen import FrozenPolicy
from isobit.records.batch import Sample
from isobit.records.sequence import TokenSequence
from isobit.records.text import Group
from isobit.training.judge import Judge
from isobit.training.trainer import Trainer

MakeTrainer = Callable[..., Trainer]
MakeGroups = Callable[..., list[Group]]


LIMIT = 24
"""Tokens of the longest response."""


def judge_of(
    trainer: Trainer, config: AlgorithmConfig | None = None, exact: bool = True, **more: Any
) -> Judge:
    config = config or GrpoConfig()
    return Judge(trainer, build_algorithm(config, LIMIT), config, exact, LIMIT, **more)


def flat(judge: Judge, groups: list[Group]) -> list[Sample]:
    return [sample for group in judge.samples_of(groups) for sample in group]


def scored(judge: Judge, groups: list[Group]) -> list[TokenSequence]:
    return [sample.sequence for sample in judge.score(flat(judge, groups))]


def test_in_an_exact_flow_nothing_is_computed(
    make_trainer: MakeTrainer, make_groups: MakeGroups
) -> None:
    trainer = make_trainer("fp8")
    groups = make_groups(trainer)
    samples = flat(judge_of(trainer), groups)
    assert judge_of(trainer).score(samples) == samples


@pytest.mark.parametrize(
    ("exact", "asked", "recomputes"),
    [
        (True, "auto", False),
        (False, "auto", True),
        (True, "recomputed", True),
        (False, "recorded", False),
    ],
)
def test_old_log_probs_are_whose_they_are_asked_to_be(
    exact: bool,
    asked: str,
    recomputes: bool,
    make_trainer: MakeTrainer,
    make_groups: MakeGroups,
) -> None:
    trainer = make_trainer("fp8")
    found = scored(judge_of(trainer, exact=exact, old_log_probs=asked), make_groups(trainer))
    assert all((one.old_log_probs is not None) == recomputes for one in found)
    old = [one.old_log_probs for one in found]
    recorded = [one.log_probs for one in found]
    assert all(a is None or np.array_equal(a, b) for a, b in zip(old, recorded, strict=True))


def test_what_the_limit_cut_is_kept_masked_or_excluded(
    make_trainer: MakeTrainer, make_groups: MakeGroups
) -> None:
    trainer = make_trainer()
    (group,) = make_groups(trainer, num_groups=1)
    group.completions[1] = replace(group.completions[1], finish_reason="length")
    group.rewards = [0.0, 1.0, 1.0, 0.0]
    found = {}
    for truncated in ("keep", "mask", "exclude"):
        judge = judge_of(trainer, GrpoConfig(truncated=truncated, normalise_by_std=False))
        (samples,) = judge.samples_of([group])
        ((credits,), _) = judge.credit([samples], [None], [])
        learnt = [judge.learnt_from(*pair) for pair in zip(samples, credits, strict=True)]
        found[truncated] = [
            None if one is None else float(one.advantages.sum()) / one.response_length
            for one in learnt
        ]
    assert found["keep"] == [-0.5, 0.5, 0.5, -0.5]
    assert found["mask"] == [-0.5, None, 0.5, -0.5]
    assert found["exclude"][1] is None
    assert [one for one in found["exclude"] if one is not None] == pytest.approx(
        [-1 / 3, 2 / 3, -1 / 3]
    )


def test_long_completions_are_punished(make_trainer: MakeTrainer, make_groups: MakeGroups) -> None:
    judge = judge_of(make_trainer(), GrpoConfig(overlong_buffer=8, overlong_penalty=0.5))
    groups = make_groups(judge.trainer)
    found = [
        (sample.sequence.response_length, sample.reward)
        for group in judge.samples_of(groups)
        for sample in group
    ]
    plain = [reward for group in groups for reward in group.rewards]
    for (length, reward), before in zip(found, plain, strict=True):
        assert before is not None
        assert reward == before - 0.5 * max(length - 16, 0) / 8
    assert any(length > 16 for length, _ in found)


@pytest.mark.parametrize("preset", ["fp32", "bf16", "fp8-linear", "fp8"])
def test_at_step_0_the_reference_is_the_policy_bit_for_bit(
    preset: str,
    make_trainer: MakeTrainer,
    make_groups: MakeGroups,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trainer = make_trainer(preset)
    groups = make_groups(trainer)
    reference = FrozenPolicy.of(trainer.policy)
    judge = judge_of(trainer, GrpoConfig(kl_coefficient=0.1), reference=reference)
    with monkeypatch.context() as patch:
        patch.delattr("isobit.training.judge.score_sequences")
        skipped = scored(judge, groups)
    assert [one.reference_log_probs for one in skipped] == [one.log_probs for one in skipped]
    monkeypatch.setattr(FrozenPolicy, "is_equal_to", lambda *_: False)
    assert scored(judge, groups) == skipped, "its own forward gives the same bits"


def test_once_the_policy_has_moved_the_reference_is_asked(
    make_trainer: MakeTrainer, make_groups: MakeGroups
) -> None:
    trainer = make_trainer("fp8", learning_rate=0.01)
    groups = make_groups(trainer)
    reference = FrozenPolicy.of(trainer.policy)
    judge = judge_of(trainer, GrpoConfig(kl_coefficient=0.1), reference=reference)
    before = [one.log_probs.tolist() for one in scored(judge, groups)]
    for master in trainer.policy.parameters():
        master.data.mul_(1.1)
    trainer.policy.publish()
    assert _reference(scored(judge, groups)) == before
    moved = make_groups(trainer)
    assert _reference(scored(judge, moved)) == before
    assert [one.log_probs.tolist() for one in scored(judge, moved)] != before
    reference.take(trainer.policy)
    again = scored(judge, moved)
    assert [one.reference_log_probs for one in again] == [one.log_probs for one in again]


def test_a_penalty_in_the_reward_is_the_coefficient_times_the_divergence(
    make_trainer: MakeTrainer, make_groups: MakeGroups
) -> None:
    trainer = make_trainer()
    config = GrpoConfig(
        kl_coefficient=0.5, kl_in="reward", kl_estimator="k1", normalise_by_std=False
    )
    judge = judge_of(trainer, config)
    (group,) = make_groups(trainer, num_groups=1)
    (samples,) = judge.samples_of([group])
    shifts = [0.25, 0.0, -0.5, 1.0]
    samples = [
        replace(
            sample,
            sequence=replace(
                sample.sequence,
                reference_log_probs=sample.sequence.log_probs - np.float32(shift),
            ),
        )
        for sample, shift in zip(samples, shifts, strict=True)
    ]
    ((credits,), _) = judge.credit([samples], [None], [])
    rewards = [
        sample.reward - 0.5 * shift * sample.sequence.response_length
        for sample, shift in zip(samples, shifts, strict=True)
        if sample.reward is not None
    ]
    mean = sum(rewards) / 4
    given = [credit.advantages for credit in credits if credit is not None]
    assert given == pytest.approx([reward - mean for reward in rewards], rel=1e-5)


def test_corrections_are_one_where_old_is_recorded_and_the_ratio_elsewhere(
    make_trainer: MakeTrainer, make_groups: MakeGroups
) -> None:
    corrections: tuple[Correction, ...] = (
        TisCorrection(level="token", max=1.5),
        NormaliseCorrection(),
    )
    judge = judge_of(make_trainer(), corrections=corrections)
    sequences = [s.sequence for s in flat(judge, make_groups(judge.trainer))]
    ones = judge.corrected(sequences)
    assert all(set(_importance(one)) == {1.0} for one in ones)
    assert judge_of(judge.trainer).corrected(sequences) == sequences
    plain = judge_of(judge.trainer, corrections=corrections[:1])
    shifted = [
        replace(one, old_log_probs=one.spread(one.of_response(one.log_probs) + 0.25))
        for one in sequences
    ]
    weights = [weight for one in plain.corrected(shifted) for weight in _importance(one)]
    assert weights == pytest.approx([torch.tensor(0.25).exp().item()] * len(weights), rel=1e-5)


def _reference(sequences: Sequence[TokenSequence]) -> list[list[float]]:
    columns = [one.reference_log_probs for one in sequences]
    return [column.tolist() for column in columns if column is not None]


def _importance(sequence: TokenSequence) -> list[float]:
    assert sequence.importance is not None
    return sequence.of_response(sequence.importance).tolist()


def test_a_replayed_sample_keeps_its_advantage(
    make_trainer: MakeTrainer, make_groups: MakeGroups
) -> None:
    judge = judge_of(make_trainer())
    (group,) = make_groups(judge.trainer, num_groups=1)
    (samples,) = judge.samples_of([group])
    replayed = replace(samples[0], advantage=-0.75)
    fresh, again = judge.credit([samples], [None], [replayed])
    assert again[0] is not None and again[0].advantages == -0.75
    assert fresh == judge.credit([samples], [None], [])[0]
