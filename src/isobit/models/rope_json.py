"""Rotary positions in a ``config.json``: read with every name that they have had, and written.

transformers 5 has ``rope_parameters`` with ``rope_theta`` in it; before, ``rope_scaling`` (whose
kind was once called ``type``) stood beside ``rope_theta``.  A folder may have both; two that say
different things are refused, since what is computed would depend on who reads them.
"""

from dataclasses import asdict
from typing import Any

from isobit.config.shape import MAX_POSITIONS
from isobit.models.config_fields import ConfigFields
from isobit.models.rope_scaling import LinearScaling, Llama3Scaling, RopeScaling, YarnScaling

KINDS = ("default", "linear", "llama3", "yarn")
_MIN_THETA, _MAX_THETA = 1.01, 1e15
_MAX_FACTOR = 1e6
_MAX_SCALE = 100.0
"""Of YaRN's multipliers of cosines and sines."""
_KEYS = {
    "rope_type",
    "type",
    "rope_theta",
    "partial_rotary_factor",
    "factor",
    "original_max_position_embeddings",
    "low_freq_factor",
    "high_freq_factor",
    "beta_fast",
    "beta_slow",
    "truncate",
    "attention_factor",
    "mscale",
    "mscale_all_dim",
}
"""What may stand in the table; a kind leaves the keys of the others alone, as transformers does."""

Rope = tuple[float, RopeScaling | None]
"""theta and scaling."""


def read_rope(fields: ConfigFields, default_theta: float, max_positions: int) -> Rope:
    """From a whole config.json.  Raises ModelError for what the decoder does not compute."""
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
    """The keys of a config.json, for readers of either time."""
    if scaling is None:
        kind: dict[str, Any] = {"rope_type": "default"}
        older = {}
    else:
        given = {key: value for key, value in asdict(scaling).items() if value is not None}
        kind = {"rope_type": scaling.rope_type} | given
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
    """Stands in the table or, in some folders, beside it; left out, the context itself."""
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
