"""The families of checkpoints that the decoder computes.

All families are one decoder: RMSNorm in front of blocks, behind them or on both sides, rotary
positions (perhaps not in every layer), grouped-query attention, SwiGLU or GeGLU.
``FAMILIES`` has their differences and their defaults for missing keys.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from isobit.config.model_shape import Family
from isobit.kernels.operands import SWIGLU_ALPHA, SWIGLU_LIMIT, Gate


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
    router: str = "gate"  # its module in the block
    top_k: tuple[str, ...] = ("num_experts_per_tok",)
    """Keys of the number of experts for each token."""
    is_stacked: bool = False
    """Whether folders have all experts of a layer in one tensor (``isobit.models.stacked``)."""
    may_be_stacked: bool = False
    """Whether folders may have it either way; what is written has tensors of every expert."""
    shared_width: str | None = None
    """The key of the intermediate size of a shared expert; None: the family has none."""


@dataclass(frozen=True, slots=True)
class Traits:
    """The traits that distinguish a family. ``default_...`` are transformers' values of missing
    keys.
    """

    architecture: str  # the class of its language models
    reward_architecture: str | None  # the class of its reward models, if they are supported
    biases: Literal["none", "qkv", "all"] = "none"
    """The linears with biases: none, q, k and v, or also o, the router and the experts."""
    has_sinks: bool = False
    """Whether each query head has a sink (``isobit.kernels.spec.attention``)."""
    qk_norm: Literal["none", "each head", "all heads"] = "none"
    """The elements over which the RMSNorms of Q and of K are."""
    norms: Literal["in front", "behind", "both"] = "in front"
    """The places of a layer's norms: in front of attention and MLP, behind them, or both."""
    norm_offset: float = 0.0
    """What is added to the weights of every norm: 1 where their centre is zero."""
    gate: Gate = "silu"
    constants: Mapping[str, float] = field(default_factory=dict)
    """Keys with the one value that is computed, and that a missing one has."""
    scaled_embeddings: bool = False
    """Whether embeddings are multiplied by the root of the hidden size, in their own format."""
    default_head_dim: int | None = None  # None: the hidden size over the number of heads
    default_rope_theta: float = 1e4
    windows: Literal["none", "every layer", "upper layers", "layer types"] = "none"
    """The layers that a sliding window applies to, if config.json enables one. With layer types
    rotary scaling is for the others alone, but for ``scales_windows``.
    """
    scales_windows: bool = False
    default_window: int | None = None
    default_interval: int = 4
    """Layers whose number this divides have no window, where there are layer types."""
    default_window_theta: float | None = None
    """The theta of layers with a window; None: that of the others."""
    default_tied: bool = False
    default_pad: bool = False
    """Whether a missing ``pad_token_id`` is some id, perhaps beyond the vocabulary."""
    is_fused: bool = False
    """Whether checkpoints have q, k and v as one matrix, and gate and up."""
    partial_rotary: bool = False
    """Whether ``partial_rotary_factor`` is read."""
    default_partial: float = 1.0
    rope_kinds: tuple[str, ...] = ("default", "linear", "llama3", "yarn")
    default_rope: Mapping[str, Any] = field(default_factory=dict)
    """The table of rotary positions of a file without one."""
    computes: tuple[str, ...] = ()
    """Those of ``FEATURES`` that the family has."""
    default_no_rope_interval: int | None = None
    """Every layer with a number that this divides has no rotary positions, if config.json does not
    say which; None: all layers of the family have them.
    """
    experts: ExpertNames | None = None
    is_hybrid: bool = False
    """Whether layers named ``linear_attention`` have a gated delta rule, and the others a sigmoid
    gate on the output of attention, which q_proj makes beside each query.
    """
    joins_heads: bool = False
    """Whether checkpoints have all that a delta net reads as rows of one matrix, and all its gates
    as rows of another, head of keys after head of keys.
    """
    ignored: tuple[str, ...] = ()
    """Beginnings of names of tensors that folders may have and its class ignores."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Values of further keys that published files leave out."""
    outer: tuple[str, str] | None = None
    """Architecture and ``model_type`` of the larger model that this is the ``text_config`` of."""

    @property
    def has_two_ropes(self) -> bool:
        """Whether layers with a window have rotary positions of their own."""
        return self.windows == "layer types" and not self.scales_windows

    @property
    def mlp_width(self) -> str:
        """The key of the intermediate size of MLPs; without any, of the experts'."""
        only = self.experts is not None and self.experts.renormalise is None
        return self.experts.width if self.experts is not None and only else "intermediate_size"


