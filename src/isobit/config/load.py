"""From a TOML file and dotted overrides to a checked ``RunConfig``, and back to TOML.

Defaults are overridden by the file, and the file by the overrides.  A relative path, in the file or
in an override, is relative to the directory in which the command runs, not to the file: the same
recipe then means the same files as the same command line.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import tomli_w
from pydantic import ValidationError

from isobit.config.base import Strict
from isobit.config.explain import config_error
from isobit.config.overrides import apply_overrides, parse_overrides
from isobit.config.run import RunConfig
from isobit.config.toml import read_toml

Model = TypeVar("Model", bound=Strict)


def load_config(path: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """The configuration of a run, from a TOML file and command-line words such as
    ``--training.steps 5``.

    Raises ConfigError for a file that cannot be read as TOML, and for every unknown key, missing
    key and value out of range, all in one message with their dotted paths.
    """
    return load_recipe(RunConfig, path, overrides)


def load_recipe(model: type[Model], path: Path, overrides: Sequence[str] = ()) -> Model:
    """A recipe of another command, read as its ``model``.  Raises ConfigError as ``load_config``
    does.
    """
    values = apply_overrides(read_toml(path), parse_overrides(overrides))
    return build(model, values, f"{path} with its overrides" if overrides else str(path))


def build(model: type[Model], values: Mapping[str, Any], source: str) -> Model:
    """Any part of the schema from nested tables; ``source`` names them in an error.  Raises
    ConfigError as ``load_config`` does.
    """
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise config_error(error, model, source) from None


def dump_config(config: Strict) -> str:
    """The resolved configuration as TOML, every default written out: ``load_config`` reads it back
    to an equal one.

    A key without a value (None) is left out, as TOML has no such thing.
    """
    return tomli_w.dumps(config.model_dump(mode="json", exclude_none=True))
