"""The keys of a ``config.json`` by which families differ, and what is refused: experts, windows,
layers without rotary positions, multipliers.
"""

from dataclasses import dataclass
from typing import Any

from isobit.config.model_shape import (
    MAX_DELTA_DIM,
    MAX_EXPERTS,
    MAX_HEADS,
    MAX_LAYERS,
    MAX_POSITIONS,
    MAX_WIDTH,
    Family,
)
from isobit.kernels.operands import DeltaShape
from isobit.models.config_fields import ConfigFields, is_neutral
from isobit.models.families import (
    ACTIVATIONS,
    ARCHITECTURES,
    FAMILIES,
    FEATURES,
    OUTER_ARCHITECTURES,
    REWARD_ARCHITECTURES,
    Traits,
)
from isobit.util.errors import ModelError

_LABELS_BY_DEFAULT = 2  # the number of labels in transformers if config.json does not give it


@dataclass(frozen=True, slots=True)
class Experts:
    """The experts of a mixture of experts, which replace the MLP."""

    count: int
    top_k: int
    """Experts per token."""
    intermediate_size: int
    """The intermediate size of each expert."""
    renormalise: bool
    """Whether the weights of a token's experts are scaled to sum to 1."""
    dense_layers: tuple[int, ...] = ()
    """Layers that have an ordinary MLP."""
    shared_size: int | None = None
    """The intermediate size of a further expert, of all tokens; None: there is none."""


@dataclass(frozen=True, slots=True)
class Multipliers:
    """The factors by which Granite scales a decoder:

    h = embedding * table[ids]      h = h + residual * x      logits / logits_scaling
    scores = attention * q . k      None: 1 / sqrt(head_dim), as in other families
    """

    embedding: float = 1.0
    attention: float | None = None
    residual: float = 1.0
    logits_scaling: float = 1.0


UNSCALED = Multipliers()


def read_architecture(fields: ConfigFields) -> tuple[Family, bool, ConfigFields]:
    """The family, whether it is a reward model, and the keys of the decoder: of a larger model
    those of its ``text_config``. What the family's files leave out is filled in.
    """
    known = ARCHITECTURES | REWARD_ARCHITECTURES | OUTER_ARCHITECTURES
    named = fields.list_of("architectures", str) or ["(none)"]
    if len(named) != 1 or named[0] not in known:
        supported = f"supported are {', '.join([*ARCHITECTURES, *OUTER_ARCHITECTURES])}"
        raise fields.refusal(
            "architectures", f"{supported}, and of most families ...ForSequenceClassification"
        )
    family = known[named[0]]
    outer = FAMILIES[family].outer
    if outer is not None and named[0] == outer[0]:
        if fields.text("model_type", outer[1]) != outer[1]:
            raise fields.refusal("model_type", f"expected {outer[1]!r}, as architectures says")
        fields = fields.inner("text_config", "tie_word_embeddings")
    if fields.text("model_type", family) != family:
        raise fields.refusal("model_type", f"expected {family!r}, as architectures says")
    fields = fields.filled(FAMILIES[family].defaults)
    return family, named[0] in REWARD_ARCHITECTURES, fields


def refuse_unsupported(fields: ConfigFields, family: Family) -> None:
    """Refuse keys that would make the decoder another function, and features that are not built."""
    _, activation = ACTIVATIONS[FAMILIES[family].gate]
    for key, _ in ACTIVATIONS.values():
        if fields.text(key, activation) != activation:
            raise fields.refusal(key, f"expected {activation!r}")
    traits = FAMILIES[family]
    has_biases = fields.flag("attention_bias", traits.biases == "all")
    if has_biases != (traits.biases == "all") and traits.biases != "qkv":
        raise fields.refusal("attention_bias")
    for key, value in traits.constants.items():
        if fields.number(key, 0, 1e6, value) != value:
            raise fields.refusal(key, f"expected {value:g}")
    if fields.has("quantization_config"):
        raise fields.refusal("quantization_config")
    computed = {*traits.computes, *traits.constants}
    for key, neutral in FEATURES.items():
        if key not in computed and not is_neutral(fields.values.get(key), neutral):
            raise fields.refusal(key)


