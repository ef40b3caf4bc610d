"""Planted bit flips: each is caught, masked or missed, and what is missed has a reason.

``ISOBIT_FLIPS=1000`` runs the whole campaign.
"""

import os
from random import Random

import pytest
import torch

from experiments.bit_flips import KINDS, REASONS, Outcome, campaign, flip_bit, table


@pytest.fixture(scope="module")
def found() -> list[Outcome]:
    return campaign(int(os.environ.get("ISOBIT_FLIPS", "16")), seed=1)


def test_what_is_missed_has_a_reason(found: list[Outcome]) -> None:
    made = table(found)
    assert sum(made["all"].values()) == made["flips"] == len(found)
    assert set(made["missed"]) <= set(REASONS)
    assert made["all"]["caught"] > 0 < made["all"]["masked"]


def test_nothing_that_a_forward_of_the_rollout_reads_is_missed(found: list[Outcome]) -> None:
    """The cache and the activations of sampling: the recorded log-probabilities say."""
    at_risk = [one for one in found if one.where.startswith(("cache", "rollout", "repeat"))]
    assert at_risk and not [one for one in at_risk if one.state == "missed"]


def test_the_table_counts_by_kind() -> None:
    made = table(
        [Outcome("cache", "cache", "caught"), Outcome("moments", "x", "missed", "sampled")]
    )
    assert made["cache"] == {"caught": 1} and made["missed"] == {"sampled": 1}
    assert set(KINDS) < set(made)


def test_one_bit_flips() -> None:
    tensors = [torch.zeros(3), torch.zeros((), dtype=torch.uint8), torch.zeros(2, 2).t()]
    for seed in range(20):
        before = [x.clone() for x in tensors]
        flip_bit(Random(seed), tensors)
        changed = sum(
            int((a.reshape(-1).view(torch.uint8) ^ b.reshape(-1).view(torch.uint8)).count_nonzero())
            for a, b in zip(tensors, before, strict=True)
        )
        assert changed == 1
