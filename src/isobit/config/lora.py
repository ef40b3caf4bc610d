"""The table ``lora``: adapters of low rank."""

from typing import Any

from pydantic import Field, field_validator

from isobit.config.base import MAX_FACTOR, Strict

LORA_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""Linears that can have an adapter, by PEFT's names, in the order of the forward."""
ALL_LINEAR = "all-linear"


class LoraConfig(Strict):
    """LoRA: the model's weights stay as they are, and adapters of low rank learn. Keys are those of
    PEFT's ``LoraConfig``, except that dropout is always 0.
    """

    rank: int = Field(default=32, gt=0, le=1024)
    """Rows of A and columns of B; PEFT's ``r``."""
    alpha: float | None = Field(default=None, gt=0, le=MAX_FACTOR)
    """An adapter's output is multiplied by alpha / rank; by default alpha is twice the rank."""
    targets: tuple[str, ...] = (ALL_LINEAR,)
    """Linears that have an adapter: q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj and
    down_proj, or all-linear for all of them.
    """
    rslora: bool = False
    """Multiply by alpha / sqrt(rank) instead (arXiv 2312.03732)."""

    @field_validator("targets", mode="before")
    @classmethod
    def _from_name(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value

    @field_validator("targets")
    @classmethod
    def _known(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if not value or any(name not in (*LORA_TARGETS, ALL_LINEAR) for name in value):
            raise ValueError(f"expected some of {', '.join((*LORA_TARGETS, ALL_LINEAR))}")
        return value

    @property
    def modules(self) -> tuple[str, ...]:
        """The targets in the order of the forward, each once."""
        return tuple(name for name in LORA_TARGETS if {name, ALL_LINEAR} & set(self.targets))
