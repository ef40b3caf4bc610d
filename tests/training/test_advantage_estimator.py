"""What a step makes of its completions before it learns: every column, for every setting."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from isobit.algorithms.registry import build_algorithm
from isobit.config.algorithm import (
    AlgorithmConfig,
    GrpoConfig,
    PpoConfig,
    ReinforcePpBaselineConfig,
    ReMaxConfig,
    RlooConfig,
)
from isobit.config.corrections import Correction, NormaliseCorrection, TisCorrection
from isobit.config.precision import PrecisionConfig
from isobit.config.teacher import RunTeacher
from isobit.models.frozen import FrozenPolicy
from isobit.models.scorer import Scorer
from isobit.records.batch import TokenScores
from isobit.records.no_signal import REASONS_WITHOUT_SIGNAL, describe_reasons
from isobit.records.packing import pack
from isobit.records.sequence import TokenSequence
from isobit.records.text import Completion, Group
from isobit.training.advantage_estimator import (
    AdvantageEstimator,
    sequences_learnt_from,
    teacher_metrics,
)
from isobit.training.step import has_signal
from isobit.training.trainer import Trainer
from tests.sequences import answer_of, group_of
from tests.suites import examples

MakeTrainer = Callable[..., Trainer]
MakeGroups = Callable[..., list[Group]]


LIMIT = 24
"""Tokens of the longest response."""


def estimator_of(
    trainer: Trainer, config: AlgorithmConfig | None = None, exact: bool = True, **more: Any
) -> AdvantageEstimator:
    config = config or GrpoConfig()
    return AdvantageEstimator(trainer, build_algorithm(config, LIMIT), config, exact, LIMIT, **more)


def flat(groups: Sequence[Group]) -> list[TokenSequence]:
    return [one.sequence for group in groups for one in group.completions]


def scored(estimator: AdvantageEstimator, groups: list[Group]) -> list[TokenSequence]:
    return flat(estimator.score(groups))


def test_in_an_exact_flow_nothing_is_computed(
    make_trainer: MakeTrainer, make_groups: MakeGroups
) -> None:
    trainer = make_trainer("fp8")
    groups = make_groups(trainer)
    assert estimator_of(trainer).score(groups) == groups


@pytest.mark.few(2)
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
    found = scored(estimator_of(trainer, exact=exact, old_log_probs=asked), make_groups(trainer))
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
        estimator = estimator_of(trainer, GrpoConfig(truncated=truncated, normalise_by_std=False))
        (estimated,) = estimator.estimate([group], [])
        found[truncated] = estimated.advantages
        assert [len(set(_response(one, one.advantages))) for one in flat([estimated])] == [1] * 4
        columns = [_response(one, one.advantages)[0] for one in flat([estimated])]
        assert columns == pytest.approx([one or 0.0 for one in estimated.advantages], rel=1e-6)
    assert found["keep"] == [-0.5, 0.5, 0.5, -0.5]
    assert found["mask"] == [-0.5, None, 0.5, -0.5]
    assert found["exclude"][1] is None
    assert [one for one in found["exclude"] if one is not None] == pytest.approx(
        [-1 / 3, 2 / 3, -1 / 3]
    )


def test_long_completions_are_punished(make_trainer: MakeTrainer, make_groups: MakeGroups) -> None:
    estimator = estimator_of(make_trainer(), GrpoConfig(overlong_buffer=8, overlong_penalty=0.5))
    groups = make_groups(estimator.trainer)
    found = [
        (completion.length, reward)
        for group in estimator.rewarded(groups)
        for completion, reward in zip(group.completions, group.rewards, strict=True)
    ]
    plain = [reward for group in groups for reward in group.rewards]
    for (length, reward), before in zip(found, plain, strict=True):
        assert before is not None
        assert reward == before - 0.5 * max(length - 16, 0) / 8
    assert any(length > 16 for length, _ in found)


@pytest.mark.few(2)
@pytest.mark.parametrize("preset", ["fp32", "bf16", "fp8-linear", "fp8", "int8"])
def test_at_step_0_the_reference_is_the_policy_bit_for_bit(
    preset: str,
    make_trainer: MakeTrainer,
    make_groups: MakeGroups,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trainer = make_trainer(preset)
    groups = make_groups(trainer)
    reference = FrozenPolicy.of(trainer.policy)
    estimator = estimator_of(trainer, GrpoConfig(kl_coefficient=0.1), reference=reference)
    with monkeypatch.context() as patch:
        patch.delattr("isobit.training.advantage_estimator.score_sequences")
        skipped = scored(estimator, groups)
    assert [one.reference_log_probs for one in skipped] == [one.log_probs for one in skipped]
    monkeypatch.setattr(FrozenPolicy, "is_equal_to", lambda *_: False)
    assert scored(estimator, groups) == skipped, "its own forward gives the same bits"


def test_once_the_policy_has_moved_the_reference_is_asked(
    make_trainer: MakeTrainer, make_groups: MakeGroups
) -> None:
    trainer = make_trainer("fp8", learning_rate=0.01)
    groups = make_groups(trainer)
    reference = FrozenPolicy.of(trainer.policy)
    estimator = estimator_of(trainer, GrpoConfig(kl_coefficient=0.1), reference=reference)
    before = [one.log_probs.tolist() for one in scored(estimator, groups)]
    for master in trainer.policy.parameters():
        master.data.mul_(1.1)
    trainer.policy.publish()
    assert _reference(scored(estimator, groups)) == before
    moved = make_groups(trainer)
    assert _reference(scored(estimator, moved)) == before
    assert [one.log_probs.tolist() for one in scored(estimator, moved)] != before
    reference.take(trainer.policy)
    again = scored(estimator, moved)
    assert [one.reference_log_probs for one in again] == [one.log_probs for one in again]


def test_a_penalty_in_the_reward_is_the_coefficient_times_the_divergence(
    make_trainer: MakeTrainer, make_groups: MakeGroups, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make_trainer()
    config = GrpoConfig(
        kl_coefficient=0.5, kl_in="reward", kl_estimator="k1", normalise_by_std=False
    )
    estimator = estimator_of(trainer, config, reference=FrozenPolicy.of(trainer.policy))
    (group,) = make_groups(trainer, num_groups=1)
    shifts = [0.25, 0.0, -0.5, 1.0]

    def shifted(_: Any, __: Any, sequences: Sequence[TokenSequence], ___: str) -> list[TokenScores]:
        return [
            TokenScores(torch.tensor(one.of_response(one.log_probs) - shift), torch.empty(0))
            for one, shift in zip(sequences, shifts, strict=True)
        ]

    monkeypatch.setattr(FrozenPolicy, "is_equal_to", lambda *_: False)
    monkeypatch.setattr("isobit.training.advantage_estimator.scores_by_frozen", shifted)
    (estimated,) = estimator.estimate([group], [])
    rewards = [
        reward - 0.5 * shift * completion.length
        for completion, reward, shift in zip(group.completions, group.rewards, shifts, strict=True)
        if reward is not None
    ]
    mean = sum(rewards) / 4
    assert estimated.advantages == pytest.approx([reward - mean for reward in rewards], rel=1e-5)
    for sequence, shift in zip(flat([estimated]), shifts, strict=True):
        assert sequence.kl_penalties is not None
        penalties = _response(sequence, sequence.kl_penalties)
        assert penalties == pytest.approx([0.5 * shift] * len(penalties), rel=1e-5)


def test_corrections_are_one_where_old_is_recorded_and_the_ratio_elsewhere(
    make_trainer: MakeTrainer, make_groups: MakeGroups
) -> None:
    corrections: tuple[Correction, ...] = (
        TisCorrection(level="token", max=1.5),
        NormaliseCorrection(),
    )
    estimator = estimator_of(make_trainer(), corrections=corrections)
    sequences = flat(make_groups(estimator.trainer))
    ones = estimator.corrected(sequences)
    assert all(set(_importance(one)) == {1.0} for one in ones)
    assert estimator_of(estimator.trainer).corrected(sequences) == sequences
    plain = estimator_of(estimator.trainer, corrections=corrections[:1])
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
    return _response(sequence, sequence.importance)


def _response(sequence: TokenSequence, column: np.ndarray) -> list[float]:
    return sequence.of_response(column).tolist()


def test_a_replayed_sample_keeps_its_advantage(
    make_trainer: MakeTrainer, make_groups: MakeGroups
) -> None:
    estimator = estimator_of(make_trainer())
    (group,) = make_groups(estimator.trainer, num_groups=1)
    kept = Group(group.prompt, 0, group.completions[:1], [1.0], advantages=[-0.75])
    fresh, again = estimator.estimate([group], [kept])
    assert again.advantages == [-0.75]
    (sequence,) = flat([again])
    assert set(_response(sequence, sequence.advantages)) == {-0.75}
    assert [fresh] == estimator.estimate([group], [])


Answers = Sequence[tuple[float | None, int, str]]
"""Reward, length and finish reason of each completion of a group."""


def graded(answers: Answers, baseline: float | None = None, **more: Any) -> Group:
    completions = [replace(answer_of(n), finish_reason=why) for _, n, why in answers]
    group = group_of(completions, [reward for reward, _, _ in answers], baseline)
    return replace(group, **more)


def by_rewards(config: AlgorithmConfig, **more: Any) -> AdvantageEstimator:
    """A estimator that needs no forward."""
    no_trainer: Any = None
    return estimator_of(no_trainer, config, **more)


def estimated(estimator: AdvantageEstimator, groups: Sequence[Group]) -> list[Group]:
    """As ``AdvantageEstimator.estimate`` does, without a forward and corrections."""
    rewarded = estimator.rewarded(groups)
    credit = estimator.credit(rewarded, [])
    return [estimator.learnt(*pair) for pair in zip(rewarded, credit, strict=True)]


def acted(*episodes: tuple[float, float, float]) -> Group:
    """Episodes of two turns by the reward of each turn and that at the end."""
    sequence = TokenSequence.of_answer([5], [7, 9, 7], given=[(2, 3)])
    completions = [
        Completion(sequence.with_columns(turn_rewards=rewards), "", "stop")
        for *rewards, _ in episodes
    ]
    return group_of(completions, [reward for *_, reward in episodes])


STOP, CUT = "stop", "length"
LEVEL_PARTS = {"a": [0.0, 1.0], "b": [1.0, 0.0]}
WHY: list[tuple[AlgorithmConfig, Group, dict[str, int]]] = [
    (GrpoConfig(truncated="mask"), graded([(1.0, 3, CUT), (0.0, 3, CUT)]), {"masked": 2}),
    (GrpoConfig(truncated="exclude"), graded([(1.0, 3, CUT), (0.0, 3, CUT)]), {"excluded": 2}),
    (
        GrpoConfig(truncated="exclude"),
        graded([(2.0, 3, CUT), (1.0, 3, STOP), (1.0, 3, STOP)]),
        {"excluded": 1, "level": 2},
    ),
    (GrpoConfig(), graded([(1.0, 3, STOP), (None, 3, STOP)]), {"failed": 1, "alone": 1}),
    (GrpoConfig(), graded([(None, 3, STOP)] * 2), {"failed": 2}),
    (GrpoConfig(), graded([(0.0, 3, STOP)] * 2), {"zero": 2}),
    (GrpoConfig(), graded([(0.5, 3, STOP)] * 2), {"level": 2}),
    (GrpoConfig(), graded([(1.0, 3, STOP)] * 2, reward_parts=LEVEL_PARTS), {"cancelled": 2}),
    (GrpoConfig(), graded([(1.0, 0, "aborted"), (1.0, 0, "aborted")]), {"empty": 2}),
    (ReMaxConfig(), graded([(1.0, 3, STOP)] * 2, baseline=1.0), {"as_greedy": 2}),
    (ReMaxConfig(), graded([(0.0, 3, STOP)] * 2, baseline=0.0), {"zero": 2}),
    (ReMaxConfig(), graded([(1.0, 3, STOP)] * 2), {"no_baseline": 2}),
    (RlooConfig(), graded([(1.0, 3, STOP), (0.0, 3, STOP)]), {}),
    (GrpoConfig(), acted((0.0, np.nan, 1.0), (0.0, 0.0, 0.0)), {"failed": 1, "alone": 1}),
    (
        GrpoConfig(credit="turn"),
        acted((0.0, 0.0, 0.0), (np.nan, 0.0, 1.0)),
        {"failed": 1, "alone": 1},
    ),
    (GrpoConfig(), acted((0.5, 0.0, 0.0), (0.5, 0.0, 0.0)), {"level": 2}),
    (GrpoConfig(), acted((0.5, 0.0, 0.0), (0.0, 0.0, 0.5)), {"level": 2}),
    (GrpoConfig(), acted((0.5, 0.0, 0.0), (0.0, 0.0, 0.0)), {}),
    (GrpoConfig(credit="turn"), acted((0.5, 0.0, 0.0), (0.0, 0.0, 0.5)), {}),
]


@pytest.mark.parametrize(("config", "group", "expected"), WHY, ids=str)
def test_why_completions_teach_nothing(
    config: AlgorithmConfig, group: Group, expected: dict[str, int]
) -> None:
    """Seen before: "all rewards of each prompt are equal" of whatever it was."""
    estimator = by_rewards(config)
    assert estimator.reasons_without_signal([group], estimated(estimator, [group])) == expected
    assert estimator.has_advantages([group]) == [not expected]


def test_weights_of_zero_are_a_reason_too() -> None:
    estimator = by_rewards(GrpoConfig())
    group = graded([(1.0, 3, STOP), (0.0, 3, STOP)])
    (found,) = estimated(estimator, [group])
    rejected = [
        replace(one, sequence=replace(one.sequence, importance=one.sequence.spread([0.0] * 3)))
        for one in found.completions
    ]
    assert estimator.reasons_without_signal([group], [replace(found, completions=rejected)]) == {
        "rejected": 2
    }


@pytest.mark.parametrize("truncated", ["keep", "mask", "exclude"])
@pytest.mark.parametrize(
    "kind",
    [GrpoConfig, RlooConfig, ReMaxConfig, ReinforcePpBaselineConfig],
    ids=lambda k: k.__name__,
)
@settings(max_examples=examples(60))
@given(data=st.data())
def test_a_group_tells_exactly_where_it_has_a_signal(kind: Any, truncated: str, data: Any) -> None:
    """Dynamic sampling judges by what will be learnt from, and reasons are given where there is
    none, of every completion.
    """
    answer = st.tuples(
        st.sampled_from([None, 0.0, 0.5, 1.0]), st.integers(0, 3), st.sampled_from([STOP, CUT])
    )
    answers = data.draw(st.lists(answer, min_size=1, max_size=4))
    group = graded(answers, data.draw(st.sampled_from([None, 0.0, 1.0])))
    estimator = by_rewards(kind(truncated=truncated))
    (found,) = estimated(estimator, [group])
    signal = has_signal(sequences_learnt_from([found]), estimator.algorithm)
    assert estimator.has_advantages([group]) == [signal]
    reasons = estimator.reasons_without_signal([group], [found])
    assert reasons.keys() <= REASONS_WITHOUT_SIGNAL.keys()
    assert (sum(reasons.values()) == len(answers)) == (not signal)


def test_telling_of_a_value_head_is_by_the_rewards() -> None:
    """Whose credit needs a forward."""
    level, other = graded([(1.0, 3, STOP)] * 2), graded([(1.0, 3, STOP), (0.0, 3, STOP)])
    assert by_rewards(PpoConfig()).has_advantages([level, other]) == [False, True]


def test_a_group_with_one_other_reward_is_kept_whole() -> None:
    """NVIDIA-NeMo/RL#3469: each completion was judged by its peers, and the one that differs
    dropped.
    """
    for rewards in ([1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 0.0]):
        estimator = by_rewards(RlooConfig())
        group = graded([(reward, 3, STOP) for reward in rewards])
        assert estimator.has_advantages([group]) == [True]
        assert all(estimated(estimator, [group])[0].advantages)


def test_a_group_of_equal_fractions_tells_nothing() -> None:
    """OpenRLHF/OpenRLHF#1270: a mean between the bounds counted as a signal."""
    assert by_rewards(GrpoConfig()).has_advantages([graded([(0.4, 3, STOP)] * 8)]) == [False]


