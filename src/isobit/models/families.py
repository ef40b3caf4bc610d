"""The families of checkpoints that the decoder computes, and strict reading of a ``config.json``.

All families are one decoder: pre-norm, RMSNorm, rotary positions, grouped-query attention, SwiGLU.
``FAMILIES`` has their differences and their defaults for missing keys.

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
import reprlib
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Literal

import torch

from isobit.config.model_shape import MAX_POSITIONS, Family
from isobit.util.errors import ModelError


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """A family's names of the parts of a mixture of experts, in config.json and in tensors."""

    counts: tuple[str, ...]
    """Keys of the number of experts: the published checkpoints', then transformers 5's."""
    width: str  # the key of an expert's intermediate size
    renormalise: str | None
    """The key that says whether a token's weights are scaled to sum to 1; None: always. Families
    that have it may also have dense layers.
    """
    block: str  # the module in a layer that has `gate`, the router, and `experts`
    gate: str  # matrices of an expert: `gate`, `up` and `down`
    up: str
    down: str


@dataclass(frozen=True, slots=True)
class Traits:
    """What distinguishes a family. ``default_...`` are transformers' values of missing keys."""

    architecture: str  # the class of its language models
    reward_architecture: str | None  # the class of its reward models, if they are supported
    qkv_bias: bool = False
    qk_norm: bool = False
    default_head_dim: int | None = None  # None: the hidden size over the number of heads
    default_rope_theta: float = 1e4
    windows: Literal["none", "every layer", "upper layers"] = "none"
    """Which layers a sliding window applies to, if config.json enables one."""
    default_window: int | None = None
    experts: ExpertNames | None = None


FAMILIES: dict[Family, Traits] = {
    "llama": Traits("LlamaForCausalLM", "LlamaForSequenceClassification"),
    "qwen2": Traits(
        "Qwen2ForCausalLM", "Qwen2ForSequenceClassification", qkv_bias=True, windows="upper layers"
    ),
    "qwen3": Traits(
        "Qwen3ForCausalLM",
        "Qwen3ForSequenceClassification",
        qk_norm=True,
        default_head_dim=128,
        windows="upper layers",
    ),
    "mistral": Traits(
        "MistralForCausalLM",
        "MistralForSequenceClassification",
        windows="every layer",
        default_window=4096,
    ),
    "qwen3_moe": Traits(
        "Qwen3MoeForCausalLM",
        None,
        qk_norm=True,
        experts=ExpertNames(
            counts=("num_experts", "num_local_experts"),
            width="moe_intermediate_size",
            renormalise="norm_topk_prob",
            block="mlp",
            gate="gate_proj",
            up="up_proj",
            down="down_proj",
        ),
    ),
    "mixtral": Traits(
        "MixtralForCausalLM",
        None,
        default_rope_theta=1e6,
        windows="every layer",
        experts=ExpertNames(
            counts=("num_local_experts", "num_experts"),
            width="intermediate_size",
            renormalise=None,
            block="block_sparse_moe",
            gate="w1",
            up="w3",
            down="w2",
        ),
    ),
}
"""By the ``model_type`` of a config.json."""

ARCHITECTURES: dict[str, Family] = {
    traits.architecture: family for family, traits in FAMILIES.items()
}
REWARD_ARCHITECTURES: dict[str, Family] = {
    traits.reward_architecture: family
    for family, traits in FAMILIES.items()
    if traits.reward_architecture is not None
}

FEATURES: dict[str, tuple[Any, ...]] = {
    "alibi": (), "attention_chunk_size": (), "attention_multiplier": (),
    "attn_logit_softcapping": (0,), "attn_temperature_tuning": (0,), "clip_qkv": (),
    "dual_chunk_attention_config": (), "embedding_multiplier": (1,),
    "final_logit_softcapping": (0,), "first_k_dense_replace": (0,),
    "interleave_moe_layer_step": (0, 1), "kv_lora_rank": (), "logit_scale": (1,),
    "logits_scaling": (1,), "mlp_bias": (), "moe_layer_freq": (1,), "n_group": (0, 1),
    "n_routed_experts": (0,), "n_shared_experts": (0,), "no_rope_layer_interval": (0,),
    "no_rope_layers": (), "num_shared_experts": (0,), "per_layer_config": (), "q_lora_rank": (),
    "qk_layernorm": (), "query_pre_attn_scalar": (), "residual_multiplier": (1,),
    "rope_interleaved": (), "rotary_dim": (), "rotary_pct": (1,), "routed_scaling_factor": (1,),
    "router_jitter_noise": (0,), "scale_depth": (), "scale_emb": (1,), "scoring_func": ("softmax",),
    "shared_expert_intermediate_size": (0,), "shared_intermediate_size": (0,),
    "sliding_window_pattern": (), "swiglu_limit": (), "topk_group": (0, 1), "use_bias": (),
    "use_expert_bias": (), "use_mrope": (), "use_parallel_residual": (), "use_qk_norm": (),
}  # fmt: skip
"""Keys of other families that would make the decoder another function, each with the values (beside
null and false) that do not. A folder that asks for one is refused, even if stock transformers reads
it as one of our families: what its author meant is not what we compute.
"""


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


