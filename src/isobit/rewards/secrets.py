"""Keys and passwords that a reward is called with: they stand in an environment variable, and the
recipe has its name.

    options = { api_key = "env:JUDGE_KEY" }

The value is looked up where the reward is loaded, in its own process, and is written nowhere; in
what a reward raises it is shown as ``env:JUDGE_KEY`` again.
"""

import os
from collections.abc import Mapping
from typing import Any

from isobit.config.secrets import ENVIRONMENT
from isobit.errors import RewardError

_SHORTEST = 4
"""Characters of a value that is looked for in messages: a shorter one would be found in words."""
_shown: dict[str, str] = {}
"""What stands in messages in the place of each value."""


def from_environment(options: Mapping[str, Any], reward: str) -> dict[str, Any]:
    """The options with the values of the variables that they name.  Raises RewardError for one that
    is not set.
    """
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
