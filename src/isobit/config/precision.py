"""The table ``precision``: the formats of rollout and training together, as a preset and choices on
top of it.  A recipe that says ``precision = "fp8"`` names the preset alone.
"""

from typing import Any, Literal, get_args

from pydantic import Field, model_validator

from isobit.config.base import Strict
from isobit.config.shape import MAX_LAYERS
from isobit.errors import ConfigError

Preset = Literal["fp32", "bf16", "fp8-rollout", "fp8-linear", "fp8"]


class PrecisionConfig(Strict):
    """The precision flow of both sides: a preset and the choices on top of it."""

    preset: Preset = "fp8"
    """fp8: linears, KV cache and attention in FP8 on both sides; fp8-linear: linears only; bf16;
    fp32; fp8-rollout: FP8 rollout only.
    """
    first_layers_bf16: int = Field(default=0, ge=0, le=MAX_LAYERS)
    """Keep that many of the first decoder layers in BF16, KV cache and attention included."""
    last_layers_bf16: int = Field(default=0, ge=0, le=MAX_LAYERS)
    """Keep that many of the last decoder layers in BF16, KV cache and attention included."""
    modules_bf16: tuple[str, ...] = ()
    """Linears kept in BF16, by full path (``layers.3.down_proj``) or by name in every layer
    (``down_proj``).
    """
    wgrad: Literal["fp8", "bf16"] = "fp8"
    """Operands of the weight gradient's GEMM."""
    scales: Literal["power_of_two", "fp32"] = "power_of_two"
    """Scales of the linears' operands; those of Q, K and V are always powers of two."""

    @model_validator(mode="before")
    @classmethod
    def _from_name(cls, value: Any) -> Any:
        return {"preset": value} if isinstance(value, str) else value


def named_precision(precision: PrecisionConfig | str) -> PrecisionConfig:
    """The flow itself, or the one of a preset's name.  Raises ConfigError for another name."""
    if isinstance(precision, PrecisionConfig):
        return precision
    if precision not in get_args(Preset):
        raise ConfigError(
            f"precision is {precision!r}; expected a PrecisionConfig or one of "
            f"{', '.join(map(repr, get_args(Preset)))}"
        )
    return PrecisionConfig.model_validate(precision)
