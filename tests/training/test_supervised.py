"""The supervised objective and its batches."""

from collections.abc import Callable

import pytest
import torch

from isobit.records.scores import TokenScores
from isobit.training.supervised import SupervisedObjective, mean_loss, pack_pairs
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
    assert trainer.update(batches, SupervisedObjective()).loss == pytest.approx(before, rel=1e-6)
    assert mean_loss(trainer, batches) < before
