"""Algorithms by the name a configuration gives them: a new one adds its file and one line here.

One's own objective, by name: ``algorithm = "path/to/file.py:Class"`` or ``"module:Class"``.

The class is called with the configuration's ``options`` as keywords, and what it makes must be an
``Algorithm`` (``isobit.algorithms.objective``): three methods and two attributes.  Loading runs the
user's own module and nothing else.
"""

import importlib
import inspect
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from isobit.algorithms.family import (
    Cispo,
    Dapo,
    DrGrpo,
    Grpo,
    Gspo,
    ReinforcePp,
    ReinforcePpBaseline,
    ReMax,
    Rloo,
)
from isobit.algorithms.objective import Algorithm
from isobit.algorithms.ppo import Ppo
from isobit.config.algorithm import AlgorithmConfig, CustomConfig
from isobit.util.errors import ConfigError
from isobit.util.user_code import describe_missing, run_file

_METHODS = {
    "credit": ("groups",),
    "shares": ("batches",),
    "loss": ("scores", "batch", "shares"),
}
_ATTRIBUTES = ("needs_values", "needs_greedy")


def load_algorithm(config: CustomConfig) -> Algorithm:
    """The algorithm that ``config.source`` names, made with its options.

    Raises ConfigError for a name of another form, a module or file that is missing or fails on
    import, a class that does not exist (with those that do), options that it does not take, and an
    object that is no ``Algorithm``, with what it lacks.
    """
    module_name, separator, class_name = config.source.rpartition(":")
    if not (separator and module_name and class_name):
        raise ConfigError(
            f"algorithm.source is {config.source!r}; expected 'path/to/file.py:Class' or "
            "'module:Class'"
        )
    load = _from_file if module_name.endswith(".py") else importlib.import_module
    try:
        module = load(module_name)
    except ConfigError:
        raise
    except Exception as error:  # whatever the user's module raises is theirs to see, in one line
        raise ConfigError(
            f"the algorithm's {module_name} fails on import: {type(error).__name__}: {error}"
        ) from error
    return _checked(_made(_class(module, module_name, class_name), config), config.source)


def _from_file(name: str) -> ModuleType:
    path = Path(name)
    if not path.is_file():
        raise ConfigError(
            f"there is no file {path} for the algorithm (looked in {path.absolute().parent})"
        )
    return run_file(path, f"isobit_algorithm_{path.stem}")


def _class(module: ModuleType, module_name: str, class_name: str) -> Callable[..., Any]:
    found = getattr(module, class_name, None)
    if inspect.isclass(found):
        return found
    classes = describe_missing(module, class_name, inspect.isclass)
    raise ConfigError(f"{module_name} has no class {class_name!r}; its classes are {classes}")


def _made(kind: Callable[..., Any], config: CustomConfig) -> Any:
    try:
        return kind(**config.options)
    except Exception as error:  # likewise
        raise ConfigError(
            f"{config.source} cannot be made with algorithm.options = {config.options}: "
            f"{type(error).__name__}: {error}"
        ) from error


def _checked(found: Any, name: str) -> Algorithm:
    problems = [
        problem
        for method, arguments in _METHODS.items()
        if (problem := _problem(found, method, arguments))
    ]
    problems += [
        f"{attribute} is missing; set it to True or False"
        for attribute in _ATTRIBUTES
        if not isinstance(getattr(found, attribute, None), bool)
    ]
    if problems:
        raise ConfigError(f"{name} is no algorithm: {'; '.join(problems)} (docs/algorithms.md)")
    return cast(Algorithm, found)


def _problem(found: Any, method: str, arguments: tuple[str, ...]) -> str | None:
    wanted = f"{method}({', '.join(arguments)})"
    bound = getattr(found, method, None)
    if not callable(bound):
        return f"{wanted} is missing"
    try:
        inspect.signature(bound).bind(*arguments)
    except TypeError:
        return f"{wanted} is called, but it is {method}{inspect.signature(bound)}"
    return None


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

    Raises ConfigError for one's own that cannot be loaded, or that has values or a greedy baseline
    where ``credit`` is by turn.
    """
    if isinstance(config, CustomConfig):
        found = load_algorithm(config)
        if config.credit == "turn" and (found.needs_values or found.needs_greedy):
            raise ConfigError(
                f"algorithm.credit is 'turn', but {config.source} needs values or a greedy "
                "completion, which are not by turn; leave credit out"
            )
        return found
    if config.loss_mean == "constant" and config.loss_constant is None:
        config = config.model_copy(update={"loss_constant": max_new_tokens})
    return ALGORITHMS[config.name](config)
