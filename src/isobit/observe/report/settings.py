"""The configuration of a run as rows of dotted keys."""

from collections.abc import Iterator, Mapping
from typing import Any

from isobit.config.precision import chosen_options
from isobit.config.recipes import RunConfig, SftConfig
from isobit.observe.report.numbers import cut
from isobit.util.strict_json import json_text

_MOST_CHARACTERS = 400
"""Shown of a value."""

Row = tuple[str, str]
"""A dotted key and its value as JSON."""


def view_settings(config: Any) -> tuple[list[Row], list[Row]]:
    """The keys of a manifest's configuration that differ from the defaults, and all others.  The
    configuration may be another version's, whose defaults are not known: then none has changed.
    """
    rows = list(flatten(config)) if isinstance(config, dict) else []
    changed = dict(flatten(_without_defaults(config)))
    return (
        [row for row in rows if row[0] in changed],
        [row for row in rows if row[0] not in changed],
    )


def flatten(entry: Mapping[str, Any], above: str = "") -> Iterator[Row]:
    """Dotted names and values, one row per leaf."""
    for key, value in entry.items():
        path = f"{above}{key}"
        if isinstance(value, dict) and value:
            yield from flatten(value, f"{path}.")
        elif value is not None or above:
            text = value if isinstance(value, str) else json_text(value)
            yield path, cut(text, _MOST_CHARACTERS)


def _without_defaults(config: Any) -> dict[str, Any]:
    for schema in (RunConfig, SftConfig):
        try:
            made = schema.model_validate(config)
        except (ValueError, TypeError, RecursionError):  # ValidationError is a ValueError
            continue
        changed = made.model_dump(mode="json", by_alias=True, exclude_defaults=True)
        chosen = chosen_options(made.precision.model_dump(mode="json"))
        flow = {key: value for key, value in changed.get("precision", {}).items() if key in chosen}
        return {**changed, "precision": flow} if flow else changed
    return {}


def view_environment(manifest: Mapping[str, Any]) -> list[Row]:
    """The entries of a manifest on the machine, versions, model and data."""
    names = ("started", "device", "versions", "model", "data")
    return list(flatten({name: manifest.get(name) for name in names}))
