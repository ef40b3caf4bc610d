"""Algorithms by name, and the refusal of a KL penalty."""

from typing import get_args

import pytest

from isobit.algorithms.grpo import Grpo
from isobit.algorithms.registry import ALGORITHMS, build_algorithm
from isobit.config.algorithm import AlgorithmConfig
from isobit.errors import ConfigError


def test_every_name_of_the_configuration_is_registered() -> None:
    assert set(ALGORITHMS) == set(get_args(AlgorithmConfig.model_fields["name"].annotation))


def test_grpo_is_built_with_its_configuration() -> None:
    config = AlgorithmConfig(clip_high=0.4)
    assert build_algorithm(config) == Grpo(config)


def test_a_kl_penalty_is_refused_by_name() -> None:
    with pytest.raises(
        ConfigError, match=r"algorithm\.kl_coefficient is 0\.001, .*no reference model"
    ):
        build_algorithm(AlgorithmConfig(kl_coefficient=0.001))


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    known = ", ".join(sorted(ALGORITHMS))
    with pytest.raises(ConfigError, match=rf"algorithm\.name is 'ppo'; known are {known}"):
        build_algorithm(AlgorithmConfig.model_construct(name="ppo", kl_coefficient=0.0))
