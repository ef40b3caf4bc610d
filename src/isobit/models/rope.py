"""Rotary positions: their scaling beyond the pretrained context, and how a config.json names it.

A rotary embedding turns pair i of a head of D elements by position * f_i, f_i = theta^(-2i/D).
Scaling by a factor s beyond the pretrained context, by ``rope_type``, in FP64 and as in
transformers' ``modeling_rope_utils``:

    linear    f_i / s for all i
    llama3    f_i / s where a turn is longer than the original context, f_i where it is much
              shorter, interpolated in between (Llama 3.1)
    yarn      the same with the interpolation along i, and all cosines and sines times an attention
              factor (Peng et al., arXiv 2309.00071)

transformers 5 has ``rope_parameters`` with ``rope_theta`` in it; before, ``rope_scaling`` (whose
kind was once called ``type``) and ``rope_theta`` were separate keys. A folder may have both, but
not with different values, since readers would differ in which they take.
"""

import math
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import torch

from isobit.config.model_shape import MAX_POSITIONS
from isobit.models.config_fields import ConfigFields

_LEAST_RAMP = 0.001  # the width of YaRN's interpolation if both borders fall on one pair


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """All positions divided by a factor."""

    rope_type: ClassVar[str] = "linear"
    attention_scaling: ClassVar[float] = 1.0  # the factor of all cosines and sines

    factor: float

    def stretched(self, frequencies: torch.Tensor, theta: float) -> torch.Tensor:
        """FP64 [D/2] -> [D/2]."""
        return frequencies / self.factor


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Llama 3.1's scaling of the low frequencies.

    A pair turns r = original_max_position_embeddings f_i / 2 pi times within the original context.
    If r is below ``low_freq_factor`` it is scaled, above ``high_freq_factor`` it is not.
    """

    rope_type: ClassVar[str] = "llama3"
    attention_scaling: ClassVar[float] = 1.0

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int

    def stretched(self, frequencies: torch.Tensor, theta: float) -> torch.Tensor:
        """FP64 [D/2] -> [D/2]."""
        turns = self.original_max_position_embeddings * frequencies / (2 * math.pi)
        width = self.high_freq_factor - self.low_freq_factor
        kept = ((turns - self.low_freq_factor) / width).clamp(0, 1)
        return frequencies * (kept + (1 - kept) / self.factor)


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """YaRN: pairs that turn more than ``beta_fast`` times within the original context are not
    scaled, those that turn less than ``beta_slow`` times are. The fields are those of a
    config.json; for None the default is computed.
    """

    rope_type: ClassVar[str] = "yarn"

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    """Whether the borders of the interpolation are moved outwards to whole pairs."""
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None

    @property
    def attention_scaling(self) -> float:
        """The factor of all cosines and sines, and squared of attention's logits."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self._temperature(self.mscale) / self._temperature(self.mscale_all_dim)
        return self._temperature(1.0)

    def stretched(self, frequencies: torch.Tensor, theta: float) -> torch.Tensor:
        """FP64 [D/2] -> [D/2]."""
        pairs = len(frequencies)
        low, high = (self._pair(turns, theta, pairs) for turns in (self.beta_fast, self.beta_slow))
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, 2 * pairs - 1)
        width = high - low if high != low else _LEAST_RAMP
        ramp = (torch.arange(pairs, dtype=torch.float64) - low) / width
        stretch = ramp.clamp(0, 1)
        return frequencies * (1 - stretch + stretch / self.factor)

    def _pair(self, turns: float, theta: float, pairs: int) -> float:
        """The pair, as a real number, that makes ``turns`` turns within the original context."""
        longest = self.original_max_position_embeddings / (2 * math.pi * turns)
        return pairs * math.log(longest) / math.log(theta)

    def _temperature(self, mscale: float) -> float:
        return 1.0 if self.factor <= 1 else 0.1 * mscale * math.log(self.factor) + 1.0


RopeScaling = LinearScaling | Llama3Scaling | YarnScaling
KINDS = ("default", "linear", "llama3", "yarn")
_MIN_THETA, _MAX_THETA = 1.01, 1e15
_MAX_FACTOR = 1e6
_MAX_SCALE = 100.0  # of YaRN's multipliers of cosines and sines
_KEYS = {
    "rope_type", "type", "rope_theta", "partial_rotary_factor", "factor",
    "original_max_position_embeddings", "low_freq_factor", "high_freq_factor", "beta_fast",
    "beta_slow", "truncate", "attention_factor", "mscale", "mscale_all_dim",
}  # fmt: skip
"""All known keys of the table; a kind ignores the keys of the others, as transformers does."""

Rope = tuple[float, RopeScaling | None]  # theta and scaling


