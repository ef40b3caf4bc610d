"""The table ``from_scratch``: the shape of a decoder that starts from random weights."""

from typing import Literal

from pydantic import Field

from isobit.config.base import Strict

Family = Literal[
    "llama", "mistral", "qwen2", "qwen3", "smollm3", "granite", "phi3", "olmo2", "olmo3",
    "gemma3_text", "qwen3_5_text", "qwen3_5_moe_text", "qwen3_next", "qwen3_moe", "mixtral",
    "gpt_oss",
]  # fmt: skip
"""The ``model_type`` of a Hugging Face ``config.json``."""
MIXTURES: tuple[Family, ...] = (
    "qwen3_moe", "mixtral", "gpt_oss", "qwen3_5_moe_text", "qwen3_next",
)  # fmt: skip
"""Families with experts."""
SHARING: tuple[Family, ...] = ("qwen3_5_moe_text", "qwen3_next")
"""Those of them with a shared expert."""
HYBRIDS: tuple[Family, ...] = ("qwen3_5_text", *SHARING)
"""Families with gated delta nets."""
WINDOWED: tuple[Family, ...] = ("mistral", "phi3", "mixtral")
"""Families whose layers may have a sliding window."""
MAX_VOCAB_SIZE = 1 << 22
MAX_WIDTH = 1 << 20
"""Elements of a hidden state, a head, or an MLP."""
MAX_LAYERS = 1000
MAX_HEADS = 1024
MAX_DELTA_DIM = 256
"""Elements of a head of a gated delta net."""
MAX_EXPERTS = 512
MAX_POSITIONS = 1 << 20


class ModelShape(Strict):
    """A decoder with random weights; most names are those of a Hugging Face ``config.json``."""

    family: Family = "qwen3"
    hidden_size: int = Field(gt=0, le=MAX_WIDTH)
    intermediate_size: int = Field(gt=0, le=MAX_WIDTH)
    num_layers: int = Field(gt=0, le=MAX_LAYERS)
    num_heads: int = Field(gt=0, le=MAX_HEADS)
    num_kv_heads: int | None = Field(default=None, gt=0, le=MAX_HEADS)
    """Heads of K and V; by default ``num_heads``."""
    head_dim: int | None = Field(default=None, gt=0, le=MAX_WIDTH)
    """Elements of a head; by default ``hidden_size`` over ``num_heads``."""
    vocab_size: int | None = Field(default=None, gt=0, le=MAX_VOCAB_SIZE)
    """Tokens of the vocabulary; by default the tokenizer's, rounded up to a multiple of 128."""
    max_positions: int = Field(default=512, gt=1, le=MAX_POSITIONS)
    """Tokens of the context."""
    rms_epsilon: float = Field(default=1e-6, ge=1e-30, le=1)
    rope_theta: float = Field(default=10000.0, ge=1.01, le=1e15)
    tied_embeddings: bool = True
    sliding_window: int | None = Field(default=None, gt=0, le=MAX_POSITIONS)
    """Keys that a query sees, in the families mistral, phi3 and mixtral; by default all."""
    num_experts: int | None = Field(default=None, gt=0, le=MAX_EXPERTS)
    """Experts of each layer, in the families qwen3_moe, mixtral, gpt_oss, qwen3_5_moe_text and
    qwen3_next.
    """
    num_experts_per_tok: int = Field(default=2, gt=0, le=MAX_EXPERTS)
    """Experts of each token."""
    linear_num_key_heads: int | None = Field(default=None, gt=0, le=MAX_HEADS)
    """Heads of Q and K of gated delta nets, in the families qwen3_5_text, qwen3_5_moe_text and
    qwen3_next; by default ``num_heads``. Three of four layers have one in place of attention.
    """
    linear_num_value_heads: int | None = Field(default=None, gt=0, le=MAX_HEADS)
    """Their value heads, a multiple; by default ``linear_num_key_heads``."""
    linear_key_head_dim: int | None = Field(default=None, gt=0, le=MAX_DELTA_DIM)
    """Elements of a head of Q or K there; by default ``head_dim``."""
    linear_value_head_dim: int | None = Field(default=None, gt=0, le=MAX_DELTA_DIM)
    """Elements of a value head there; by default ``linear_key_head_dim``."""
    moe_intermediate_size: int | None = Field(default=None, gt=0, le=MAX_WIDTH)
    """Size of each expert in the families qwen3_moe, qwen3_5_moe_text and qwen3_next; by default
    ``intermediate_size``.
    """
    shared_expert_intermediate_size: int | None = Field(default=None, gt=0, le=MAX_WIDTH)
    """Size of the expert of all tokens in the families qwen3_5_moe_text and qwen3_next; by default
    that of an expert.
    """
