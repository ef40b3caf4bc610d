"""Algorithms by the name a configuration gives them: a new one adds its file and one line here."""

from collections.abc import Callable

from isobit.algorithms.grpo import Grpo
from isobit.algorithms.objective import Algorithm
from isobit.config.algorithm import AlgorithmConfig
from isobit.errors import ConfigError

ALGORITHMS: dict[str, Callable[[AlgorithmConfig], Algorithm]] = {"grpo": Grpo}


def build_algorithm(config: AlgorithmConfig) -> Algorithm:
    """The algorithm that ``config`` names; raises ``ConfigError`` for one that is unknown or asks
    for a KL penalty.
    """
    if config.kl_coefficient > 0:
        raise ConfigError(
            f"algorithm.kl_coefficient is {config.kl_coefficient:g}, but there is no reference "
            "model yet to measure the divergence from; "
            "set it to 0"
        )
    if config.name not in ALGORITHMS:
        raise ConfigError(
            f"algorithm.name is {config.name!r}; known are {', '.join(sorted(ALGORITHMS))}"
        )
    return ALGORITHMS[config.name](config)