def refuse_labels(fields: ConfigFields) -> None:
    """``num_labels`` as transformers reads it: given, or the number of entries of ``id2label``."""
    named = fields.values.get("id2label")
    counted = len(named) if isinstance(named, dict | list) else _LABELS_BY_DEFAULT
    labels = fields.integer("num_labels", 0, MAX_WIDTH, counted)
    if labels != 1:
        raise ModelError(
            f"{fields.source}: num_labels = {labels} is not supported; a reward model gives one "
            "score (num_labels 1)"
        )


def read_particulars(
    fields: ConfigFields, family: Family, layers: int, head_dim: int
) -> dict[str, Any]:
    """What ``ModelConfig`` has for some families alone, by its names."""
    found = _read_window(fields, family, layers)
    found["no_rope_layers"] = _read_no_rope(fields, family, layers)
    found["experts"] = _read_experts(fields, family, layers)
    if FAMILIES[family].is_hybrid:
        found |= _read_delta(fields, FAMILIES[family], layers)
    if "attention_multiplier" in FAMILIES[family].computes:
        found["multipliers"] = _read_multipliers(fields, head_dim)
    if "query_pre_attn_scalar" in FAMILIES[family].computes:
        scalar = fields.integer("query_pre_attn_scalar", 1, MAX_WIDTH)
        if scalar != head_dim:
            found["multipliers"] = Multipliers(attention=scalar**-0.5)
    return found


def _read_window(fields: ConfigFields, family: Family, layers: int) -> dict[str, Any]:
    """``sliding_window``, and the layers without one."""
    traits = FAMILIES[family]
    if traits.windows == "layer types":
        return _read_layer_types(fields, traits, layers)
    window, full_layers = traits.default_window, 0
    if traits.windows == "every layer":
        if "sliding_window" in fields.values:  # null is none
            window = fields.optional_integer("sliding_window", 1, MAX_POSITIONS)
    elif fields.flag("use_sliding_window", False):
        if traits.windows == "none":
            raise fields.refusal("use_sliding_window")
        window = fields.optional_integer("sliding_window", 1, MAX_POSITIONS)
        full_layers = fields.integer("max_window_layers", 0, MAX_LAYERS)
    elif family in ("llama", "granite", "olmo2") and fields.has("sliding_window"):
        raise fields.refusal("sliding_window")
    if window is None or full_layers >= layers:
        window, full_layers = None, 0
    kinds = None if traits.is_hybrid else fields.list_of("layer_types", str)
    windowed = 0 if window is None else layers - full_layers
    expected = ["full_attention"] * (layers - windowed) + ["sliding_attention"] * windowed
    if kinds is not None and kinds != expected:
        raise fields.refusal("layer_types", "sliding_window and its neighbours say otherwise")
    return {"sliding_window": window, "full_layers": full_layers}


def _read_delta(fields: ConfigFields, traits: Traits, layers: int) -> dict[str, Any]:
    """The layers with a gated delta rule, and its heads."""
    if not fields.flag("attn_output_gate", True):
        raise fields.refusal("attn_output_gate", "expected true")
    interval = fields.integer("full_attention_interval", 1, MAX_LAYERS, traits.default_interval)
    kinds = _kinds_of_layers(fields, layers, interval, "linear_attention")
    if "full_attention" not in kinds:
        key = "layer_types" if fields.has("layer_types") else "full_attention_interval"
        raise fields.refusal(key, "expected full_attention for one layer or more")
    delta = DeltaShape(
        fields.integer("linear_num_key_heads", 1, MAX_HEADS),
        fields.integer("linear_num_value_heads", 1, MAX_HEADS),
        fields.integer("linear_key_head_dim", 1, MAX_DELTA_DIM),
        fields.integer("linear_value_head_dim", 1, MAX_DELTA_DIM),
        fields.integer("linear_conv_kernel_dim", 2, 16),
    )
    if delta.value_heads % delta.key_heads:
        raise fields.refusal("linear_num_value_heads", f"expected a multiple of {delta.key_heads}")
    found = tuple(layer for layer, kind in enumerate(kinds) if kind == "linear_attention")
    return {"delta": delta, "delta_layers": found}


