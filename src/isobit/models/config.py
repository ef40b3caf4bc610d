"""The configuration of a decoder, read from a Hugging Face ``config.json`` and written to one.

A reward model (``...ForSequenceClassification`` with one label) is the same decoder with a score
head [1, C] instead of lm_head. Its score is that of a sequence's last token, trailing padding
(``pad_token_id``) not counted, as in transformers.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F

from isobit.config.lora import (
    ALL_LINEAR,
    DELTA_TARGETS,
    FUSED_TARGETS,
    LORA_TARGETS,
    SHARED_GATE,
    LoraConfig,
)
from isobit.config.model_shape import (
    MAX_HEADS,
    MAX_LAYERS,
    MAX_POSITIONS,
    MAX_VOCAB_SIZE,
    MAX_WIDTH,
    Family,
)
from isobit.kernels.operands import DeltaShape
from isobit.models.config_fields import ConfigFields
from isobit.models.families import ACTIVATIONS, FAMILIES
from isobit.models.family_keys import (
    UNSCALED,
    Experts,
    Multipliers,
    read_architecture,
    read_particulars,
    refuse_labels,
    refuse_unsupported,
)
from isobit.models.rope import (
    RopeScaling,
    read_rope,
    read_window_theta,
    rope_json,
)
from isobit.util.errors import ModelError

MAX_HEAD_DIM = 256


@dataclass(frozen=True, slots=True)
class Lora:
    """Adapters of low rank (arXiv 2106.09685), by the names of PEFT's ``LoraConfig``."""

    rank: int
    alpha: float
    targets: tuple[str, ...]
    """Names among ``KNOWN_TARGETS``."""
    rslora: bool = False

    @property
    def scale(self) -> float:
        """The factor of an adapter's output."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)

    @classmethod
    def of(
        cls, config: LoraConfig, model: "ModelConfig", recorded: Sequence[str] | None = None
    ) -> "Lora":
        """The adapters that a recipe names; ``recorded`` are the targets of its run, which count
        where the recipe says all: that were fewer in earlier versions. Raises ModelError for a
        target that the model does not have.
        """
        alpha = 2.0 * config.rank if config.alpha is None else config.alpha
        try:
            targets = config.modules(model.lora_targets)
        except ValueError as error:
            raise ModelError(
                f"lora.targets is {', '.join(config.targets)}, and a {model.family} model {error}"
            ) from None
        if recorded is not None and ALL_LINEAR in config.targets:
            targets = tuple(name for name in targets if name in recorded)
        return cls(config.rank, alpha, targets, config.rslora)

    def within(self, model: "ModelConfig") -> "Lora":
        """The same, without targets that the model does not have, which change nothing in it."""
        return replace(self, targets=tuple(n for n in model.lora_targets if n in self.targets))


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The shape and constants of one decoder."""

    family: Family
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    rms_epsilon: float
    rope_theta: float
    tied_embeddings: bool
    rope_scaling: RopeScaling | None = None
    partial_rotary_factor: float = 1.0
    """The share of a head, its first elements, that is turned by positions."""
    experts: Experts | None = None
    score_head: bool = False
    """Whether it is a reward model, with one score instead of lm_head's logits."""
    value_head: bool = False
    """Whether a head beside lm_head gives the value of each state (PPO's critic); no checkpoint has
    it.
    """
    pad_token_id: int | None = None
    """The token that does not count at the end of a sequence of a reward model."""
    sliding_window: int | None = None
    """The number of keys that a query sees, including its own; None: all before it."""
    full_layers: int = 0
    """The number of first layers without a window."""
    windowless_layers: tuple[int, ...] = ()
    """Further layers without one."""
    window_rope_theta: float | None = None
    """The theta of layers with a window, of whose positions nothing is scaled; None: that of the
    others.
    """
    no_rope_layers: tuple[int, ...] = ()
    """Layers whose queries and keys are not turned by their positions."""
    multipliers: Multipliers = UNSCALED
    delta: DeltaShape | None = None
    """The gated delta rule of ``delta_layers``."""
    delta_layers: tuple[int, ...] = ()
    """Layers with a gated delta rule in place of attention."""
    tokenizer_size: int | None = None
    """The number of lm_head's first rows that are tokens of the tokenizer, where there are more
    rows: the others are left out of the distribution. None: every row is in it.
    """

    lora: "Lora | None" = None
    """Adapters, which are trained while everything else stays as it is."""

    def __post_init__(self) -> None:
        if self.lora is not None:
            self._check_lora(self.lora)
        if self.num_heads % self.num_kv_heads:
            raise ModelError(
                f"{self.num_heads} query heads cannot share {self.num_kv_heads} KV heads evenly"
            )
        if not 0 < self.head_dim <= MAX_HEAD_DIM or self.head_dim % 2:
            raise ModelError(
                f"head size {self.head_dim} is not supported: it must be even and at most "
                f"{MAX_HEAD_DIM}"
            )
        if self.score_head and FAMILIES[self.family].reward_architecture is None:
            raise ModelError(
                f"a {self.family} model cannot give scores: transformers has no class for its "
                "reward models; take a model of another family"
            )
        if FAMILIES[self.family].is_hybrid != (self.delta is not None):
            has = "needs" if FAMILIES[self.family].is_hybrid else "has no"
            raise ModelError(f"a {self.family} decoder {has} gated delta nets")
        names = FAMILIES[self.family].experts
        if self.experts is not None and names is not None:
            needs_shared = names.shared_width is not None
            if needs_shared != (self.experts.shared_size is not None):
                has = "needs" if needs_shared else "has no"
                raise ModelError(f"a {self.family} decoder {has} shared expert")
        if self.experts is not None and self.experts.top_k > self.experts.count:
            raise ModelError(
                f"{self.experts.top_k} experts for each token are more than there are, "
                f"{self.experts.count}"
            )

    def _check_lora(self, lora: "Lora") -> None:
        mlp = LORA_TARGETS[4:]
        others = [name for name in self.lora_targets if name not in mlp]
        is_routed = self.experts is not None and self.experts.shared_size is None
        if is_routed and {*mlp} & {*lora.targets}:
            raise ModelError(
                f"LoRA does not train the experts of a {self.family} model, only its attention; "
                f"set lora.targets to {', '.join(others)}, or some of them"
            )
        if self.score_head:
            raise ModelError(
                "LoRA does not train a reward model, whose score head would have to be saved "
                "beside the adapters; leave [lora] out"
            )

    @property
    def lora_targets(self) -> tuple[str, ...]:
        """The linears that may be targets of adapters, but for those that ``_check_lora`` refuses:
        of a mixture's ``gate_proj`` it says why.
        """
        if self.is_fused:
            return FUSED_TARGETS
        if not self.delta_layers:
            return LORA_TARGETS
        joined = FAMILIES[self.family].joins_heads
        own = DELTA_TARGETS[4:] if joined else (*DELTA_TARGETS[:4], DELTA_TARGETS[-1])
        is_shared = self.experts is not None and self.experts.shared_size is not None
        return (*LORA_TARGETS, *own, *([SHARED_GATE] if is_shared else []))

    @property
    def num_drawn(self) -> int:
        """The number of tokens in the distribution, from id 0 on."""
        return self.tokenizer_size or self.vocab_size

    def with_tokenizer(self, tokens: int | None) -> "ModelConfig":
        """The configuration for a tokenizer whose largest id is ``tokens`` - 1; None for no
        tokenizer.
        """
        leaves_out = tokens is not None and tokens < self.vocab_size and not self.score_head
        return replace(self, tokenizer_size=tokens if leaves_out else None)

    @property
    def qk_norm(self) -> bool:
        """Whether each query and key head has an RMSNorm."""
        return FAMILIES[self.family].qk_norm == "each head"

    @property
    def wide_qk_norm(self) -> bool:
        """Whether all query heads together have an RMSNorm, and all key heads."""
        return FAMILIES[self.family].qk_norm == "all heads"

    @property
    def other_rope_layers(self) -> tuple[int, ...]:
        """Layers with ``RopeTable.other``."""
        is_same = self.rope_scaling is None and self.window_rope_theta is None
        if is_same or not FAMILIES[self.family].has_two_ropes:
            return self.no_rope_layers
        return tuple(n for n in range(self.num_layers) if self.window(n) is not None)

    @property
    def qkv_bias(self) -> bool:
        """Whether q, k and v have biases."""
        return FAMILIES[self.family].biases != "none"

    @property
    def has_biases(self) -> bool:
        """Whether o, the router and the experts have biases, too."""
        return FAMILIES[self.family].biases == "all"

    @property
    def has_sinks(self) -> bool:
        """Whether each query head has a sink."""
        return FAMILIES[self.family].has_sinks

    @property
    def has_output_gate(self) -> bool:
        """Whether the output of attention is multiplied by a sigmoid."""
        return FAMILIES[self.family].is_hybrid

    @property
    def attention_scaling(self) -> float:
        """The factor of the cosines and sines of rotary positions."""
        return 1.0 if self.rope_scaling is None else self.rope_scaling.attention_scaling

    @property
    def rotary_size(self) -> int:
        """The elements of a head that are turned by positions."""
        return int(self.head_dim * self.partial_rotary_factor)

    @property
    def is_fused(self) -> bool:
        """Whether checkpoints have q, k and v as one matrix, and gate and up."""
        return FAMILIES[self.family].is_fused

    @property
    def embedding_scale(self) -> float:
        """The factor of the embedding in a residual stream of 1 / ``multipliers.residual`` times
        the size, to which every x is added as it is.
        """
        scale = self.multipliers.embedding / self.multipliers.residual
        return scale * self.hidden_size**0.5 if FAMILIES[self.family].scaled_embeddings else scale

    @property
    def stream_epsilon(self) -> float:
        """``rms_epsilon`` of the norms of that stream."""
        return self.rms_epsilon / self.multipliers.residual**2

    @property
    def stacks_experts(self) -> bool:
        """Whether folders have all experts of a layer in one tensor."""
        names = FAMILIES[self.family].experts
        return self.experts is not None and names is not None and names.is_stacked

    @property
    def may_stack_experts(self) -> bool:
        """Whether folders may have them so, or always have."""
        names = FAMILIES[self.family].experts
        may = names is not None and (names.is_stacked or names.may_be_stacked)
        return self.experts is not None and may

    def window(self, layer: int) -> int | None:
        """The number of keys that a layer's query sees, including its own; None: all before it."""
        has_window = layer >= self.full_layers and layer not in self.windowless_layers
        return self.sliding_window if has_window else None

    def is_sparse(self, layer: int) -> bool:
        """Whether a layer has experts instead of an MLP."""
        return self.experts is not None and layer not in self.experts.dense_layers

    @classmethod
    def from_hf(cls, config: dict[str, Any], source: str) -> "ModelConfig":
        """Read a ``config.json``. Raises ModelError for what this decoder does not compute."""
        family, scores, fields = read_architecture(ConfigFields(config, source))
        refuse_unsupported(fields, family)
        if scores:
            refuse_labels(fields)
        heads = fields.integer("num_attention_heads", 1, MAX_HEADS)
        hidden = fields.integer("hidden_size", 1, MAX_WIDTH)
        positions = fields.integer("max_position_embeddings", 1, MAX_POSITIONS)
        layers = fields.integer("num_hidden_layers", 1, MAX_LAYERS)
        head_dim = FAMILIES[family].default_head_dim or hidden // heads
        head_dim = fields.integer("head_dim", 1, MAX_WIDTH, head_dim)
        theta, scaling, partial = read_rope(fields, FAMILIES[family], positions, head_dim)
        values: dict[str, Any] = {
            "family": family,
            "vocab_size": fields.integer("vocab_size", 1, MAX_VOCAB_SIZE),
            "hidden_size": hidden,
            "intermediate_size": fields.integer(FAMILIES[family].mlp_width, 1, MAX_WIDTH),
            "num_layers": layers,
            "num_heads": heads,
            "num_kv_heads": fields.integer("num_key_value_heads", 1, MAX_HEADS, heads),
            "head_dim": head_dim,
            "max_positions": positions,
            "rms_epsilon": fields.number("rms_norm_eps", 1e-30, 1),
            "rope_theta": theta,
            "tied_embeddings": fields.flag("tie_word_embeddings", FAMILIES[family].default_tied),
            "rope_scaling": scaling,
            "partial_rotary_factor": partial,
            "score_head": scores,
            # -1 is no token, as in folders of early Llama models
            "pad_token_id": fields.optional_integer("pad_token_id", -1, MAX_VOCAB_SIZE)
            if scores
            else None,
        }
        values |= read_particulars(fields, family, layers, head_dim)
        if values.get("sliding_window") is not None:
            local = read_window_theta(fields, FAMILIES[family], theta)
            values["window_rope_theta"] = None if local == theta else local
        try:
            return cls(**values)
        except ModelError as error:
            raise ModelError(f"{source}: {error}") from None

    def to_hf(self) -> dict[str, Any]:
        """A ``config.json`` that transformers loads."""
        traits = FAMILIES[self.family]
        key, activation = ACTIVATIONS[traits.gate]
        scores: dict[str, Any] = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
        scores |= {"num_labels": 1, "pad_token_id": self.pad_token_id}
        return (scores if self.score_head else {}) | {
            "architectures": [
                traits.reward_architecture if self.score_head else traits.architecture
            ],
            "model_type": self.family,
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            traits.mlp_width: self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "max_position_embeddings": self.max_positions,
            "rms_norm_eps": self.rms_epsilon,
            key: activation,
            **traits.constants,
            "attention_bias": self.has_biases,
            "tie_word_embeddings": self.tied_embeddings,
            **rope_json(
                (self.rope_theta, self.rope_scaling, self.partial_rotary_factor),
                self.window_rope_theta,
                traits,
            ),
            # a missing id is one of the family's, perhaps beyond the vocabulary
            **({"pad_token_id": self.pad_token_id} if traits.default_pad else {}),
            **self._window_json(),
            **self._delta_json(),
            **self._no_rope_json(),
            **self._multipliers_json(),
            **self._experts_json(),
            "dtype": "bfloat16",
        }

    def _window_json(self) -> dict[str, Any]:
        windows = FAMILIES[self.family].windows
        if windows == "every layer":
            return {"sliding_window": self.sliding_window}
        if windows == "layer types":
            seen = [self.window(layer) for layer in range(self.num_layers)]
            kinds = ["full_attention" if one is None else "sliding_attention" for one in seen]
            # transformers asks for a window even where no layer has one
            window = self.sliding_window or FAMILIES[self.family].default_window
            return {"sliding_window": window, "layer_types": kinds}
        if self.sliding_window is None:
            return {}
        upper = {"use_sliding_window": True, "max_window_layers": self.full_layers}
        return upper | {"sliding_window": self.sliding_window}

    def _delta_json(self) -> dict[str, Any]:
        if self.delta is None:
            return {}
        kinds = ("full_attention", "linear_attention")
        return {
            "layer_types": [kinds[n in self.delta_layers] for n in range(self.num_layers)],
            "linear_num_key_heads": self.delta.key_heads,
            "linear_num_value_heads": self.delta.value_heads,
            "linear_key_head_dim": self.delta.key_dim,
            "linear_value_head_dim": self.delta.value_dim,
            "linear_conv_kernel_dim": self.delta.width,
        }

    def _no_rope_json(self) -> dict[str, Any]:
        if FAMILIES[self.family].default_no_rope_interval is None:
            return {}
        rotary = [int(layer not in self.no_rope_layers) for layer in range(self.num_layers)]
        return {"no_rope_layers": rotary}

    def _multipliers_json(self) -> dict[str, Any]:
        factors, computed = self.multipliers, FAMILIES[self.family].computes
        if "query_pre_attn_scalar" in computed:
            attention = factors.attention
            scalar = self.head_dim if attention is None else round(attention**-2)
            return {"query_pre_attn_scalar": scalar}
        if "attention_multiplier" not in computed:
            return {}
        plain = self.head_dim**-0.5
        return {
            "embedding_multiplier": factors.embedding,
            "attention_multiplier": plain if factors.attention is None else factors.attention,
            "residual_multiplier": factors.residual,
            "logits_scaling": factors.logits_scaling,
        }

    def _experts_json(self) -> dict[str, Any]:
        experts, keys = self.experts, FAMILIES[self.family].experts
        if experts is None or keys is None:
            return {}
        content: dict[str, Any] = {
            keys.counts[0]: experts.count,
            keys.width: experts.intermediate_size,
        }
        content["num_experts_per_tok"] = experts.top_k
        if keys.shared_width is not None:
            content[keys.shared_width] = experts.shared_size
        if keys.renormalise is not None:
            content[keys.renormalise] = experts.renormalise
            content |= {"decoder_sparse_step": 1, "mlp_only_layers": list(experts.dense_layers)}
        return content