_OF_DELTA_NETS: Mapping[str, Any] = {
    "max_position_embeddings": 32_768,
    "rms_norm_eps": 1e-6,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
_QWEN3_5 = Traits(
    "Qwen3_5ForCausalLM",
    None,
    qk_norm="each head",
    norm_offset=1.0,
    default_head_dim=256,
    partial_rotary=True,
    default_partial=0.25,
    default_interval=4,
    default_pad=True,
    is_hybrid=True,
    computes=("attn_output_gate",),
    ignored=("mtp.",),
    defaults={**_OF_DELTA_NETS, "vocab_size": 248_320, "num_key_value_heads": 4},
    outer=("Qwen3_5ForConditionalGeneration", "qwen3_5"),
)
_QWEN_EXPERTS = ExpertNames(
    counts=("num_experts", "num_local_experts"),
    width="moe_intermediate_size",
    renormalise="norm_topk_prob",
    block="mlp",
    gate="gate_proj",
    up="up_proj",
    down="down_proj",
)
_SHARED_EXPERT = replace(
    _QWEN_EXPERTS, shared_width="shared_expert_intermediate_size", may_be_stacked=True
)
_OF_SHARED = "attn_output_gate", "shared_expert_intermediate_size"

FAMILIES: dict[Family, Traits] = {
    "llama": Traits("LlamaForCausalLM", "LlamaForSequenceClassification"),
    "qwen2": Traits(
        "Qwen2ForCausalLM", "Qwen2ForSequenceClassification", biases="qkv", windows="upper layers"
    ),
    "qwen3": Traits(
        "Qwen3ForCausalLM",
        "Qwen3ForSequenceClassification",
        qk_norm="each head",
        default_head_dim=128,
        windows="upper layers",
    ),
    "mistral": Traits(
        "MistralForCausalLM",
        "MistralForSequenceClassification",
        windows="every layer",
        default_window=4096,
    ),
    "smollm3": Traits(
        "SmolLM3ForCausalLM",
        "SmolLM3ForSequenceClassification",
        default_rope_theta=2e6,
        default_tied=True,
        default_pad=True,
        computes=("no_rope_layers", "no_rope_layer_interval"),
        default_no_rope_interval=4,
    ),
    "granite": Traits(
        "GraniteForCausalLM",
        None,
        computes=(
            "embedding_multiplier",
            "attention_multiplier",
            "residual_multiplier",
            "logits_scaling",
        ),
    ),
    "phi3": Traits(
        "Phi3ForCausalLM",
        "Phi3ForSequenceClassification",
        default_pad=True,
        is_fused=True,
        partial_rotary=True,
        rope_kinds=("default", "longrope"),
        windows="every layer",
    ),
    "olmo2": Traits(
        "Olmo2ForCausalLM",
        "Olmo2ForSequenceClassification",
        qk_norm="all heads",
        norms="behind",
        default_pad=True,
    ),
    "olmo3": Traits(
        "Olmo3ForCausalLM",
        "Olmo3ForSequenceClassification",
        qk_norm="all heads",
        norms="behind",
        default_pad=True,
        default_rope_theta=5e5,
        windows="layer types",
        default_window=4096,
    ),
    "gemma3_text": Traits(
        "Gemma3ForCausalLM",
        "Gemma3TextForSequenceClassification",
        qk_norm="each head",
        norms="both",
        norm_offset=1.0,
        gate="gelu_tanh",
        scaled_embeddings=True,
        default_head_dim=256,
        default_rope_theta=1e6,
        windows="layer types",
        default_window=4096,
        default_interval=6,
        default_window_theta=1e4,
        default_tied=True,
        default_pad=True,
        computes=("query_pre_attn_scalar", "rope_local_base_freq", "sliding_window_pattern"),
        defaults={
            "vocab_size": 262_208,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "max_position_embeddings": 131_072,
            "rms_norm_eps": 1e-6,
            "query_pre_attn_scalar": 256,
        },
        outer=("Gemma3ForConditionalGeneration", "gemma3"),
    ),
    "qwen3_5_text": _QWEN3_5,
    "qwen3_5_moe_text": replace(
        _QWEN3_5,
        architecture="Qwen3_5MoeForCausalLM",
        default_pad=False,
        computes=_OF_SHARED,
        experts=replace(_SHARED_EXPERT, renormalise=None),
        defaults={**_OF_DELTA_NETS, "vocab_size": 248_320, "num_key_value_heads": 2},
        outer=("Qwen3_5MoeForConditionalGeneration", "qwen3_5_moe"),
    ),
    "qwen3_next": replace(
        _QWEN3_5,
        architecture="Qwen3NextForCausalLM",
        default_pad=False,
        computes=_OF_SHARED,
        joins_heads=True,
        experts=_SHARED_EXPERT,
        defaults={
            **_OF_DELTA_NETS,
            "vocab_size": 151_936,
            "num_key_value_heads": 2,
            "norm_topk_prob": True,
        },
        outer=None,
    ),
    "qwen3_moe": Traits(
        "Qwen3MoeForCausalLM",
        None,
        qk_norm="each head",
        experts=_QWEN_EXPERTS,
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
    "gpt_oss": Traits(
        "GptOssForCausalLM",
        None,
        biases="all",
        has_sinks=True,
        gate="clamped_silu",
        constants={"swiglu_alpha": SWIGLU_ALPHA, "swiglu_limit": SWIGLU_LIMIT},
        default_head_dim=64,
        default_rope_theta=150_000.0,
        windows="layer types",
        scales_windows=True,
        default_window=128,
        default_interval=2,
        default_rope={
            "rope_type": "yarn",
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "truncate": False,
        },
        experts=ExpertNames(
            counts=("num_local_experts", "num_experts"),
            width="intermediate_size",
            renormalise=None,
            block="mlp",
            gate="gate_proj",
            up="up_proj",
            down="down_proj",
            router="router",
            top_k=("num_experts_per_tok", "experts_per_token"),
            is_stacked=True,
        ),
    ),
}
"""The families by the ``model_type`` of a config.json."""

ARCHITECTURES: dict[str, Family] = {
    traits.architecture: family for family, traits in FAMILIES.items()
}
OUTER_ARCHITECTURES: dict[str, Family] = {
    traits.outer[0]: family for family, traits in FAMILIES.items() if traits.outer is not None
}
REWARD_ARCHITECTURES: dict[str, Family] = {
    traits.reward_architecture: family
    for family, traits in FAMILIES.items()
    if traits.reward_architecture is not None
}

ACTIVATIONS: dict[Gate, tuple[str, str]] = {
    "silu": ("hidden_act", "silu"),
    "gelu_tanh": ("hidden_activation", "gelu_pytorch_tanh"),
    "clamped_silu": ("hidden_act", "silu"),
}
"""The key of a config.json that names the function of the gate, and its name."""

FEATURES: dict[str, tuple[Any, ...]] = {
    "alibi": (), "attention_chunk_size": (), "attention_multiplier": (),
    "attn_logit_softcapping": (0,), "attn_output_gate": (),
    "attn_temperature_tuning": (0,), "clip_qkv": (),
    "dual_chunk_attention_config": (), "embedding_multiplier": (1,),
    "final_logit_softcapping": (0,), "first_k_dense_replace": (0,),
    "interleave_moe_layer_step": (0, 1), "kv_lora_rank": (), "logit_scale": (1,),
    "logits_scaling": (1,), "mlp_bias": (), "moe_layer_freq": (1,), "n_group": (0, 1),
    "n_routed_experts": (0,), "n_shared_experts": (0,), "no_rope_layer_interval": (0,),
    "no_rope_layers": (), "num_shared_experts": (0,), "per_layer_config": (), "q_lora_rank": (),
    "qk_layernorm": (), "query_pre_attn_scalar": (), "residual_multiplier": (1,),
    "rope_interleaved": (), "rope_local_base_freq": (), "rotary_dim": (), "rotary_pct": (1,),
    "routed_scaling_factor": (1,), "router_jitter_noise": (0,), "scale_depth": (),
    "scale_emb": (1,), "scoring_func": ("softmax",), "shared_expert_intermediate_size": (0,),
    "shared_intermediate_size": (0,), "sliding_window_pattern": (), "swiglu_alpha": (),
    "swiglu_limit": (),
    "topk_group": (0, 1), "use_bias": (), "use_bidirectional_attention": (),
    "use_expert_bias": (), "use_mrope": (), "use_parallel_residual": (), "use_qk_norm": (),
}  # fmt: skip
"""Keys of other families that would make the decoder another function, each with the values (beside
null and false) that do not. A folder that asks for one is refused, even if stock transformers reads
it as one of our families: what its author meant is not what we compute.
"""
