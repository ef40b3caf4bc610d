"""What every table of a recipe is: a strict pydantic model.  Every default is written once, in its
table; every number has a range; rules across fields are in ``isobit.config.rules``.
"""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from isobit.config.limits import MAX_SEED

Device = Literal["auto", "cpu", "cuda"]
"""Where a command computes; ``auto`` takes a Hopper GPU where one is there that computes the
model.
"""


Seed = Annotated[int, Field(ge=0, le=MAX_SEED)]
"""What torch's and numpy's generators both take, and TOML can hold."""


class Strict(BaseModel):
    """Base of all configuration: an unknown key is an error, values are checked, nothing changes
    after loading.
    """

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        validate_default=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        serialize_by_alias=True,  # a key that Python has as a word of its own is another field
    )