def inverse_frequencies(config: ModelConfig) -> torch.Tensor:
    """Rotary frequencies, FP64 [D/2]: theta^(-2i/R) of the R elements that are turned, scaled as
    the config says, and zeros for the others.
    """
    size, scaling = config.rotary_size, config.rope_scaling
    half = torch.arange(0, size, 2, dtype=torch.float64) / size
    frequencies = torch.exp(half * -math.log(config.rope_theta))
    if scaling is not None:
        frequencies = scaling.stretched(frequencies, config.rope_theta, config.max_positions)
    return F.pad(frequencies, (0, (config.head_dim - size) // 2))


def rotary_scales(config: ModelConfig) -> torch.Tensor:
    """The factors of cosines and sines, FP64 [D/2]: ``attention_scaling``, and what makes the
    scores of attention those of ``multipliers.attention``, since Q and K both have it.
    """
    wanted, scale = config.multipliers.attention, config.attention_scaling
    if wanted is not None:
        scale *= math.sqrt(wanted * math.sqrt(config.head_dim))
    scales = torch.ones(config.head_dim // 2, dtype=torch.float64)
    scales[: config.rotary_size // 2] = scale
    return scales


_FREQUENCY_ERROR = 4e-6
"""Largest relative error of theta^(-2i/D) that is computed in FP32."""


def rotary_buffer(
    config: ModelConfig, kind: str, positions: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """A buffer of the rotary embedding as old checkpoints store it, in FP64, and FP32's largest
    error: ``inv_freq`` and ``original_inv_freq`` [D/2], ``cos_cached`` and ``sin_cached``
    [positions, D].
    """
    own = replace(config, rope_scaling=None) if kind == "original_inv_freq" else config
    expected = inverse_frequencies(own)
    if kind.endswith("inv_freq"):
        return expected, expected * _FREQUENCY_ERROR
    angles = torch.outer(torch.arange(positions, dtype=torch.float64), expected).repeat(1, 2)
    expected = (angles.cos() if kind == "cos_cached" else angles.sin()) * config.attention_scaling
    return expected, (angles + 1) * _FREQUENCY_ERROR
