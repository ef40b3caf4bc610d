"""Algorithms by name: each table of the configuration builds its class."""

from typing import get_args

import pytest

from isobit.algorithms.grpo import Grpo
from isobit.algorithms.registry import ALGORITHMS, build_algorithm
from isobit.config.algorithm import AlgorithmConfig, CustomConfig, DrGrpoConfig, GrpoConfig
from isobit.config.keys import tag_of

KINDS = [kind for kind in get_args(get_args(AlgorithmConfig)[0]) if kind is not CustomConfig]


def test_every_name_of_the_configuration_is_registered() -> None:
    assert set(ALGORITHMS) == {tag_of(kind) for kind in KINDS}


@pytest.mark.parametrize("kind", KINDS, ids=tag_of)
def test_an_algorithm_is_built_with_its_configuration(kind: type[GrpoConfig]) -> None:
    config = kind(loss_mean="token", clip_high=0.4)
    built = build_algorithm(config, 512)
    assert built == ALGORITHMS[config.name](config)
    assert type(built).__name__.lower() == config.name.replace("_", "")


def test_grpo_is_built_with_its_configuration() -> None:
    config = GrpoConfig(clip_high=0.4)
    assert build_algorithm(config) == Grpo(config)


def test_the_constant_of_a_mean_is_the_longest_completion_unless_set() -> None:
    assert build_algorithm(DrGrpoConfig(), 512) == build_algorithm(DrGrpoConfig(loss_constant=512))
    built = build_algorithm(DrGrpoConfig(loss_constant=7), 512)
    assert built == build_algorithm(DrGrpoConfig(loss_constant=7), 9)
