"""Whether an update has anything to learn from."""

from dataclasses import replace
from typing import Any, cast

import pytest

from isobit.algorithms.registry import build_algorithm
from isobit.config.algorithm import GrpoConfig, PpoConfig
from isobit.records.sequence import TokenSequence
from isobit.training.signal import has_signal

GRPO = build_algorithm(GrpoConfig())
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
    assert has_signal([ONE.with_advantages(0.0)], build_algorithm(config)) == learns


def test_one_token_with_an_advantage_is_a_signal_unless_a_correction_rejects_it() -> None:
    one = ONE.with_advantages((1.0, 0.0))
    assert has_signal([ONE, one], GRPO)
    assert not has_signal([replace(one, importance=one.spread((0.0, 1.0)))], GRPO)
    assert has_signal([replace(one, importance=one.spread((0.5, 0.0)))], GRPO)


def test_nothing_has_no_signal() -> None:
    assert not has_signal([], build_algorithm(PpoConfig()))


def test_an_algorithm_that_does_not_say_what_its_loss_has_is_taken_to_learn() -> None:
    assert has_signal([ONE], cast(Any, object()))
