"""TOML text, read within bounds: of a recipe's file, or of a value on the command line.

Python's reader gives up on deep nesting and on whole numbers of thousands of digits with errors of
its own, and takes a file of any size.  Here all of it is a ConfigError that names the source.
"""

import tomllib
from pathlib import Path
from typing import Any

from isobit.errors import ConfigError

LARGEST_FILE = 1 << 20
"""Bytes.  A recipe has some hundreds."""
MAX_NESTING = 32
"""Tables and lists within one another."""


def read_toml(path: Path) -> dict[str, Any]:
    """The tables of a recipe, unchecked.  Raises ConfigError for a file that cannot be read as
    TOML.
    """
    try:
        with path.open("rb") as file:
            content = file.read(LARGEST_FILE + 1)
    except FileNotFoundError:
        raise ConfigError(
            f"{path}: no such file; name a TOML file, for example recipes/quickstart.toml"
        ) from None
    except (OSError, ValueError) as error:  # ValueError: a null byte in the name
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"{path}: cannot be read: {reason}") from None
    if len(content) > LARGEST_FILE:
        raise ConfigError(
            f"{path}: has more than {LARGEST_FILE:,} bytes; a configuration is a TOML file of some "
            "hundreds"
        )
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path}: not a text file in UTF-8 (byte {error.start}); a configuration is a TOML file"
        ) from None
    try:
        return parse_toml(text.replace("\r\n", "\n"), str(path))
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from None


def parse_toml(text: str, source: str) -> dict[str, Any]:
    """The tables of a text.  Raises ConfigError, naming ``source``, for what is nested too deeply
    and for a number of thousands of digits, TOMLDecodeError for what is no TOML.
    """
    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        raise
    except RecursionError:
        raise _too_deep(source) from None
    except ValueError:  # Python converts no integer of more than some thousand digits
        raise ConfigError(f"{source}: holds a number of too many digits") from None
    check_nesting(tables, source)
    return tables


def check_nesting(value: Any, source: str) -> None:
    """Raise ConfigError, naming ``source``, for tables and lists that lie too deep in one
    another.
    """
    level = [value]
    for _ in range(MAX_NESTING + 1):
        level = [
            below
            for one in level
            if isinstance(one, dict | list)
            for below in (one.values() if isinstance(one, dict) else one)
        ]
        if not level:
            return
    raise _too_deep(source)


def _too_deep(source: str) -> ConfigError:
    return ConfigError(
        f"{source}: tables or lists lie more than {MAX_NESTING} deep in one another; no key is "
        "nested so deeply"
    )
