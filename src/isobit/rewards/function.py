"""A reward function, by name.

A reward is named as ``module:function``, as ``path/to/file.py:function``, or by the name of a
built-in grader: ``reasoning_gym`` is the scorer of the task that the prompt came from.  One that
was given from Python has a name that ``isobit.rewards.given`` made.  Loading runs the user's own
module and nothing else.
"""

import importlib
import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias

from isobit.errors import RewardError
from isobit.records.text import Completion, Prompt
from isobit.rewards.form import Reward, recognise
from isobit.rewards.given import PREFIX, given_reward
from isobit.rewards.graders import GRADERS
from isobit.rewards.secrets import from_environment
from isobit.user_module import describe_missing, run_file

RewardFunction: TypeAlias = Callable[[Prompt, Completion], float]

_NO_MEMORY = ("annot allocate memory", "failed to map segment")
"""What the system and its loader of libraries say of it."""


def load_reward(name: str, options: Mapping[str, Any] | None = None) -> Reward:
    """The reward function called ``name``, with the keyword arguments that it is to have; of those
    that are ``env:NAME``, the value of that environment variable.

    Raises ``RewardError`` for a variable that is not set, a name of another kind, a module or file
    that is missing or fails on import, a function that does not exist (with those that do), and one
    of no known form (``isobit.rewards.form``).
    """
    options = from_environment(options or {}, name)
    if name.startswith(PREFIX):
        return recognise(given_reward(name), name, options)
    place = GRADERS.get(name, name)
    module_name, separator, function_name = place.rpartition(":")
    if not (separator and module_name and function_name):
        raise RewardError(
            f"cannot read the reward {name!r}; expected 'module:function', "
            f"'path/to/file.py:function' or one of {', '.join(map(repr, GRADERS))}"
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
    except (Exception, SystemExit) as error:  # whatever it raises is the user's to see, in a line
        raise RewardError(f"the reward file {path} fails on import: {_in_a_line(error)}") from error


def _from_module(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:  # likewise
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
