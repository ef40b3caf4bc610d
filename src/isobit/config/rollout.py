"""The table ``rollout``: how completions are drawn, and the sizes of the engine's batch and
cache.
"""

from pydantic import Field

from isobit.config.base import Strict
from isobit.config.limits import MAX_BATCH, MAX_COUNT, MAX_FACTOR
from isobit.config.shape import MAX_POSITIONS, MAX_VOCAB_SIZE


class RolloutConfig(Strict):
    """How the native engine generates."""

    max_new_tokens: int = Field(default=512, gt=0, le=MAX_POSITIONS)
    temperature: float = Field(default=1.0, ge=0, le=MAX_FACTOR)
    top_k: int = Field(default=0, ge=0, le=MAX_VOCAB_SIZE)
    """0 is off."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    min_p: float = Field(default=0.0, ge=0, lt=1)
    stop_strings: tuple[str, ...] = ()
    max_sequences: int = Field(default=256, gt=0, le=MAX_BATCH)
    """Sequences decoded at once."""
    max_batched_tokens: int | None = Field(default=None, gt=0, le=MAX_COUNT)
    """Tokens of one forward: decoding sequences first, the rest for chunks of prompts.  By default
    2048 on a CPU and 16384 on a GPU.
    """
    kv_pages: int | None = Field(default=None, gt=0, le=MAX_COUNT)
    """Pages of the KV cache, of 64 tokens on a CPU and 128 on a GPU; by default as many as
    ``max_sequences`` of full length need, within ``kv_memory_gib``.
    """
    kv_memory_gib: float | None = Field(default=None, gt=0, le=MAX_FACTOR)
    """By default 2 on a CPU, and on a GPU what is free when the engine starts, or what the plan of
    a training run leaves.
    """
