"""The table ``precision``: the precision flow of rollout and training."""

import json
from collections.abc import Mapping
from typing import Any, Literal, get_args

from pydantic import Field, ValidationInfo, field_validator, model_validator

from isobit.config.base import Strict
from isobit.config.model_shape import MAX_LAYERS
from isobit.util.errors import ConfigError

Preset = Literal[
    "fp32", "bf16", "fp8-rollout", "fp8-linear", "fp8", "int8-rollout", "int8-linear", "int8"
]
KvCalibration = Literal["trainer", "engine", "never"]
DEFAULT_PRESET: Preset = "int8"
_NOTICE = (
    'the recipe names no precision, which is "int8" by default since Isobit 0.1.0; it was "fp8" '
    'before, which precision = "fp8" keeps'
)
_INT8_BACKWARD = ("int8", "int8-linear")
"""Presets whose DGrad and WGrad are in INT8 where nothing else is said."""
_BEFORE = {"dgrad": "fp8", "wgrad": "bf16"}
"""What earlier versions took there, whose records have no value for it."""
_PLAIN_BACKWARD = ("fp32", "bf16", "fp8-rollout", "int8-rollout")
"""Presets in which DGrad and WGrad are not in 8 bits, whatever the record of an earlier version has
for them.
"""


class PrecisionConfig(Strict):
    """The precision flow of both sides: a preset and changes to it. ``precision = "int8"`` names a
    preset alone.
    """

    preset: Preset = DEFAULT_PRESET
    """int8: linears, KV cache and attention in INT8 behind a Hadamard matrix, on both sides;
    int8-linear: linears only; int8-rollout: INT8 rollout only; fp8, fp8-linear and fp8-rollout:
    likewise in FP8; bf16; fp32.
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
    """Format of the operands of DGrad, where linears are in INT8; by default INT8. A matrix of more
    than 133,144 output features, whose sums INT32 does not hold, has it in FP8.
    """
    wgrad: Literal["fp8", "int8", "bf16"] | None = None
    """Format of the operands of WGrad, where linears are in FP8 or INT8; by default theirs. A
    micro-batch of more than 133,144 tokens has it in BF16 in place of INT8.
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

    @field_validator("dgrad", "wgrad")
    @classmethod
    def _by_preset(cls, value: str | None, info: ValidationInfo) -> str | None:
        """A record of the flow has the value that counts, so that a later default changes none."""
        is_open = value is None and info.data.get("preset") in _INT8_BACKWARD
        return "int8" if is_open else value

    @property
    def notes(self) -> list[str]:
        """What a run is told at its start that names no preset."""
        return [] if "preset" in self.model_fields_set else [_NOTICE]

    @property
    def name(self) -> str:
        return precision_name(self.model_dump(mode="json"))


def precision_name(table: Mapping[str, Any]) -> str:
    """How a recipe or ``--precision`` names a flow whose table this is, without what is as by
    default: ``fp8``, or ``{preset = "fp8", attention = "int8"}``.
    """
    chosen = chosen_options(table)
    if not chosen.keys() - {"preset"}:
        return str(table["preset"])
    return f"{{{', '.join(f'{key} = {json.dumps(value)}' for key, value in chosen.items())}}}"


def chosen_options(table: Mapping[str, Any]) -> dict[str, Any]:
    """The preset of a flow's table, and what is not as by default for it."""
    defaults = _defaults(table["preset"])
    options = {key: value for key, value in table.items() if value != defaults.get(key)}
    return {"preset": table["preset"]} | options


def recorded_precision(table: Mapping[str, Any]) -> dict[str, Any]:
    """The table of a flow that a run recorded, with a value for every key: the one that counted
    where an earlier version recorded none.
    """
    preset = table["preset"]
    backward = _BEFORE if preset in _INT8_BACKWARD else {}
    given = {key: value for key, value in table.items() if value is not None or key not in backward}
    ignored = dict.fromkeys(_BEFORE) if preset in _PLAIN_BACKWARD else {}
    return {**_defaults(preset), **backward, **given, **ignored}


def _defaults(preset: str) -> dict[str, Any]:
    backward = dict.fromkeys(_BEFORE, "int8" if preset in _INT8_BACKWARD else None)
    return {**PrecisionConfig().model_dump(mode="json"), "preset": preset, **backward}


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
