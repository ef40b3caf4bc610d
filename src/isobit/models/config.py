"""What a decoder is: the fields of a Hugging Face ``config.json`` that Llama 3, Qwen2 and Qwen3
dense models need.

The three families are one decoder: pre-norm, RMSNorm, rotary positions, grouped-query attention,
SwiGLU.  They differ in biases on q, k and v (Qwen2), RMSNorm of each query and key head (Qwen3),
tied or untied heads, and Llama 3's scaled rotary frequencies.

A reward model (``...ForSequenceClassification`` with one label) is the same decoder with a score
head [1, C] in the place of lm_head.  Its score is that of the last token of a sequence, trailing
padding (``pad_token_id``) not counted, as transformers has it.
"""

import math
from dataclasses import dataclass, fields
from typing import Any

import torch

from isobit.config.shape import Family
from isobit.errors import ModelError

MAX_HEAD_DIM = 256

ARCHITECTURES: dict[str, Family] = {
    "LlamaForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
REWARD_ARCHITECTURES: dict[str, Family] = {
    "LlamaForSequenceClassification": "llama",
    "Qwen2ForSequenceClassification": "qwen2",
    "Qwen3ForSequenceClassification": "qwen3",
}
_LABELS_BY_DEFAULT = 2
"""What transformers takes a classifier to have whose config.json says nothing."""


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """Llama 3's stretch of the low rotary frequencies ("rope_type": "llama3")."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True, slots=True)
class Experts:
    """The experts that stand in the place of the MLP in a mixture of experts."""

    count: int
    top_k: int
    """Experts that each token goes to."""
    intermediate_size: int
    """Of each expert."""
    renormalise: bool
    """Whether the weights of a token's experts add up to 1."""
    dense_layers: tuple[int, ...] = ()
    """Layers that have an ordinary MLP instead."""


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
    experts: Experts | None = None
    """Of a mixture of experts."""
    score_head: bool = False
    """A reward model: one score instead of lm_head's logits."""
    value_head: bool = False
    """Beside lm_head, the value of each state (PPO's critic); no checkpoint has it."""
    pad_token_id: int | None = None
    """Of a reward model alone: the token that does not count where it ends a sequence."""
    sliding_window: int | None = None
    """How many keys a query sees, its own included; None: all before it."""
    full_layers: int = 0
    """The first layers, to which the window does not apply."""

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ModelError(
                f"{self.num_heads} query heads cannot share {self.num_kv_heads} KV heads evenly"
            )
        if self.head_dim > MAX_HEAD_DIM or self.head_dim % 2:
            raise ModelError(
                f"head size {self.head_dim} is not supported: it must be even and at most "
                f"{MAX_HEAD_DIM}"
            )

    @property
    def qk_norm(self) -> bool:
        """Whether each query and key head has an RMSNorm."""
        return self.family in ("qwen3", "qwen3_moe")

    @property
    def qkv_bias(self) -> bool:
        """Whether q, k and v have biases."""
        return self.family == "qwen2"

    def window(self, layer: int) -> int | None:
        """How many keys a query of a layer sees, its own included; None: all before it."""
        return self.sliding_window if layer >= self.full_layers else None

    def is_sparse(self, layer: int) -> bool:
        """Whether a layer has experts in the place of the MLP."""
        return self.experts is not None and layer not in self.experts.dense_layers

    @classmethod
    def from_hf(cls, config: dict[str, Any], source: str) -> "ModelConfig":
        """Read a ``config.json``; raises ModelError, naming ``source``, for what this decoder
        does not compute.
        """
        architecture = (config.get("architectures") or ["(none)"])[0]
        known = ARCHITECTURES | REWARD_ARCHITECTURES
        if architecture not in known:
            raise ModelError(
                f"{source}: architecture {architecture} is not supported; supported are "
                f"{', '.join(known)}"
            )
        family, scores = known[architecture], architecture in REWARD_ARCHITECTURES
        _refuse_unsupported(config, family, source)
        if scores:
            _refuse_labels(config, source)
        try:
            heads = config["num_attention_heads"]
            return cls(
                family=family,
                vocab_size=config["vocab_size"],
                hidden_size=config["hidden_size"],
                intermediate_size=config["intermediate_size"],
                num_layers=config["num_hidden_layers"],
                num_heads=heads,
                num_kv_heads=config.get("num_key_value_heads") or heads,
                head_dim=config.get("head_dim") or config["hidden_size"] // heads,
                max_positions=config["max_position_embeddings"],
                rms_epsilon=config["rms_norm_eps"],
                rope_theta=_rope_parameters(config).get(
                    "rope_theta", config.get("rope_theta", 10000.0)
                ),
                tied_embeddings=config.get("tie_word_embeddings", False),
                rope_scaling=_rope_scaling(config, source),
                score_head=scores,
                pad_token_id=config.get("pad_token_id") if scores else None,
            )
        except KeyError as missing:
            raise ModelError(f"{source}: the key {missing} is missing") from None

    def to_hf(self) -> dict[str, Any]:
        """A ``config.json`` that transformers loads."""
        known = REWARD_ARCHITECTURES if self.score_head else ARCHITECTURES
        architecture = next(name for name, family in known.items() if family == self.family)
        rope: dict[str, Any] = {"rope_type": "default", "rope_theta": self.rope_theta}
        if self.rope_scaling is not None:
            rope |= {"rope_type": "llama3"} | {
                f.name: getattr(self.rope_scaling, f.name) for f in fields(RopeScaling)
            }
        of_scores = (
            {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}, "num_labels": 1}
            | {"pad_token_id": self.pad_token_id}
            if self.score_head
            else {}
        )
        return of_scores | {
            "architectures": [architecture],
            "model_type": self.family,
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "max_position_embeddings": self.max_positions,
            "rms_norm_eps": self.rms_epsilon,
            "hidden_act": "silu",
            "attention_bias": False,
            "tie_word_embeddings": self.tied_embeddings,
            "rope_theta": self.rope_theta,
            "rope_parameters": rope,
            "dtype": "bfloat16",
        }


