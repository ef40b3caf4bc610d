"""The families of checkpoints that the decoder computes, and what a checkpoint must not ask for.

All families are one decoder: pre-norm, RMSNorm, rotary positions, grouped-query attention, SwiGLU.
They differ in what ``FAMILIES`` says of each, and in their defaults for keys that a config.json
does not have.
"""

from dataclasses import dataclass
from typing import Any, Literal

from isobit.config.shape import Family


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """What a family of mixtures of experts calls their parts, in config.json and in a layer's
    tensors.
    """

    counts: tuple[str, ...]
    """Keys of the number of experts; the first is that of the published checkpoints, and
    transformers 5 writes the other for Qwen3.
    """
    width: str
    """The key of an expert's intermediate size."""
    renormalise: str | None
    """The key that says whether a token's weights add up to 1; None: they always do.  Families that
    have it may also have dense layers.
    """
    block: str
    """The module in a layer that has ``gate``, the router, and ``experts``."""
    gate: str
    """Of an expert, as the next two."""
    up: str
    down: str


@dataclass(frozen=True, slots=True)
class Traits:
    """What is peculiar to a family.

    ``default_...`` are what transformers takes where config.json has no such key.
    """

    architecture: str
    """The class of its language models."""
    reward_architecture: str | None
    """The class of its classifiers, where reward models of the family are understood."""
    qkv_bias: bool = False
    """Whether q, k and v have biases."""
    qk_norm: bool = False
    """Whether each query and key head has an RMSNorm."""
    default_head_dim: int | None = None
    """None: the hidden size over the number of heads."""
    default_rope_theta: float = 1e4
    windows: Literal["none", "every layer", "upper layers"] = "none"
    """Which layers a sliding window is for, where config.json switches one on."""
    default_window: int | None = None
    experts: ExpertNames | None = None
    """Of a mixture of experts."""


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
    "alibi": (),
    "attention_chunk_size": (),
    "attention_multiplier": (),
    "attn_logit_softcapping": (0,),
    "attn_temperature_tuning": (0,),
    "clip_qkv": (),
    "dual_chunk_attention_config": (),
    "embedding_multiplier": (1,),
    "final_logit_softcapping": (0,),
    "first_k_dense_replace": (0,),
    "interleave_moe_layer_step": (0, 1),
    "kv_lora_rank": (),
    "logit_scale": (1,),
    "logits_scaling": (1,),
    "mlp_bias": (),
    "moe_layer_freq": (1,),
    "n_group": (0, 1),
    "n_routed_experts": (0,),
    "n_shared_experts": (0,),
    "no_rope_layer_interval": (0,),
    "no_rope_layers": (),
    "num_shared_experts": (0,),
    "per_layer_config": (),
    "q_lora_rank": (),
    "qk_layernorm": (),
    "query_pre_attn_scalar": (),
    "residual_multiplier": (1,),
    "rope_interleaved": (),
    "rotary_dim": (),
    "rotary_pct": (1,),
    "routed_scaling_factor": (1,),
    "router_jitter_noise": (0,),
    "scale_depth": (),
    "scale_emb": (1,),
    "scoring_func": ("softmax",),
    "shared_expert_intermediate_size": (0,),
    "shared_intermediate_size": (0,),
    "sliding_window_pattern": (),
    "swiglu_limit": (),
    "topk_group": (0, 1),
    "use_bias": (),
    "use_expert_bias": (),
    "use_mrope": (),
    "use_parallel_residual": (),
    "use_qk_norm": (),
}
"""Keys of other families that would make a decoder another function, each with the values (beside
null and false) that leave it as it is.  A folder that asks for one is refused, though stock
transformers may read it as one of ours: what its author meant is not what we compute.
"""
