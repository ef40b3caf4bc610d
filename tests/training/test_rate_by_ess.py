"""``training.rate_by_ess``: the rate of an update by the effective share of its sequences."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from isobit.algorithms.objective import LossOutputs, Shares
from isobit.algorithms.registry import build_algorithm
from isobit.config.algorithm import GrpoConfig
from isobit.parallel.world import ALONE, World
from isobit.records.batch import PackedBatch, TokenScores
from isobit.records.packing import pack
from isobit.records.sequence import TokenSequence
from isobit.training.trainer import Trainer
from isobit.util.errors import ConfigError
from tests.training.test_ranks import make_trainer, sequences, state
from tests.worlds import in_world

GRPO = build_algorithm(GrpoConfig(clip="none"))
SIZES = "ratio/effective_sample_size", "ratio/effective_sequences"


def made(world: World = ALONE, **training: float) -> Trainer:
    case = {"model": "tied", "preset": "fp8", "moments": "fp8", "training": training}
    return make_trainer(case, world)


def stale(trainer: Trainer, shift: float) -> list[TokenSequence]:
    """Sequences whose recorded log-probabilities are off the trainer's, each by another multiple of
    ``shift``.
    """
    found = list[TokenSequence]()
    for number, one in enumerate(sequences(7, 1)):
        own = trainer.scorer.score(pack([one], 64)[0]).log_probs - shift * number
        found.append(replace(one, log_probs=one.spread(own.tolist())))
    return found


def update(trainer: Trainer, shift: float, budget: int = 64) -> dict[str, float]:
    return trainer.update(pack(stale(trainer, shift), budget), GRPO).metrics


def test_on_policy_it_changes_no_bit() -> None:
    plain, scaled = made(), made(rate_by_ess=True)
    found = [update(trainer, 0.0) for trainer in (plain, scaled)]
    assert found[0] == found[1]
    assert [found[0][name] for name in SIZES] == [1.0, 1.0]
    assert state(plain) == state(scaled)


def test_off_policy_an_update_is_that_of_the_rate_it_reports() -> None:
    scaled = made(rate_by_ess=True, weight_decay=0.1)
    found = update(scaled, 0.02)
    assert 0.3 < found[SIZES[1]] < 0.9 < found[SIZES[0]] < 1.0
    assert found["learning_rate"] == 1e-3 * math.sqrt(found[SIZES[1]])
    plain = made(learning_rate=found["learning_rate"], weight_decay=0.1)
    assert update(plain, 0.02) == found
    assert state(plain) == state(scaled)


def test_no_bit_of_them_depends_on_the_cut() -> None:
    names = (*SIZES, "learning_rate")
    found = [
        [update(made(rate_by_ess=True), 0.02, budget)[name] for name in names]
        for budget in (40, 64, 4096)
    ]
    assert found[1:] == found[:1] * 2


def scaled_updates(world: World, argument: None = None) -> list[Any]:
    torch.set_num_threads(1)
    trainer = made(world, rate_by_ess=True)
    figures = [trainer.update(pack(sequences(7, step), 64), GRPO).metrics for step in range(2)]
    return [figures, state(trainer)]


@pytest.mark.exhaustive
def test_nor_on_the_number_of_processes() -> None:
    expected = scaled_updates(ALONE)
    assert all(figures["learning_rate"] < 1e-3 for figures in expected[0])
    for found in in_world(2, "tests.training.test_rate_by_ess:scaled_updates"):
        assert found == expected


class WithoutRatios:
    """An objective of one's own that says nothing of ratios."""

    def shares(self, batches: list[PackedBatch]) -> list[Shares]:
        return GRPO.shares(batches)

    def loss(self, scores: TokenScores, batch: PackedBatch, shares: Shares) -> LossOutputs:
        return LossOutputs(GRPO.loss(scores, batch, shares).loss)


def test_an_objective_without_ratios_is_refused_before_a_weight_moves() -> None:
    objective: Any = WithoutRatios()
    trainer, batches = made(rate_by_ess=True), pack(sequences(7, 1), 64)
    before = state(trainer)
    with pytest.raises(ConfigError, match="the algorithm reports no ratios"):
        trainer.update(batches, objective)
    assert state(trainer) == before
    assert SIZES[0] not in made().update(batches, objective).metrics
