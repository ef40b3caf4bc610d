"""The table ``precision``: the precision flow of rollout and training."""

import json
from collections.abc import Mapping
from typing import Any, Literal, get_args

from pydantic import Field, model_validator

from isobit.config.base import Strict
from isobit.config.model_shape import MAX_LAYERS
from isobit.util.errors import ConfigError

Preset = Literal[
    "fp32", "bf16", "fp8-rollout", "fp8-linear", "fp8", "int8-rollout", "int8-linear", "int8"
]
KvCalibration = Literal["trainer", "engine", "never"]


class PrecisionConfig(Strict):
    """The precision flow of both sides: a preset and changes to it. ``precision = "fp8"`` names a
    preset alone.
    """

    preset: Preset = "fp8"
    """fp8: linears, KV cache and attention in FP8 on both sides; fp8-linear: linears only;
    fp8-rollout: FP8 rollout only; int8, int8-linear and int8-rollout: likewise in INT8 behind a
    Hadamard matrix; bf16; fp32.
    """
    first_layers_bf16: int = Field(default=0, ge=0, le=MAX_LAYERS)
    """How many of the first decoder layers stay in BF16, with their KV cache and attention."""
    last_layers_bf16: int = Field(default=0, ge=0, le=MAX_LAYERS)
    """How many of the last decoder layers stay in BF16, with their KV cache and attention."""
    modules_bf16: tuple[str, ...] = ()
    """Linears kept in BF16, as ``layers.3.down_proj`` or, in every layer, ``down_proj``."""
    attention: Literal["fp8", "int8", "bf16"] | None = None
    """Format of Q, K, V and the KV cache, on the sides whose linears are in FP8 or INT8; by default
    the preset's.
    """
    dgrad: Literal["fp8", "int8"] | None = None
    """Format of the operands of DGrad, where linears are in INT8; by default FP8."""
    wgrad: Literal["fp8", "int8", "bf16"] | None = None
    """Format of the operands of WGrad, where linears are in FP8 or INT8; by default FP8 in FP8
    flows and BF16 in INT8 flows.
    """
    head: Literal["bf16", "int8"] | None = None
    """Format in which lm_head makes the logits, in all flows but fp32; by default BF16."""
    scales: Literal["power_of_two", "fp32"] = "power_of_two"
    """Scales of the linears' FP8 operands; those of Q, K and V are powers of two in FP8, and
    scales of INT8 are FP32.
    """
    kv_scales: Literal["per_token", "per_tensor"] = "per_token"
    """Scales of Q, K and V: per_token has one a token and head; per_tensor one a layer for each,
    which `isobit train` calibrates, in the presets fp8 and fp8-rollout.
    """
    kv_calibration: KvCalibration = "trainer"
    """The source of per-tensor scales: trainer is the forward of the last update, engine a forward
    of the next prompts after each update, and never one such forward before the first step.
    """

    @model_validator(mode="before")
    @classmethod
    def _from_name(cls, value: Any) -> Any:
        return {"preset": value} if isinstance(value, str) else value

    @property
    def name(self) -> str:
        return precision_name(self.model_dump(mode="json"))


def precision_name(table: Mapping[str, Any]) -> str:
    """How a recipe or ``--precision`` names a flow whose table this is, without what is as by
    default: ``fp8``, or ``{preset = "fp8", attention = "int8"}``.
    """
    defaults = PrecisionConfig().model_dump(mode="json")
    options = {key: value for key, value in table.items() if value != defaults.get(key)}
    if not options.keys() - {"preset"}:
        return str(table["preset"])
    text = ({"preset": table["preset"]} | options).items()
    return f"{{{', '.join(f'{key} = {json.dumps(value)}' for key, value in text)}}}"


def named_precision(precision: PrecisionConfig | str) -> PrecisionConfig:
    """The flow itself, or that of a preset's name. Raises ConfigError for an unknown name."""
    if isinstance(precision, PrecisionConfig):
        return precision
    if precision not in get_args(Preset):
        raise ConfigError(
            f"precision is {precision!r}; expected a PrecisionConfig or one of "
            f"{', '.join(map(repr, get_args(Preset)))}"
        )
    return PrecisionConfig.model_validate(precision)
