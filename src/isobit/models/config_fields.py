"""The values of a ``config.json`` with their types and bounds.

A config.json is somebody else's file: a number may be a string, a truth value, NaN or 10^30, and
Python's own conversions take most of that in silence.  Every value is read through ``ConfigFields``
and is what was expected, or a ModelError that names the key, the value and what was expected.
``null`` is a missing key.
"""

import reprlib
from typing import Any

from isobit.errors import ModelError

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 60


class ConfigFields:
    """One JSON object: keys are named with ``within``, the path of the object in its file."""

    def __init__(self, values: dict[str, Any], source: str, within: str = "") -> None:
        self.values, self.source, self.within = values, source, within

    def integer(self, key: str, least: int, most: int, default: int | None = None) -> int:
        """A whole number; without a default the key must be there."""
        value = self._value(key, default)
        if type(value) is not int or not least <= value <= most:
            raise self.refusal(key, f"expected a whole number from {least:,} to {most:,}")
        return value

    def optional_integer(self, key: str, least: int, most: int) -> int | None:
        """A whole number, or None where the key is missing."""
        return self.integer(key, least, most) if self.has(key) else None

    def number(self, key: str, least: float, most: float, default: float | None = None) -> float:
        """A finite number; without a default the key must be there."""
        value = self._value(key, default)
        # an int is compared as it is: as a float it may overflow
        if type(value) not in (int, float) or not least <= value <= most:
            raise self.refusal(key, f"expected a number from {least:g} to {most:g}")
        return float(value)

    def optional_number(self, key: str, least: float, most: float) -> float | None:
        """A finite number, or None where the key is missing."""
        return self.number(key, least, most) if self.has(key) else None

    def flag(self, key: str, default: bool) -> bool:
        """true or false."""
        value = self._value(key, default)
        if type(value) is not bool:
            raise self.refusal(key, "expected true or false")
        return value

    def text(self, key: str, default: str) -> str:
        """A string."""
        value = self._value(key, default)
        if type(value) is not str:
            raise self.refusal(key, "expected a string")
        return value

    def list_of(self, key: str, kind: type) -> list[Any] | None:
        """A list whose entries all are of one type, or None where the key is missing."""
        value = self.values.get(key)
        if value is None:
            return None
        if type(value) is not list or any(type(entry) is not kind for entry in value):
            raise self.refusal(key, f"expected a list of {kind.__name__}")
        return value

    def table(self, key: str) -> "ConfigFields | None":
        """An object, or None where the key is missing or the object empty."""
        value = self.values.get(key)
        if value is None:
            return None
        if type(value) is not dict:
            raise self.refusal(key, "expected an object")
        return ConfigFields(value, self.source, f"{self.within}{key}.") if value else None

    def has(self, key: str) -> bool:
        """Whether there is a value that is not null."""
        return self.values.get(key) is not None

    def refusal(self, key: str, reason: str = "") -> ModelError:
        """Names the key, its value (cut where it is long) and what was expected."""
        value = _SHORT.repr(self.values.get(key))
        refused = f"{self.source}: {self._name(key)} = {value} is not supported"
        return ModelError(f"{refused}; {reason}" if reason else refused)

    def _value(self, key: str, default: Any) -> Any:
        value = self.values.get(key)
        value = default if value is None else value
        if value is None:
            raise ModelError(f"{self.source}: the key {self.within + key!r} is missing")
        return value

    def _name(self, key: str) -> str:
        """Keys of our own are printable; those of a file may be anything."""
        name = self.within + key
        return name if name.isprintable() else _SHORT.repr(name)


def is_neutral(value: Any, neutral: tuple[Any, ...]) -> bool:
    """Whether a value switches a feature off: null, false, empty, or one of ``neutral``."""
    if type(value) in (int, float):
        return value in neutral
    return not value or (type(value) is str and value in neutral)
