"""Reward functions given from Python, as ``isobit.train(reward=f)``.

A configuration names its reward, and the processes that grade load it by that name:

    a function of a module that they can import    ``module:function``, as in a recipe
    any other: of a script or a notebook,          ``python:NAME@DIGEST``, and the processes are
    a lambda, a closure, an object                 handed a copy of it

A run that is resumed with another function has another digest (``isobit.rewards.digest``), and is
refused.
"""

import importlib.util
import re
import sys
from collections.abc import Callable
from types import FunctionType
from typing import Any
from weakref import WeakValueDictionary

from isobit.errors import RewardError
from isobit.rewards.digest import digest_of

PREFIX = "python:"
_DIGITS = 16


class GivenReward:
    """A function, found by its name for as long as somebody holds this object."""

    def __init__(self, function: Callable[..., Any], name: str) -> None:
        self.function, self.name = function, name


_GIVEN: WeakValueDictionary[str, GivenReward] = WeakValueDictionary()


def give_reward(function: Callable[..., Any]) -> GivenReward:
    """The reward under the name that the configuration has for it; whoever starts the run holds
    what is returned.
    """
    place = _place_of(function)
    if place is not None:
        return GivenReward(function, place)
    label = re.sub(r"\W", "", str(getattr(function, "__name__", type(function).__name__)))
    made = GivenReward(function, f"{PREFIX}{label}@{digest_of(function)[:_DIGITS]}")
    return _GIVEN.setdefault(made.name, made)


def given_reward(name: str) -> Callable[..., Any]:
    """The function with a name that begins with ``PREFIX``.  Raises RewardError where nobody holds
    it.
    """
    found = _GIVEN.get(name)
    if found is None:
        raise RewardError(
            f"the reward {name} was given from Python, which only a call from Python can give "
            "again: isobit.train(.., reward=the same function, resume=True); or put it into a "
            "file, and name it 'path/to/file.py:function'"
        )
    return found.function


def packed_reward(name: str) -> bytes:
    """The function as a grading process takes it.  Raises RewardError for one that cannot be handed
    to another process.
    """
    import dill

    try:
        return dill.dumps(given_reward(name), recurse=True)
    except RewardError:
        raise
    except Exception as error:  # whatever an object raises that is no value
        raise RewardError(
            f"the reward {name} cannot be handed to the processes that grade: "
            f"{type(error).__name__}: {error}; make what it holds (a client, a generator, an open "
            "file) inside the function, put it into a module and name it 'module:function', or set "
            "reward.in_process = true"
        ) from error


def unpack_reward(name: str, packed: bytes) -> GivenReward:
    """The copy of a grading process, which holds it.  Raises whatever unpickling raises."""
    import pickle

    made = GivenReward(pickle.loads(packed), name)  # noqa: S301  the trainer's own
    _GIVEN[name] = made
    return made


def _place_of(function: Callable[..., Any]) -> str | None:
    """``module:function`` of what a new process can import, and finds as this very object."""
    module, name = getattr(function, "__module__", None), getattr(function, "__name__", "")
    if not isinstance(function, FunctionType) or module in (None, "__main__"):
        return None
    if getattr(sys.modules.get(module), name, None) is not function:
        return None
    try:
        found = importlib.util.find_spec(module)
    except (ImportError, ValueError):  # a module that was made by hand
        return None
    file = getattr(sys.modules[module], "__file__", None)
    is_found = found is not None and found.origin is not None and found.origin == file
    return f"{module}:{name}" if is_found else None
