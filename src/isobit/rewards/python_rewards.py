"""Reward functions that are passed from Python, as ``isobit.train(reward=f)``.

One that grading processes can import is named ``module:function``. Any other one (of a script or
notebook, a lambda, a closure, an object) is named ``python:NAME@DIGEST``, and the processes get a
copy. The digest is of what it does (``isobit.rewards.behaviour_digest``).
"""

import importlib
import importlib.util
import re
import sys
from collections.abc import Callable
from types import FunctionType
from typing import Any
from weakref import WeakValueDictionary

from isobit.rewards.behaviour_digest import digest_of
from isobit.util.errors import RewardError

PREFIX = "python:"
_DIGITS = 16


class GivenReward:
    """A function that is found by its name as long as this object exists."""

    def __init__(self, function: Callable[..., Any], name: str) -> None:
        self.function, self.name = function, name


_GIVEN: WeakValueDictionary[str, GivenReward] = WeakValueDictionary()


def give_reward(function: Callable[..., Any]) -> GivenReward:
    """The reward with its name for the configuration; the caller must hold it during the run."""
    place = place_of(function) if isinstance(function, FunctionType) else None
    if place is not None:
        return GivenReward(function, place)
    label = re.sub(r"\W", "", str(getattr(function, "__name__", type(function).__name__)))
    reward = GivenReward(function, f"{PREFIX}{label}@{digest_of(function)[:_DIGITS]}")
    return _GIVEN.setdefault(reward.name, reward)


def given_reward(name: str) -> Callable[..., Any]:
    """The function called ``name`` (with ``PREFIX``). Raises RewardError if it is not held."""
    reward = _GIVEN.get(name)
    if reward is None:
        raise RewardError(
            f"the reward {name} was given from Python; give the same function again with "
            "isobit.train(.., reward=f, resume=True), or name it 'path/to/file.py:function'"
        )
    return reward.function


def packed_reward(name: str) -> bytes:
    """The function's copy for a grading process. Raises RewardError if it cannot be copied."""
    import dill

    try:
        return dill.dumps(given_reward(name), recurse=True)
    except RewardError:
        raise
    except Exception as error:  # objects that cannot be pickled raise anything
        raise RewardError(
            f"the reward {name} cannot be handed to the processes that grade: "
            f"{type(error).__name__}: {error}; make clients, generators and open files inside the "
            "function, name it 'module:function', or set reward.in_process = true"
        ) from error


def unpack_reward(name: str, packed: bytes) -> GivenReward:
    """The copy in a grading process, which holds it. Raises whatever unpickling raises."""
    import pickle

    reward = GivenReward(pickle.loads(packed), name)  # noqa: S301  the trainer's own
    _GIVEN[name] = reward
    return reward


def place_of(function: Callable[..., Any]) -> str | None:
    """``module:name`` of a function or class if a new process can import this very object by that
    name.
    """
    module, name = getattr(function, "__module__", None), getattr(function, "__name__", "")
    if not isinstance(function, FunctionType | type) or module in (None, "__main__"):
        return None
    if getattr(sys.modules.get(module), name, None) is not function:
        return None
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):  # a module that was created by hand
        return None
    file = getattr(sys.modules[module], "__file__", None)
    is_found = spec is not None and spec.origin is not None and spec.origin == file
    return f"{module}:{name}" if is_found else None