def test_the_greedy_baseline_is_punished_as_the_samples_are() -> None:
    """Seen before: samples that equal the greedy completion had an advantage of -0.4."""
    config = ReMaxConfig(overlong_buffer=8, overlong_penalty=0.5)
    group = graded([(1.0, LIMIT, CUT), (1.0, 4, STOP)], 1.0, baseline_length=LIMIT)
    assert estimated(by_rewards(config), [group])[0].advantages == [0.0, 0.5]
    assert by_rewards(config).has_advantages([group]) == [False], "before penalties for length"


def test_reasons_read_as_a_sentence() -> None:
    assert describe_reasons({"zero": 4}) == (
        "4 completions, all with reward 0, as all others of their prompt"
    )
    text = describe_reasons({"level": 2, "failed": 1000.0, "empty": 1}, advise=True)
    assert text.startswith("1,003 completions, 1,000 without a valid reward, 1 empty and 2 with")
    assert text.endswith("the first error of the reward is noted above")
    assert describe_reasons({}) == "no completions"


@pytest.mark.few(1)
@pytest.mark.parametrize("only", [False, True])
def test_each_token_loses_what_the_teacher_finds_less_likely(
    only: bool,
    make_trainer: MakeTrainer,
    make_groups: MakeGroups,
) -> None:
    trainer = make_trainer("fp8")
    groups = make_groups(trainer)
    config, teaching = GrpoConfig(), RunTeacher(coefficient=0.25, only=only)
    precision = PrecisionConfig(preset="bf16")
    masters = {name: master.detach() for name, master in trainer.policy.masters.items()}
    teacher = FrozenPolicy.publish(trainer.policy.config, precision, masters)
    plain = AdvantageEstimator(trainer, build_algorithm(config, 24), config, True, 24)
    taught = replace(plain, teacher=teacher, teaching=teaching)
    scorer, gaps = Scorer(teacher), list[float]()
    for before, after in zip(plain.estimate(groups, []), taught.estimate(groups, []), strict=True):
        for one, other in zip(before.completions, after.completions, strict=True):
            (batch,) = pack([one.sequence], 1 << 20)
            apart = batch.recorded_log_probs.double() - scorer.score(batch).log_probs.double()
            rewarded = one.sequence.of_response(one.sequence.advantages)
            own = 0.0 if only else torch.from_numpy(rewarded).double()
            wanted = (own - 0.25 * apart).float().numpy()
            found = other.sequence.of_response(other.sequence.advantages)
            assert np.array_equal(found, wanted)
            gaps += apart.tolist()
        sequences = [one.sequence for one in after.completions]
        assert all(one.teacher_log_probs is not None for one in sequences)
    every = [one.sequence for group in taught.estimate(groups, []) for one in group.completions]
    assert any(gaps)
    assert teacher_metrics(every)["teacher/kl"] == pytest.approx(sum(gaps) / len(gaps))
