"""A reward function, by name.

A reward is a plain function ``(prompt, completion) -> float``.  It is named as ``module:function``,
as ``path/to/file.py:function``, or as ``reasoning_gym`` for the scorer of the task that the prompt
came from.  Loading runs the user's own module and nothing else.
"""

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import TypeAlias, cast

from isobit.errors import RewardError
from isobit.records.text import Completion, Prompt
from isobit.rewards.graders.reasoning_gym import score as score_task

RewardFunction: TypeAlias = Callable[[Prompt, Completion], float]

TASK_SCORER = "reasoning_gym"
FORMS = f"expected 'module:function', 'path/to/file.py:function' or {TASK_SCORER!r}"


def load_reward(name: str) -> RewardFunction:
    """The reward function called ``name``.

    Raises ``RewardError`` for a name of another form, a module or file that is missing or fails on
    import, a function that does not exist (with those that do), and one that does not take (prompt,
    completion) or is ``async``.
    """
    if name == TASK_SCORER:
        return score_task
    module_name, separator, function_name = name.rpartition(":")
    if not (separator and module_name and function_name):
        raise RewardError(f"cannot read the reward {name!r}; {FORMS}")
    module = (
        _from_file(Path(module_name)) if module_name.endswith(".py") else _from_module(module_name)
    )
    return _checked(_function(module, module_name, function_name), name)


def _from_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise RewardError(f"there is no reward file {path} (looked in {path.absolute().parent})")
    spec = importlib.util.spec_from_file_location(f"isobit_reward_{path.stem}", path)
    assert spec is not None, "a .py file always has a loader"
    assert spec.loader is not None, "a .py file always has a loader"
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and typing look a class's module up there
    try:
        spec.loader.exec_module(module)
    except (
        Exception
    ) as error:  # whatever the user's module raises is the user's to see, in one line
        del sys.modules[spec.name]
        raise RewardError(
            f"the reward file {path} fails on import: {type(error).__name__}: {error}"
        ) from error
    return module


def _from_module(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except Exception as error:  # likewise
        missing = isinstance(error, ModuleNotFoundError)
        hint = (
            "; a file that is not installed is named by its path, as in 'rewards/mine.py:function'"
            if missing
            else ""
        )
        raise RewardError(
            f"the reward module {name!r} cannot be imported: {type(error).__name__}: {error}{hint}"
        ) from error


def _function(module: ModuleType, module_name: str, function_name: str) -> RewardFunction:
    function = getattr(module, function_name, None)
    if callable(function):
        return cast(RewardFunction, function)
    functions = [
        name
        for name, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == module.__name__
    ]
    near = get_close_matches(function_name, functions, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise RewardError(
        f"{module_name} has no function {function_name!r}; its functions are "
        f"{', '.join(functions) or 'none'}{hint}"
    )


def _checked(function: RewardFunction, name: str) -> RewardFunction:
    if inspect.iscoroutinefunction(function):
        raise RewardError(
            f"the reward {name!r} is async; expected a plain function (prompt, completion) -> float"
        )
    try:
        signature = inspect.signature(function)
    except ValueError as error:
        raise RewardError(
            f"the reward {name!r} is built in; expected a Python function (prompt, completion) -> "
            "float"
        ) from error
    try:
        signature.bind("prompt", "completion")
    except TypeError as error:
        raise RewardError(
            f"the reward {name!r} must take (prompt, completion), but is "
            f"{name.rpartition(':')[2]}{signature}"
        ) from error
    return function
