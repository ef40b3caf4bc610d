"""The table ``from_scratch`` of ``isobit sft``: a decoder that no model folder describes."""

from typing import Literal

from pydantic import Field

from isobit.config.base import Strict

Family = Literal["llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "mixtral"]


class ModelShape(Strict):
    """A decoder to be trained from random weights; the names are those of a Hugging Face
    ``config.json``.
    """

    family: Family = "qwen3"
    hidden_size: int = Field(gt=0)
    intermediate_size: int = Field(gt=0)
    num_layers: int = Field(gt=0)
    num_heads: int = Field(gt=0)
    num_kv_heads: int | None = Field(default=None, gt=0)
    """By default as many as ``num_heads``."""
    head_dim: int | None = Field(default=None, gt=0)
    """By default ``hidden_size`` over ``num_heads``."""
    vocab_size: int | None = Field(default=None, gt=0)
    """By default the tokenizer's, rounded up to a multiple of 128."""
    max_positions: int = Field(default=512, gt=1)
    """Tokens of the context."""
    rms_epsilon: float = Field(default=1e-6, gt=0)
    rope_theta: float = Field(default=10000.0, gt=0)
    tied_embeddings: bool = True