def read_rope(fields: ConfigFields, default_theta: float, max_positions: int) -> Rope:
    """Read theta and scaling from a whole config.json. Raises ModelError for what the decoder does
    not compute.
    """
    keys = ("rope_parameters", "rope_scaling")
    tables = [table for table in map(fields.table, keys) if table is not None]
    read = [_read_table(table, fields, default_theta, max_positions) for table in tables]
    if not read:
        _refuse_partial(fields)
        return _theta(fields, default_theta), None
    if any(one != read[0] for one in read):
        raise fields.refusal("rope_scaling", "rope_parameters says something else")
    return read[0]


def rope_json(theta: float, scaling: RopeScaling | None) -> dict[str, Any]:
    """The keys of a config.json, for old and new readers."""
    if scaling is None:
        kind: dict[str, Any] = {"rope_type": "default"}
        older = {}
    else:
        fields = {key: value for key, value in asdict(scaling).items() if value is not None}
        kind = {"rope_type": scaling.rope_type} | fields
        older = {"rope_scaling": kind}
    return {"rope_theta": theta, "rope_parameters": kind | {"rope_theta": theta}} | older


def _read_table(
    table: ConfigFields, fields: ConfigFields, default_theta: float, max_positions: int
) -> Rope:
    unknown = sorted(table.values.keys() - _KEYS)
    if unknown:
        raise table.refusal(unknown[0], f"known are {', '.join(sorted(_KEYS))}")
    _refuse_partial(fields)
    _refuse_partial(table)
    theta = _theta(table, _theta(fields, default_theta))
    if fields.has("rope_theta") and theta != _theta(fields, default_theta):
        raise table.refusal("rope_theta", f"the file's own rope_theta is {_theta(fields, 0):g}")
    kind = table.text("rope_type", table.text("type", "default"))
    if table.has("type") and table.text("type", kind) != kind:
        raise table.refusal("type", f"rope_type is {kind!r}")
    if kind not in KINDS:
        key = "rope_type" if table.has("rope_type") else "type"
        raise table.refusal(key, f"supported are {', '.join(KINDS)}")
    return theta, _scaling(kind, table, fields, max_positions)


def _scaling(
    kind: str, table: ConfigFields, fields: ConfigFields, max_positions: int
) -> RopeScaling | None:
    if kind == "default":
        return None
    if kind == "linear":
        return LinearScaling(_factor(table))
    original = _original_positions(table, fields, max_positions)
    if kind == "yarn":
        return _yarn(table, original, max_positions)
    low = table.number("low_freq_factor", 1e-6, _MAX_FACTOR)
    high = table.number("high_freq_factor", 1e-6, _MAX_FACTOR)
    if low >= high:
        raise table.refusal("high_freq_factor", f"expected more than low_freq_factor, {low:g}")
    return Llama3Scaling(_factor(table), low, high, original)


def _yarn(table: ConfigFields, original: int, max_positions: int) -> YarnScaling:
    # zero is a missing value to transformers
    fast = table.number("beta_fast", 0, _MAX_FACTOR, 32.0) or 32.0
    slow = table.number("beta_slow", 0, _MAX_FACTOR, 1.0) or 1.0
    if slow > fast:
        raise table.refusal("beta_slow", f"expected at most beta_fast, {fast:g}")
    return YarnScaling(
        factor=_factor(table, default=max(max_positions / original, 1.0)),
        original_max_position_embeddings=original,
        beta_fast=fast,
        beta_slow=slow,
        truncate=table.flag("truncate", True),
        attention_factor=table.optional_number("attention_factor", 1e-3, _MAX_SCALE),
        mscale=table.optional_number("mscale", 0, _MAX_SCALE),
        mscale_all_dim=table.optional_number("mscale_all_dim", 0, _MAX_SCALE),
    )


def _factor(table: ConfigFields, default: float | None = None) -> float:
    return table.number("factor", 1, _MAX_FACTOR, default)


def _original_positions(table: ConfigFields, fields: ConfigFields, max_positions: int) -> int:
    """The original context, from the table or, in some folders, beside it; if missing, the context
    itself.
    """
    key = "original_max_position_embeddings"
    beside = fields.integer(key, 1, MAX_POSITIONS, max_positions)
    original = table.integer(key, 1, MAX_POSITIONS, beside)
    if fields.has(key) and original != beside:
        raise table.refusal(key, f"the file's own {key} is {beside:,}")
    return original


def _theta(fields: ConfigFields, default: float) -> float:
    return fields.number("rope_theta", _MIN_THETA, _MAX_THETA, default)


def _refuse_partial(fields: ConfigFields) -> None:
    if fields.number("partial_rotary_factor", 0, 1, 1.0) != 1:
        raise fields.refusal("partial_rotary_factor", "expected 1")
