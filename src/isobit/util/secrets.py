"""Keys and passwords that stand in a recipe as they are: ``run.json`` would have them, too, and
every checkpoint.  They belong into the environment (``isobit.util.secrets``).

Each process that grades imports this as it starts: it shall not wait for pydantic.

Keys and passwords that a reward is called with: they stand in an environment variable, and the
recipe has its name.

    options = { api_key = "env:JUDGE_KEY" }

The value is looked up where the reward is loaded, in its own process, and is written nowhere; in
what a reward raises it is shown as ``env:JUDGE_KEY`` again.
"""

import os
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from isobit.util.errors import RewardError

if TYPE_CHECKING:
    from isobit.config.reward import RewardConfig


ENVIRONMENT = "env:"
"""What an option's value begins with that is the name of a variable."""
_NAMES = re.compile(
    r"(?i)(^|[_-])(api|access|auth|private|secret)[_-]?(key|token)$|"
    r"(^|[_-])(password|passwd|secret|credentials?|bearer)$"
)


def is_secret(name: str) -> bool:
    """Whether an option is called as keys and passwords are."""
    return _NAMES.search(name) is not None


def secret_notes(reward: "RewardConfig | None") -> list[str]:
    """What should be said of options with the name of a secret, whose values are there."""
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
        for name in _written(options)
    ]


def _written(options: Mapping[str, Any]) -> list[str]:
    return [
        name
        for name, value in options.items()
        if is_secret(name) and isinstance(value, str) and not value.startswith(ENVIRONMENT)
    ]


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
