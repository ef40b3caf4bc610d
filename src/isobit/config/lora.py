"""The table ``lora``: adapters of low rank."""

from typing import Any

from pydantic import Field, field_validator
from pydantic_core import PydanticCustomError

from isobit.config.base import MAX_FACTOR, Strict
from isobit.util.errors import did_you_mean

LORA_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""Linears of attention and MLPs that can have an adapter, by PEFT's names, in the order of the
forward.
"""
FUSED_TARGETS = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
"""Those of Phi-3, where q, k and v are one matrix with one A and one B, and gate and up another."""
DELTA_TARGETS = (
    "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "in_proj_qkvz", "in_proj_ba", "out_proj",
)  # fmt: skip
"""Those of gated delta nets. Qwen3-Next has in_proj_qkvz and in_proj_ba, the others have four."""
SHARED_GATE = "shared_expert_gate"
"""The row in front of a shared expert."""
KNOWN_TARGETS = (*LORA_TARGETS, "qkv_proj", "gate_up_proj", *DELTA_TARGETS, SHARED_GATE)
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
    """Linears that have an adapter, of those that the model has: q_proj, k_proj, v_proj, o_proj,
    gate_proj, up_proj and down_proj (where there are experts, of the shared one, which also has
    shared_expert_gate), of Phi-3 qkv_proj, o_proj, gate_up_proj and down_proj, of gated delta nets
    in_proj_qkv, in_proj_z, in_proj_b and in_proj_a, or in_proj_qkvz and in_proj_ba, and out_proj;
    or all-linear for all of them.
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
        known = *KNOWN_TARGETS, ALL_LINEAR
        unknown = next((name for name in value if name not in known), None)
        if not value or unknown is not None:
            near = did_you_mean(unknown or "", known).removeprefix("; ")
            hint = f" ({near})" if near else ""
            raise PydanticCustomError(
                "targets",
                "should be some of {known}{hint}",
                {"known": ", ".join(known), "hint": hint},
            )
        return value

    def modules(self, having: tuple[str, ...]) -> tuple[str, ...]:
        """The targets in a model with the linears ``having``, in their order. Raises ValueError for
        one that the model does not have.
        """
        named = set(self.targets) - {ALL_LINEAR}
        if missing := sorted(named - set(having)):
            raise ValueError(f"has no {missing[0]}; expected some of {', '.join(having)}")
        return having if ALL_LINEAR in self.targets else tuple(n for n in having if n in named)
