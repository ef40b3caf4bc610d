"""The configuration as the page shows it: what was changed from the defaults first."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from isobit.config.run import RunConfig
from isobit.config.sft import SftConfig

_MOST_CHARACTERS = 400
"""Of a value."""

Row = tuple[str, str]
"""A dotted key and its value as JSON."""


@dataclass(frozen=True, slots=True)
class Settings:
    """A resolved configuration."""

    changed: tuple[Row, ...]
    """Keys whose values are not the defaults; empty where nobody knows the defaults."""
    others: tuple[Row, ...]


def view_settings(config: Any) -> Settings:
    """The configuration of a manifest, which may be of another version and then has only others."""
    rows = tuple(flatten(config)) if isinstance(config, dict) else ()
    changed = dict(flatten(_without_defaults(config)))
    return Settings(
        tuple(row for row in rows if row[0] in changed),
        tuple(row for row in rows if row[0] not in changed),
    )


def flatten(entry: Mapping[str, Any], above: str = "") -> Iterator[Row]:
    """Dotted names and values, one a leaf."""
    for key, value in entry.items():
        path = f"{above}{key}"
        if isinstance(value, dict) and value:
            yield from flatten(value, f"{path}.")
        elif value is not None or above:
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            more = len(text) - _MOST_CHARACTERS
            yield path, text if more <= 0 else f"{text[:_MOST_CHARACTERS]} [{more} more characters]"


def _without_defaults(config: Any) -> dict[str, Any]:
    for schema in (RunConfig, SftConfig):
        try:
            made = schema.model_validate(config)
        except (ValidationError, ValueError, TypeError, RecursionError):
            continue
        return made.model_dump(mode="json", by_alias=True, exclude_defaults=True)
    return {}
