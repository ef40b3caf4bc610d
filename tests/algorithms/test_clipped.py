"""The tokens that covary most: by brute force, and whatever the cut."""

from dataclasses import replace

import pytest
import torch

from isobit.algorithms.policy_gradient import covariances, select
from isobit.config.algorithm import GrpoConfig
from isobit.records.batch import PackedBatch
from tests.algorithms.batches import batch_of, random_batch

LENGTHS = [7, 3, 9, 6, 5]
KL_COV = GrpoConfig(covariance="kl_cov", covariance_fraction=0.2)
CLIP_COV = GrpoConfig(
    covariance="clip_cov", covariance_fraction=0.1, covariance_low=0.1, covariance_high=1.5
)


def whole() -> PackedBatch:
    return random_batch(7, LENGTHS)[1]


def cut(batch: PackedBatch, order: list[list[int]]) -> list[PackedBatch]:
    """The same sequences in other micro-batches, by their numbers."""
    parts = []
    for members in order:
        rows = torch.cat([(batch.sequence == one).nonzero()[:, 0] for one in members])
        singles = [batch_of([LENGTHS[one]], first=one) for one in members]
        part = batch_of([LENGTHS[one] for one in members])
        parts.append(
            replace(
                part,
                token_ids=torch.cat([one.token_ids for one in singles]),
                old_log_probs=batch.old_log_probs[rows],
                advantages=batch.advantages[rows],
            )
        )
    return parts


def picked_of_sequence(
    parts: list[PackedBatch], order: list[list[int]], picks: list[torch.Tensor]
) -> dict[int, list[bool]]:
    return {
        number: pick[part.sequence == place].tolist()
        for part, members, pick in zip(parts, order, picks, strict=True)
        for place, number in enumerate(members)
    }


def test_covariances_add_up_to_the_covariance() -> None:
    batch = whole()
    pair = torch.stack([batch.old_log_probs, batch.advantages])
    expected = torch.cov(pair, correction=0)[0, 1]
    torch.testing.assert_close(covariances([batch]).mean(), expected)


def test_kl_cov_picks_the_largest() -> None:
    batch = whole()
    (picked,) = select(KL_COV, [batch])
    found = covariances([batch])
    assert picked.sum() == int(0.2 * sum(LENGTHS))
    assert found[picked].min() > found[~picked].max()


def test_clip_cov_picks_some_within_its_bounds() -> None:
    batch = whole()
    (picked,) = select(CLIP_COV, [batch])
    found = covariances([batch])
    within = (found >= 0.1) & (found <= 1.5)
    assert picked.sum() == int(0.1 * sum(LENGTHS)) < within.sum()
    assert within[picked].all()


@pytest.mark.parametrize("config", [KL_COV, CLIP_COV], ids=lambda config: config.covariance)
@pytest.mark.parametrize("order", [[[0, 1], [2, 3, 4]], [[4, 2], [0], [3, 1]]])
def test_the_choice_does_not_depend_on_the_cut(config: GrpoConfig, order: list[list[int]]) -> None:
    batch = whole()
    batch = replace(batch, old_log_probs=batch.old_log_probs.round())  # with many equals
    one = [list(range(len(LENGTHS)))]
    expected = picked_of_sequence([batch], one, select(config, [batch]))
    parts = cut(batch, order)
    assert picked_of_sequence(parts, order, select(config, parts)) == expected
    assert any(map(any, expected.values()))


def test_of_equals_as_many_are_picked_as_asked_for() -> None:
    batch = replace(whole(), old_log_probs=torch.zeros(sum(LENGTHS)))
    (picked,) = select(KL_COV, [batch])
    assert picked.sum() == int(0.2 * sum(LENGTHS))
    assert len({int(one) for one in batch.sequence[picked]}) > 1, "not the first ones"


def test_at_least_one_is_picked_and_none_outside_the_bounds() -> None:
    batch = whole()
    few = KL_COV.model_copy(update={"covariance_fraction": 1e-9})
    assert select(few, [batch])[0].sum() == 1
    none = CLIP_COV.model_copy(update={"covariance_low": 90.0, "covariance_high": 99.0})
    assert select(none, [batch])[0].sum() == 0


def test_pieces_are_those_of_the_micro_batches() -> None:
    parts = cut(whole(), [[0, 1], [2], [3, 4]])
    assert [len(pick) for pick in select(KL_COV, parts)] == [10, 9, 11]