def _read_layer_types(fields: ConfigFields, traits: Traits, layers: int) -> dict[str, Any]:
    window, interval = traits.default_window, traits.default_interval
    if "sliding_window_pattern" in traits.computes:
        interval = fields.integer("sliding_window_pattern", 1, MAX_LAYERS, interval)
    if "sliding_window" in fields.values:  # null is none
        window = fields.optional_integer("sliding_window", 1, MAX_POSITIONS)
    kinds = _kinds_of_layers(fields, layers, interval, "sliding_attention")
    full = tuple(layer for layer, kind in enumerate(kinds) if kind == "full_attention")
    if len(full) == layers:
        return {}
    if window is None:
        raise fields.refusal("sliding_window", "layer_types names layers that have one")
    return {"sliding_window": window, "windowless_layers": full}


def _kinds_of_layers(fields: ConfigFields, layers: int, interval: int, other: str) -> list[str]:
    """``layer_types``, by default full_attention in every layer with a number that ``interval``
    divides, and the ``other`` kind elsewhere.
    """
    kinds = fields.list_of("layer_types", str)
    if kinds is None:
        full = every_layer(interval, layers)
        kinds = ["full_attention" if n in full else other for n in range(layers)]
    if len(kinds) != layers or not {*kinds} <= {other, "full_attention"}:
        raise fields.refusal(
            "layer_types", f"expected {other} or full_attention for each of {layers}"
        )
    return kinds


def every_layer(interval: int, layers: int) -> tuple[int, ...]:
    """Every layer with a number, from 1 on, that ``interval`` divides."""
    return tuple(range(interval - 1, layers, interval))


def _read_no_rope(fields: ConfigFields, family: Family, layers: int) -> tuple[int, ...]:
    """A list with 1 for every layer that has rotary positions, or else the interval of those that
    have not.
    """
    default = FAMILIES[family].default_no_rope_interval
    if default is None:
        return ()
    rotary = fields.list_of("no_rope_layers", int)
    if rotary is None:
        interval = fields.integer("no_rope_layer_interval", 1, MAX_LAYERS, default)
        return every_layer(interval, layers)
    if len(rotary) < layers or not {*rotary} <= {0, 1}:
        raise fields.refusal("no_rope_layers", f"expected a 0 or 1 for each of {layers} layers")
    return tuple(layer for layer in range(layers) if not rotary[layer])


def _read_multipliers(fields: ConfigFields, head_dim: int) -> Multipliers:
    names = "embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling"
    embedding, attention, *others = (fields.number(name, 1e-6, 1e6, 1.0) for name in names)
    return Multipliers(embedding, None if attention == head_dim**-0.5 else attention, *others)


_OF_EVERY_MIXTURE = {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}
"""Keys that some families read, and their meaning in the others."""


def _read_experts(fields: ConfigFields, family: Family, layers: int) -> Experts | None:
    keys = FAMILIES[family].experts
    if keys is None:
        return None
    count = _read_alike(fields, keys.counts, MAX_EXPERTS)
    renormalise, dense = True, tuple[int, ...]()
    if keys.renormalise is not None:
        renormalise = fields.flag(keys.renormalise, False)
        step = fields.integer("decoder_sparse_step", 1, MAX_LAYERS, 1)
        dense_by_name = fields.list_of("mlp_only_layers", int) or []
        dense = tuple(n for n in range(layers) if n in dense_by_name or (n + 1) % step)
    else:
        for key, only in _OF_EVERY_MIXTURE.items():
            if fields.has(key) and fields.values[key] != only:
                raise fields.refusal(key, f"expected {only!r}")
    shared = keys.shared_width
    return Experts(
        count=count,
        top_k=_read_alike(fields, keys.top_k, count),
        intermediate_size=fields.integer(keys.width, 1, MAX_WIDTH),
        renormalise=renormalise,
        dense_layers=dense,
        shared_size=None if shared is None else fields.integer(shared, 1, MAX_WIDTH),
    )


def _read_alike(fields: ConfigFields, keys: tuple[str, ...], most: int) -> int:
    """A number that may have several keys, at least one of them."""
    named = [key for key in keys if fields.has(key)] or [keys[0]]
    value, *others = (fields.integer(key, 1, most) for key in named)
    if any(other != value for other in others):
        raise fields.refusal(named[1], f"{named[0]} is {value:,}")
    return value
