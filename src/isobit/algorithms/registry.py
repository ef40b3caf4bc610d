"""Algorithms by the name a configuration gives them: a new one adds its file and one line here."""

from collections.abc import Callable
from typing import Any

from isobit.algorithms.cispo import Cispo
from isobit.algorithms.custom import load_algorithm
from isobit.algorithms.dapo import Dapo
from isobit.algorithms.dr_grpo import DrGrpo
from isobit.algorithms.grpo import Grpo
from isobit.algorithms.gspo import Gspo
from isobit.algorithms.objective import Algorithm
from isobit.algorithms.ppo import Ppo
from isobit.algorithms.reinforce_pp import ReinforcePp
from isobit.algorithms.reinforce_pp_baseline import ReinforcePpBaseline
from isobit.algorithms.remax import ReMax
from isobit.algorithms.rloo import Rloo
from isobit.config.algorithm import AlgorithmConfig, CustomConfig

ALGORITHMS: dict[str, Callable[[Any], Algorithm]] = {
    "grpo": Grpo,
    "dr_grpo": DrGrpo,
    "dapo": Dapo,
    "rloo": Rloo,
    "reinforce_pp": ReinforcePp,
    "reinforce_pp_baseline": ReinforcePpBaseline,
    "gspo": Gspo,
    "cispo": Cispo,
    "remax": ReMax,
    "ppo": Ppo,
}


def build_algorithm(config: AlgorithmConfig, max_new_tokens: int | None = None) -> Algorithm:
    """The algorithm that ``config`` describes; ``max_new_tokens`` is the constant of a mean by a
    constant which has none.

    Raises ConfigError for one's own that cannot be loaded.
    """
    if isinstance(config, CustomConfig):
        return load_algorithm(config)
    if config.loss_mean == "constant" and config.loss_constant is None:
        config = config.model_copy(update={"loss_constant": max_new_tokens})
    return ALGORITHMS[config.name](config)
