"""The supervised objective and its batches.

The preference objective, its batches and its figures.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForSequenceClassification

from isobit.config.precision import PrecisionConfig, Preset
from isobit.config.training import TrainingConfig
from isobit.models.frozen import last_tokens_batch
from isobit.models.policy import Policy, random_policy
from isobit.models.saving import save_policy
from isobit.records.batch import TokenScores
from isobit.training.supervised import (
    PreferenceObjective,
    SupervisedObjective,
    mean_loss,
    measure_pairs,
    pack_pairs,
    pack_preferences,
)
from isobit.training.trainer import Trainer


def test_loss_is_the_mean_negative_log_probability_over_all_microbatches() -> None:
    parts = [torch.tensor([-1.0, -2.0, -4.0]), torch.tensor([-3.0])]
    objective = SupervisedObjective()
    batches = [pack_pairs([([1], [2] * len(part))], 8)[0] for part in parts]
    losses = [
        objective.loss(TokenScores(x, x), batch, shares).loss
        for x, batch, shares in zip(parts, batches, objective.shares(batches), strict=True)
    ]
    assert float(sum(losses)) == pytest.approx(2.5)


def test_pairs_are_packed_with_the_answers_as_targets() -> None:
    (batch,) = pack_pairs([([1, 2], [3, 4]), ([5], [6])], 16)
    assert batch.token_ids.tolist() == [1, 2, 3, 4, 5, 6]
    assert batch.targets.tolist() == [3, 4, 6]
    assert batch.rows.tolist() == [1, 2, 4]
    assert batch.temperatures.tolist() == [1.0, 1.0, 1.0]


def test_mean_loss_is_the_loss_of_an_update_and_learns_nothing(
    make_trainer: Callable[..., Trainer],
) -> None:
    trainer = make_trainer("bf16")
    batches = pack_pairs([([1, 2], [3, 4]), ([5], [6, 7, 8]), ([9], [10])], 6)
    assert len(batches) > 1
    before = mean_loss(trainer, batches)
    assert trainer.policy.version == 1
    found = trainer.update(batches, SupervisedObjective()).metrics["loss"]
    assert found == pytest.approx(before, rel=1e-6)
    assert mean_loss(trainer, batches) < before


Pair = tuple[tuple[int, ...], tuple[int, ...]]
NONE = torch.empty(0)
PAIRS: list[Pair] = [
    ((1, 2, 3), (1, 2, 9, 8)),
    ((4, 5, 6, 7, 8), (4, 5, 1)),
    ((9, 10), (9, 11)),
    ((20, 21, 22), (20, 40, 41)),
]


def scores(*values: float) -> TokenScores:
    return TokenScores(NONE, NONE, torch.tensor(values))


@pytest.fixture
def make_reward_trainer(
    make_policy: Callable[..., Policy],
) -> Callable[..., Trainer]:
    def make(preset: Preset = "fp32") -> Trainer:
        config = replace(make_policy().config, score_head=True, pad_token_id=0)
        policy = random_policy(config, PrecisionConfig(preset=preset), seed=0)
        with torch.no_grad():
            policy.masters["score.weight"].mul_(5)
        policy.publish()
        settings = {"tokens_per_microbatch": 128, "learning_rate": 1e-3}
        return Trainer(policy, TrainingConfig.model_validate(settings), total_updates=10)

    return make


def test_the_loss_is_the_mean_negative_log_likelihood_of_the_choices() -> None:
    """By hand: margins 2, -1 and 0 in two micro-batches."""
    objective = PreferenceObjective()
    batches = [last_tokens_batch([[1], [2], [3], [4]]), last_tokens_batch([[5], [6]])]
    shares = objective.shares(batches)
    first = objective.loss(scores(3.0, 1.0, -1.0, 0.0), batches[0], shares[0])
    second = objective.loss(scores(0.5, 0.5), batches[1], shares[1])
    by_hand = [math.log(1 + math.exp(-margin)) for margin in (2, -1, 0)]
    assert float(first.loss + second.loss) == pytest.approx(sum(by_hand) / 3)
    assert first.metrics == {
        "accuracy": 2.0,
        "margin": 2.0,
        "score_mean": 3.0,
        "score_max": 3.0,
        "score_min": -1.0,
    }
    assert second.metrics["accuracy"] == 0, "equal scores rank nothing"


def test_the_gradient_is_that_of_finite_differences() -> None:
    values = torch.tensor([0.3, -0.2, 1.5, 2.5], dtype=torch.float64)
    batch = last_tokens_batch([[1], [2], [3], [4]])
    objective = PreferenceObjective()
    (shares,) = objective.shares([batch])

    def loss(at: torch.Tensor) -> torch.Tensor:
        return objective.loss(TokenScores(NONE, NONE, at), batch, shares).loss

    leaf = values.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(loss(leaf), leaf)
    for index in range(4):
        step = torch.zeros(4, dtype=torch.float64)
        step[index] = 1e-6
        difference = float(loss(values + step) - loss(values - step)) / 2e-6
        assert float(gradient[index]) == pytest.approx(difference, abs=1e-7)
    margin = float(values[0] - values[1])
    assert float(gradient[0]) == pytest.approx(-1 / (1 + math.exp(margin)) / 2), "-(1 - P) / pairs"


@given(st.lists(st.tuples(*[st.floats(-50, 50, width=32)] * 2), min_size=1), st.floats(-8, 8))
def test_only_differences_count_and_nothing_overflows(
    pairs: list[tuple[float, float]], shift: float
) -> None:
    objective = PreferenceObjective()
    flat = torch.tensor([value for pair in pairs for value in pair], dtype=torch.float64)
    batch = last_tokens_batch([[1]] * len(flat))
    (shares,) = objective.shares([batch])
    at, moved = (
        float(objective.loss(TokenScores(NONE, NONE, values), batch, shares).loss)
        for values in (flat, flat + shift)
    )
    assert math.isfinite(at)
    assert at == pytest.approx(moved, rel=1e-6, abs=1e-9)


@given(
    st.lists(st.tuples(*[st.lists(st.integers(1, 99), min_size=1, max_size=30)] * 2), max_size=12),
    st.integers(1, 100),
)
def test_a_pair_lies_in_one_microbatch_with_the_chosen_one_first(
    pairs: list[tuple[list[int], list[int]]], budget: int
) -> None:
    found = []
    for batch in pack_preferences(pairs, budget, pad_token_id=None):
        ids = [part.tolist() for part in batch.token_ids.split(batch.lengths)]
        assert len(ids) == 2 or sum(batch.lengths) <= budget
        assert batch.rows.tolist() == (torch.tensor(batch.lengths).cumsum(0) - 1).tolist()
        assert batch.positions[batch.rows].tolist() == [n - 1 for n in batch.lengths]
        found += list(zip(ids[0::2], ids[1::2], strict=True))
    assert sorted(found) == sorted(pairs)


def test_padding_at_the_end_is_not_scored() -> None:
    (batch,) = pack_preferences([((5, 6, 0, 0), (5, 0, 7))], 99, pad_token_id=0)
    assert batch.token_ids.tolist() == [5, 6, 5, 0, 7]


@pytest.mark.few(2)
@pytest.mark.parametrize("preset", ["fp32", "bf16", "fp8", "int8"])
def test_updates_rank_the_pairs(
    preset: Preset, make_reward_trainer: Callable[..., Trainer]
) -> None:
    trainer = make_reward_trainer(preset)
    whole = pack_preferences(PAIRS, 4096, 0)
    before = measure_pairs(trainer.scorer, whole)
    first = trainer.update(whole, PreferenceObjective())
    assert first.metrics["loss"] == pytest.approx(before.loss, rel=1e-5)
    assert first.metrics["accuracy"] == before.accuracy
    assert first.metrics["margin"] == pytest.approx(before.margin, rel=1e-5)
    assert first.metrics["score_min"] < first.metrics["score_mean"]
    assert first.metrics["score_mean"] < first.metrics["score_max"]
    for _ in range(5):
        trainer.update(whole, PreferenceObjective())
    after = measure_pairs(trainer.scorer, whole)
    assert after.loss < before.loss / 2
    assert after.accuracy == 1.0
    assert after.margin > before.margin


def test_figures_do_not_depend_on_the_cut(make_reward_trainer: Callable[..., Trainer]) -> None:
    trainer = make_reward_trainer("fp8")
    figures = [
        measure_pairs(trainer.scorer, pack_preferences(PAIRS, tokens, 0)) for tokens in (4096, 9)
    ]
    assert figures[0] == figures[1]


def test_splitting_an_update_changes_rounding_only(
    make_reward_trainer: Callable[..., Trainer],
    gradients_of: Callable[..., dict[str, torch.Tensor]],
) -> None:
    whole, cut = (
        gradients_of(
            make_reward_trainer(), pack_preferences(PAIRS, tokens, 0), PreferenceObjective()
        )
        for tokens in (4096, 9)
    )
    assert whole.keys() == cut.keys()
    assert "score.weight" in whole
    for name, gradient in whole.items():
        assert float((gradient - cut[name]).norm()) < 1e-5 * float(gradient.norm()), name


def test_gradients_are_those_of_transformers(
    make_reward_trainer: Callable[..., Trainer],
    gradients_of: Callable[..., dict[str, torch.Tensor]],
    tmp_path: Path,
) -> None:
    trainer = make_reward_trainer()
    policy = trainer.policy
    with torch.no_grad():
        for master in policy.masters.values():
            master.copy_(master.bfloat16())
    policy.publish()
    save_policy(policy, tmp_path)
    model = AutoModelForSequenceClassification.from_pretrained(
        tmp_path, dtype=torch.float32, local_files_only=True
    )
    margins = [
        model(torch.tensor([chosen])).logits - model(torch.tensor([rejected])).logits
        for chosen, rejected in PAIRS
    ]
    (-torch.nn.functional.logsigmoid(torch.cat(margins)).mean()).backward()
    ours = gradients_of(trainer, pack_preferences(PAIRS, 20, 0), PreferenceObjective())
    theirs = dict(model.named_parameters())
    for name, master in policy.decoder.masters().items():
        for part, gradient in master.of_checkpoint(ours[name]).items():
            expected = theirs[part].grad
            assert expected is not None
            assert float((gradient - expected).norm()) < 1e-4 * float(expected.norm()) + 1e-7, part
