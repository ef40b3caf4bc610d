"""Secrets of a reward's options, which the recipe names by an environment variable:

    options = { api_key = "env:JUDGE_KEY" }

The value is read in the process that loads the reward and is written nowhere; in the reward's
errors it is shown as ``env:JUDGE_KEY``. A secret written into the recipe itself gets a warning.

Every grading process imports this module at its start, so it must not import pydantic.
"""

import os
import re
from collections.abc import Mapping
from typing import Any, Protocol

from isobit.util.errors import RewardError

ENVIRONMENT = "env:"
"""Prefix of an option's value that names a variable."""
_NAMES = re.compile(
    r"(?i)(^|[_-])(api|access|auth|private|secret)[_-]?(key|token)$|"
    r"(^|[_-])(password|passwd|secret|credentials?|bearer)$"
)


def is_secret(name: str) -> bool:
    return _NAMES.search(name) is not None


class HasOptions(Protocol):
    """A reward of a recipe, or a part of one."""

    @property
    def options(self) -> Mapping[str, Any]: ...


class RewardTable(HasOptions, Protocol):
    """The table ``[reward]`` of a recipe."""

    @property
    def parts(self) -> Mapping[str, HasOptions]: ...


def secret_notes(reward: RewardTable | None) -> list[str]:
    """Warnings for options with the name of a secret and a value in the recipe."""
    if reward is None:
        return []
    tables = {"reward.options": reward.options} | {
        f"reward.parts.{name}.options": part.options for name, part in reward.parts.items()
    }
    return [
        f"{table}.{name} is written to run.json and to every checkpoint as it stands; "
        f'{name} = "env:NAME" takes it from the environment variable NAME, and is all that is '
        "written"
        for table, options in tables.items()
        for name, value in options.items()
        if is_secret(name) and isinstance(value, str) and not value.startswith(ENVIRONMENT)
    ]


_SHORTEST = 4
"""Shorter values are not searched for in messages, since they may be parts of words."""
_shown: dict[str, str] = {}
"""What messages show in place of each value."""


def from_environment(options: Mapping[str, Any], reward: str) -> dict[str, Any]:
    """The options with their variables' values. Raises RewardError for one that is not set."""
    return {name: _value(name, given, reward) for name, given in options.items()}


def hidden(text: str) -> str:
    """A message without the values that came from the environment."""
    for value, name in _shown.items():
        text = text.replace(value, name)
    return text


def _value(option: str, given: Any, reward: str) -> Any:
    if not (isinstance(given, str) and given.startswith(ENVIRONMENT)):
        return given
    name = given.removeprefix(ENVIRONMENT)
    value = os.environ.get(name)
    if value is None:
        raise RewardError(
            f"the option {option} of the reward {reward!r} is {given!r}, but the environment "
            f"variable {name} is not set; export it before the run, also before --resume"
        )
    if len(value) >= _SHORTEST:
        _shown[value] = given
    return value
