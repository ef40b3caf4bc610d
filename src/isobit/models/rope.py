"""Rotary positions: their scaling beyond the pretrained context, and how a config.json names it.

A rotary embedding turns pair i of a head of D elements by position * f_i, f_i = theta^(-2i/D).
Scaling by a factor s beyond the pretrained context, by ``rope_type``, in FP64 and as in
transformers' ``modeling_rope_utils``:

    linear    f_i / s for all i
    llama3    f_i / s where a turn is longer than the original context, f_i where it is much
              shorter, interpolated in between (Llama 3.1)
    yarn      the same with the interpolation along i, and all cosines and sines times an attention
              factor (Peng et al., arXiv 2309.00071)
    longrope  f_i / s_i with one of two lists of factors, and an attention factor (Ding et al.,
              arXiv 2402.13753)

With a ``partial_rotary_factor`` only the first elements of a head are turned, of which D is the
number.

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
from isobit.models.families import Traits

_LEAST_RAMP = 0.001  # the width of YaRN's interpolation if both borders fall on one pair


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """All positions divided by a factor."""

    rope_type: ClassVar[str] = "linear"
    attention_scaling: ClassVar[float] = 1.0  # the factor of all cosines and sines

    factor: float

    def stretched(self, frequencies: torch.Tensor, theta: float, positions: int) -> torch.Tensor:
        """FP64 [D/2] -> [D/2], for a context of so many positions."""
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

    def stretched(self, frequencies: torch.Tensor, theta: float, positions: int) -> torch.Tensor:
        """FP64 [D/2] -> [D/2], for a context of so many positions."""
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

    def stretched(self, frequencies: torch.Tensor, theta: float, positions: int) -> torch.Tensor:
        """FP64 [D/2] -> [D/2], for a context of so many positions."""
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


@dataclass(frozen=True, slots=True)
class LongRopeScaling:
    """LongRoPE. transformers takes ``long_factor`` for a sequence longer than the original context,
    else ``short_factor``, so that a token's key changes while its sequence grows. Here the context
    of the run decides, for sequences of every length.
    """

    rope_type: ClassVar[str] = "longrope"

    short_factor: tuple[float, ...]
    long_factor: tuple[float, ...]
    original_max_position_embeddings: int
    factor: float
    """The stretched context over the original one."""
    attention_factor: float | None = None

    @property
    def attention_scaling(self) -> float:
        """The factor of all cosines and sines, and squared of attention's logits."""
        if self.attention_factor is not None:
            return self.attention_factor
        original = self.original_max_position_embeddings
        return math.sqrt(1 + math.log(max(self.factor, 1.0)) / math.log(original))

    def stretched(self, frequencies: torch.Tensor, theta: float, positions: int) -> torch.Tensor:
        """FP64 [D/2] -> [D/2], for a context of so many positions."""
        is_long = positions > self.original_max_position_embeddings
        factors = self.long_factor if is_long else self.short_factor
        return frequencies / torch.tensor(factors, dtype=torch.float64)

    def about(self, positions: int) -> str | None:
        """A line about sequences of which transformers computes something else."""
        original = self.original_max_position_embeddings
        if positions <= original:
            return None
        return (
            f"isobit: long_factor of LongRoPE is for sequences of every length, because "
            f"max_position_embeddings is {positions:,}; transformers takes short_factor for up to "
            f"{original:,} tokens. A run in that length takes it with {original} and the factor "
            f"{self.factor:g} in config.json"
        )


RopeScaling = LinearScaling | Llama3Scaling | YarnScaling | LongRopeScaling
_OLD_NAMES = {"su": "longrope", "yarn": "longrope"}
"""What Phi-3 once called its kinds."""
_MIN_THETA, _MAX_THETA = 1.01, 1e15
_MAX_FACTOR = 1e6
_MAX_SCALE = 100.0  # of YaRN's multipliers of cosines and sines
_KEYS = {
    "rope_type", "type", "rope_theta", "partial_rotary_factor", "factor",
    "original_max_position_embeddings", "low_freq_factor", "high_freq_factor", "beta_fast",
    "beta_slow", "truncate", "attention_factor", "mscale", "mscale_all_dim", "short_factor",
    "long_factor",
}  # fmt: skip
"""All known keys of the table; a kind ignores the keys of the others, as transformers does."""
OF_IMAGES = {"mrope_section", "mrope_interleaved"}
"""Keys of positions in images, which those in text do not depend on."""
_OF_DEFAULT = {"rope_type", "rope_theta"}

Rope = tuple[float, RopeScaling | None, float]  # theta, scaling and partial_rotary_factor


def read_rope(fields: ConfigFields, traits: Traits, max_positions: int, head_dim: int) -> Rope:
    """Read theta, scaling and the share of a head that is turned from a whole config.json. Raises
    ModelError for what the decoder does not compute.
    """
    keys = ("rope_parameters", "rope_scaling")
    if traits.default_rope and not any(map(fields.has, keys)):
        fields = fields.filled({keys[0]: traits.default_rope})
    given = [table for table in map(fields.table, keys) if table is not None]
    tables = [_of_full_layers(table, fields, traits, head_dim) for table in given]
    read = [_read_table(table, fields, traits, max_positions, head_dim) for table in tables]
    if not read:
        return _theta(fields, traits.default_rope_theta), None, _partial(fields, traits, head_dim)
    if any(one != read[0] for one in read):
        raise fields.refusal("rope_scaling", "rope_parameters says something else")
    return read[0]


