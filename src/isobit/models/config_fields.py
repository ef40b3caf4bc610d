"""Strict reading of the values of a ``config.json``."""

import reprlib
from collections.abc import Mapping
from typing import Any

from isobit.util.errors import ModelError

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 60


class ConfigFields:
    """One JSON object of a config.json, whose values may be anything: a string, NaN or 10^30 for a
    number. Each method returns a value of the expected type and bounds, or raises ModelError with
    the key, the value and what was expected. ``null`` is a missing key. ``within`` is the object's
    path in its file.
    """

    def __init__(self, values: dict[str, Any], source: str, within: str = "") -> None:
        self.values = values
        self.source = source
        self.within = within

    def filled(self, defaults: Mapping[str, Any]) -> "ConfigFields":
        """The same with values for keys that are missing."""
        missing = {key: value for key, value in defaults.items() if not self.has(key)}
        return ConfigFields(self.values | missing, self.source, self.within)

    def integer(self, key: str, least: int, most: int, default: int | None = None) -> int:
        """Required if there is no default."""
        value = self._value(key, default)
        if type(value) is not int or not least <= value <= most:
            raise self.refusal(key, f"expected a whole number from {least:,} to {most:,}")
        return value

    def optional_integer(self, key: str, least: int, most: int) -> int | None:
        return self.integer(key, least, most) if self.has(key) else None

    def number(self, key: str, least: float, most: float, default: float | None = None) -> float:
        """A finite number; required if there is no default."""
        value = self._value(key, default)
        # an int is compared as it is: as a float it may overflow
        if type(value) not in (int, float) or not least <= value <= most:
            raise self.refusal(key, f"expected a number from {least:g} to {most:g}")
        return float(value)

    def optional_number(self, key: str, least: float, most: float) -> float | None:
        """A finite number, or None."""
        return self.number(key, least, most) if self.has(key) else None

    def flag(self, key: str, default: bool) -> bool:
        value = self._value(key, default)
        if type(value) is not bool:
            raise self.refusal(key, "expected true or false")
        return value

    def text(self, key: str, default: str) -> str:
        value = self._value(key, default)
        if type(value) is not str:
            raise self.refusal(key, "expected a string")
        return value

    def list_of(self, key: str, kind: type) -> list[Any] | None:
        """A list of entries of one type, or None."""
        value = self.values.get(key)
        if value is None:
            return None
        if type(value) is not list or any(type(entry) is not kind for entry in value):
            raise self.refusal(key, f"expected a list of {kind.__name__}")
        return value

    def numbers(self, key: str, least: float, most: float, count: int) -> list[float]:
        """A list of so many finite numbers, which is required."""
        values = self._value(key, None)
        if type(values) is not list or len(values) != count:
            raise self.refusal(key, f"expected a list of {count} numbers")
        each = [ConfigFields({key: value}, self.source, self.within) for value in values]
        return [one.number(key, least, most) for one in each]

    def table(self, key: str) -> "ConfigFields | None":
        """An object, or None if it is missing or empty."""
        value = self.values.get(key)
        if value is None:
            return None
        if type(value) is not dict:
            raise self.refusal(key, "expected an object")
        return ConfigFields(value, self.source, f"{self.within}{key}.") if value else None

    def inner(self, key: str, shared: str) -> "ConfigFields":
        """The object ``key``, which is required, with this one's value of ``shared``. Raises
        ModelError where it has another itself.
        """
        table, value = self.table(key), self.values.get(shared)
        if table is None:
            raise ModelError(f"{self.source}: the key {self.within + key!r} is missing")
        if value is not None and table.has(shared) and table.values[shared] != value:
            raise self.refusal(shared, f"{key} has {_SHORT.repr(table.values[shared])}")
        return table.filled({} if value is None else {shared: value})

    def has(self, key: str) -> bool:
        """Whether there is a value that is not null."""
        return self.values.get(key) is not None

    def refusal(self, key: str, reason: str = "") -> ModelError:
        """Names the key, its value (shortened if long) and what was expected."""
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
        """The key as it can be printed; keys of a file may be anything."""
        name = self.within + key
        return name if name.isprintable() else _SHORT.repr(name)


def is_neutral(value: Any, neutral: tuple[Any, ...]) -> bool:
    """Whether a value switches a feature off: null, false, empty, or one of ``neutral``."""
    if type(value) in (int, float):
        return value in neutral
    return not value or (type(value) is str and value in neutral)