def inverse_frequencies(config: ModelConfig) -> torch.Tensor:
    """Rotary frequencies, FP64 [D/2]: theta^(-2i/D), stretched for Llama 3 as in transformers'
    ``rope_type: llama3``.
    """
    half = torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim
    frequencies = torch.exp(half * -math.log(config.rope_theta))
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies
    rotations = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)
    smooth = (
        (rotations - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    ).clamp(0, 1)
    return frequencies * (smooth + (1 - smooth) / scaling.factor)


def _rope_parameters(config: dict[str, Any]) -> dict[str, Any]:
    """transformers 5 writes ``rope_parameters``, earlier ones ``rope_scaling`` beside
    ``rope_theta``.
    """
    return config.get("rope_parameters") or config.get("rope_scaling") or {}


def _rope_scaling(config: dict[str, Any], source: str) -> RopeScaling | None:
    parameters = _rope_parameters(config)
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind == "default":
        return None
    if kind != "llama3":
        raise ModelError(
            f"{source}: rope_type {kind!r} is not supported; supported are 'default' and 'llama3'"
        )
    return RopeScaling(**{f.name: parameters[f.name] for f in fields(RopeScaling)})


def _refuse_unsupported(config: dict[str, Any], family: Family, source: str) -> None:
    unsupported = {
        "hidden_act": config.get("hidden_act", "silu") != "silu",
        "attention_bias": bool(config.get("attention_bias", False)) and family != "qwen2",
        "mlp_bias": bool(config.get("mlp_bias", False)),
        "use_sliding_window": bool(config.get("use_sliding_window", False)),
        "quantization_config": "quantization_config" in config,
    }
    for key, refused in unsupported.items():
        if refused:
            raise ModelError(f"{source}: {key} = {config[key]!r} is not supported")


def _refuse_labels(config: dict[str, Any], source: str) -> None:
    """``num_labels`` as transformers reads it: said so, or the entries of ``id2label``."""
    named = config.get("id2label")
    labels = config.get("num_labels", _LABELS_BY_DEFAULT if named is None else len(named))
    if labels != 1:
        raise ModelError(
            f"{source}: num_labels = {labels} is not supported; a reward model gives one score "
            "(num_labels 1)"
        )