def read_window_theta(fields: ConfigFields, traits: Traits, theta: float) -> float:
    """The theta of layers with a window, in a family with layer types; ``theta`` is that of the
    others. Raises ModelError.
    """
    if traits.default_window_theta is None:
        return theta
    key, default = "rope_local_base_freq", traits.default_window_theta
    own = fields.number(key, _MIN_THETA, _MAX_THETA, default)
    tables = fields.table("rope_parameters")
    table = None if tables is None else tables.table("sliding_attention")
    if table is None:
        return own
    local = _theta(table, own)
    if fields.has(key) and local != own:
        raise table.refusal("rope_theta", f"{key} is {own:g}")
    return local


def rope_json(rope: Rope, window_theta: float | None, traits: Traits) -> dict[str, Any]:
    """The keys of a config.json, for old and new readers; ``window_theta`` is that of layers with a
    window, where it is another.
    """
    theta, scaling, partial = rope
    is_plain = partial == traits.default_partial == 1
    turned = {} if is_plain else {"partial_rotary_factor": partial}
    if scaling is None:
        kind: dict[str, Any] = {"rope_type": "default"}
        older: dict[str, Any] = {}
    else:
        fields = {
            key: list(value) if isinstance(value, tuple) else value
            for key, value in asdict(scaling).items()
            if value is not None
        }
        kind = {"rope_type": scaling.rope_type} | fields
        older = {"rope_scaling": kind}
    if isinstance(scaling, LongRopeScaling):  # Phi-3 reads it here alone
        older["original_max_position_embeddings"] = scaling.original_max_position_embeddings
    parameters = kind | {"rope_theta": theta} | turned
    if traits.has_two_ropes:
        local = window_theta or theta
        plain = {"rope_type": "default", "rope_theta": local}
        parameters = {"full_attention": parameters, "sliding_attention": plain}
        if traits.default_window_theta is not None:
            older["rope_local_base_freq"] = local
    return {
        "rope_theta": theta,
        "rope_parameters": parameters,
        **turned,
        **older,
    }


def _of_full_layers(
    table: ConfigFields, fields: ConfigFields, traits: Traits, head_dim: int
) -> ConfigFields:
    """The table of layers without a window, of two; the other scales nothing."""
    full = table.table("full_attention") if traits.has_two_ropes else None
    if full is None:
        if traits.default_window_theta is not None and table.within.endswith("rope_parameters."):
            raise fields.refusal("rope_parameters", "expected full_attention in it")
        return table
    if unknown := sorted(table.values.keys() - {"full_attention", "sliding_attention"}):
        raise table.refusal(unknown[0], "expected full_attention and sliding_attention alone")
    other = table.table("sliding_attention")
    if other is not None and traits.default_window_theta is not None:
        if other.text("rope_type", "default") != "default" or other.values.keys() - _OF_DEFAULT:
            raise table.refusal("sliding_attention", "expected the default kind, with a rope_theta")
        return full
    theta = _theta(full, _theta(fields, traits.default_rope_theta))
    if other is not None and _read_table(other, fields, traits, 1, head_dim) != (theta, None, 1.0):
        raise table.refusal("sliding_attention", f"expected the default kind, of theta {theta:g}")
    return full


def _read_table(
    table: ConfigFields, fields: ConfigFields, traits: Traits, max_positions: int, head_dim: int
) -> Rope:
    known = _KEYS | OF_IMAGES if traits.is_hybrid else _KEYS
    unknown = sorted(table.values.keys() - known)
    if unknown:
        raise table.refusal(unknown[0], f"known are {', '.join(sorted(_KEYS))}")
    has_own = table.has("partial_rotary_factor")
    partial = _partial(table if has_own else fields, traits, head_dim)
    if fields.has("partial_rotary_factor") and partial != _partial(fields, traits, head_dim):
        raise table.refusal("partial_rotary_factor", "the file's own is another")
    theta = _theta(table, _theta(fields, traits.default_rope_theta))
    if fields.has("rope_theta") and theta != _theta(fields, traits.default_rope_theta):
        raise table.refusal("rope_theta", f"the file's own rope_theta is {_theta(fields, 0):g}")
    kind = table.text("rope_type", table.text("type", "default"))
    if table.has("type") and table.text("type", kind) != kind:
        raise table.refusal("type", f"rope_type is {kind!r}")
    if "longrope" in traits.rope_kinds:
        kind = _OLD_NAMES.get(kind, kind)
    if kind not in traits.rope_kinds:
        key = "rope_type" if table.has("rope_type") else "type"
        raise table.refusal(key, f"supported are {', '.join(traits.rope_kinds)}")
    if kind == "longrope":
        return theta, _longrope(table, fields, max_positions, int(head_dim * partial) // 2), partial
    return theta, _scaling(kind, table, fields, max_positions), partial


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


def _longrope(
    table: ConfigFields, fields: ConfigFields, max_positions: int, pairs: int
) -> LongRopeScaling:
    key = "original_max_position_embeddings"
    original = fields.integer(key, 2, MAX_POSITIONS, 4096)
    if table.integer(key, 2, MAX_POSITIONS, original) != original:
        raise table.refusal(key, f"the file's own, which Phi-3 takes, is {original:,}")
    short, long = (
        tuple(table.numbers(key, 1e-3, _MAX_FACTOR, pairs))
        for key in ("short_factor", "long_factor")
    )
    return LongRopeScaling(
        short,
        long,
        original,
        _factor(table, default=max(max_positions / original, 1.0)),
        table.optional_number("attention_factor", 1e-3, _MAX_SCALE),
    )


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


def _partial(fields: ConfigFields, traits: Traits, head_dim: int) -> float:
    key = "partial_rotary_factor"
    partial = fields.number(key, 0, 1, traits.default_partial)
    if partial != 1 and not traits.partial_rotary:
        raise fields.refusal(key, "expected 1")
    turned = int(head_dim * partial)
    if partial != 1 and (turned % 2 or not turned):
        raise fields.refusal(key, f"{turned} of {head_dim} elements; expected an even number")
    return partial
