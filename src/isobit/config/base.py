"""The base class of all tables of a recipe, and the largest numbers that a recipe or a command line
may hold. A larger number is a mistake, which would otherwise show as a crash of a library or a
machine without memory.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError

from isobit.util.files import at_home

MAX_COUNT = 1_000_000_000
"""Tokens, rows and pages."""
MAX_STEPS = 10_000_000
MAX_BATCH = 1_000_000
MAX_PROCESSES = 4096
MAX_THREADS = 1024
MAX_WAIT_S = 1e6
MAX_FACTOR = 1e6
"""Coefficients of either sign."""
MAX_SEED = (1 << 63) - 1
"""The largest seed that torch, numpy and TOML all take."""
Device = Literal["auto", "cpu", "cuda"]
"""``auto`` takes an NVIDIA GPU where one is there that computes the model."""
BackEnd = Literal["auto", "hopper", "triton"]
"""``auto`` is Hopper's kernels on Hopper, and those of every card since Ampere elsewhere."""
Seed = Annotated[int, Field(ge=0, le=MAX_SEED)]


def path_at_home(path: Any) -> Any:
    """A path with ``~`` at its beginning expanded, before validation."""
    if not isinstance(path, str | Path):
        return path
    if not str(path).startswith("~") and str(Path(path)).startswith("~"):
        return Path.cwd() / path  # ./~ is a folder of that name, and stays one when it is written
    try:
        return Path(at_home(str(path)))
    except RuntimeError as error:
        raise PydanticCustomError("home", "{reason}", {"reason": str(error)}) from None


def _name_at_home(name: str) -> str:
    return str(path_at_home(name)) if name.startswith("~") else name


HomePath = Annotated[Path, BeforeValidator(path_at_home)]
"""A path in which ``~`` at the beginning is the home directory."""
HomeName = Annotated[str, AfterValidator(_name_at_home)]
"""A name that may be a path: of a model, or of a file with a function."""


class Strict(BaseModel):
    """Base of all tables: it refuses unknown keys and values of another type, and is frozen."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        validate_default=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        serialize_by_alias=True,  # a key that Python has as a word of its own is another field
    )

    @model_validator(mode="before")
    @classmethod
    def _of_their_types(cls, values: Any) -> Any:
        """pydantic would take ``"20"``, ``true`` and ``"yes"`` for numbers and truth values."""
        if not isinstance(values, Mapping):
            return values
        fields = {field.alias or name: field for name, field in cls.model_fields.items()}
        return {
            key: _Other(value) if key in fields and _is_other(fields[key], value) else value
            for key, value in values.items()
        }


class _Other:
    """A value of another type than its key's, which no field takes."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __repr__(self) -> str:
        return repr(self._value)


def _is_other(field: FieldInfo, value: Any) -> bool:
    kinds = set(_leaves(field.annotation)) - {type(None)}
    if kinds == {bool}:
        return value is not None and not isinstance(value, bool)
    return bool(kinds) and kinds <= {int, float} and isinstance(value, str | bool)


def _leaves(annotation: Any) -> list[Any]:
    below = get_args(annotation)
    return [leaf for member in below for leaf in _leaves(member)] if below else [annotation]
