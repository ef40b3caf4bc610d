"""Reward functions by the name that a recipe gives them: ``module:function``,
``path/to/file.py:function``, a built-in grader, or one that was passed from Python
(``isobit.rewards.python_rewards``).
"""

import importlib
import importlib.util
import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias

from isobit.records.text import Completion, Prompt
from isobit.rewards.graders import GRADERS
from isobit.rewards.python_rewards import PREFIX, given_reward
from isobit.rewards.signatures import Reward, recognise
from isobit.util.errors import RewardError, did_you_mean
from isobit.util.option_secrets import from_environment
from isobit.util.user_code import describe_missing, run_file

RewardFunction: TypeAlias = Callable[[Prompt, Completion], float | None]
_NO_MEMORY = ("annot allocate memory", "failed to map segment")
"""Parts of the system's and the dynamic loader's messages."""


def load_reward(name: str, options: Mapping[str, Any] | None = None) -> Reward:
    """The reward called ``name`` with its options, in which ``env:NAME`` is replaced by the
    environment variable's value.

    Raises ``RewardError`` for an unset variable, an invalid name, a module or file that is missing
    or fails on import, an unknown function (with those that exist), and an unknown form
    (``isobit.rewards.signatures``).
    """
    options = from_environment(options or {}, name)
    if name.startswith(PREFIX):
        return recognise(given_reward(name), name, options)
    place = GRADERS.get(name, name)
    module_name, separator, function_name = place.rpartition(":")
    if not (separator and module_name and function_name):
        if name.endswith(".py"):
            functions = describe_missing(_from_file(Path(name)), "", inspect.isfunction)
            raise RewardError(
                f"the reward {name!r} names no function of the file; expected {name}:function, "
                f"and its functions are {functions}"
            )
        raise RewardError(
            f"cannot read the reward {name!r}; expected 'module:function', "
            f"'path/to/file.py:function' or one of {', '.join(map(repr, GRADERS))}"
            f"{did_you_mean(name, GRADERS)}"
        )
    module = (
        _from_file(Path(module_name)) if module_name.endswith(".py") else _from_module(module_name)
    )
    return recognise(_function(module, module_name, function_name), name, options)


def _from_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise RewardError(f"there is no reward file {path} (looked in {path.absolute().parent})")
    try:
        return run_file(path, f"isobit_reward_{path.stem}")
    except (Exception, SystemExit) as error:
        raise RewardError(f"the reward file {path} fails on import: {_in_a_line(error)}") from error


def _from_module(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        missing = isinstance(error, ModuleNotFoundError)
        hint = (
            "; a file that is not installed is named by its path, as in 'rewards/mine.py:function'"
            if missing
            else ""
        )
        raise RewardError(
            f"the reward module {name!r} cannot be imported: {_in_a_line(error)}{hint}"
        ) from error


def _function(module: ModuleType, module_name: str, function_name: str) -> Callable[..., Any]:
    function = getattr(module, function_name, None)
    if callable(function):
        return function
    functions = describe_missing(module, function_name, inspect.isfunction)
    raise RewardError(
        f"{module_name} has no function {function_name!r}; its functions are {functions}"
    )


def _in_a_line(error: BaseException) -> str:
    text = " ".join(f"{type(error).__name__}: {error}".split())
    short_of_memory = isinstance(error, MemoryError) or any(sign in text for sign in _NO_MEMORY)
    return text + (" (reward.memory_mib is what it may take)" if short_of_memory else "")
