"""Keys and passwords that stand in a recipe as they are: ``run.json`` would have them, too, and
every checkpoint.  They belong into the environment (``isobit.rewards.secrets``).

Each process that grades imports this as it starts: it shall not wait for pydantic.
"""

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

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