_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 60


class ConfigFields:
    """One JSON object of a config.json, whose values may be anything: a string, NaN or 10^30 for a
    number. Each method returns a value of the expected type and bounds, or raises ModelError with
    the key, the value and what was expected. ``null`` is a missing key. ``within`` is the object's
    path in its file.
    """

    def __init__(self, values: dict[str, Any], source: str, within: str = "") -> None:
        self.values, self.source, self.within = values, source, within

    def integer(self, key: str, least: int, most: int, default: int | None = None) -> int:
        """Required if there is no default."""
        value = self._value(key, default)
        if type(value) is not int or not least <= value <= most:
            raise self.refusal(key, f"expected a whole number from {least:,} to {most:,}")
        return value

    def optional_integer(self, key: str, least: int, most: int) -> int | None:
        return self.integer(key, least, most) if self.has(key) else None

    def number(self, key: str, least: float, most: float, default: float | None = None) -> float:
        """A finite number; required if there is no default."""
        value = self._value(key, default)
        # an int is compared as it is: as a float it may overflow
        if type(value) not in (int, float) or not least <= value <= most:
            raise self.refusal(key, f"expected a number from {least:g} to {most:g}")
        return float(value)

    def optional_number(self, key: str, least: float, most: float) -> float | None:
        """A finite number, or None."""
        return self.number(key, least, most) if self.has(key) else None

    def flag(self, key: str, default: bool) -> bool:
        value = self._value(key, default)
        if type(value) is not bool:
            raise self.refusal(key, "expected true or false")
        return value

    def text(self, key: str, default: str) -> str:
        value = self._value(key, default)
        if type(value) is not str:
            raise self.refusal(key, "expected a string")
        return value

    def list_of(self, key: str, kind: type) -> list[Any] | None:
        """A list of entries of one type, or None."""
        value = self.values.get(key)
        if value is None:
            return None
        if type(value) is not list or any(type(entry) is not kind for entry in value):
            raise self.refusal(key, f"expected a list of {kind.__name__}")
        return value

    def table(self, key: str) -> "ConfigFields | None":
        """An object, or None if it is missing or empty."""
        value = self.values.get(key)
        if value is None:
            return None
        if type(value) is not dict:
            raise self.refusal(key, "expected an object")
        return ConfigFields(value, self.source, f"{self.within}{key}.") if value else None

    def has(self, key: str) -> bool:
        """Whether there is a value that is not null."""
        return self.values.get(key) is not None

    def refusal(self, key: str, reason: str = "") -> ModelError:
        """Names the key, its value (shortened if long) and what was expected."""
        value = _SHORT.repr(self.values.get(key))
        refused = f"{self.source}: {self._name(key)} = {value} is not supported"
        return ModelError(f"{refused}; {reason}" if reason else refused)

    def _value(self, key: str, default: Any) -> Any:
        value = self.values.get(key)
        value = default if value is None else value
        if value is None:
            raise ModelError(f"{self.source}: the key {self.within + key!r} is missing")
        return value

    def _name(self, key: str) -> str:
        """The key as it can be printed; keys of a file may be anything."""
        name = self.within + key
        return name if name.isprintable() else _SHORT.repr(name)


def is_neutral(value: Any, neutral: tuple[Any, ...]) -> bool:
    """Whether a value switches a feature off: null, false, empty, or one of ``neutral``."""
    if type(value) in (int, float):
        return value in neutral
    return not value or (type(value) is str and value in neutral)


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
    """From a whole config.json. Raises ModelError for what the decoder does not compute."""
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
    """From the table or, in some folders, beside it; if missing, the context itself."""
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
