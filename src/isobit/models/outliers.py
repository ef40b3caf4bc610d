"""Channels of norms that stand out are moved into the matrices behind them for INT8."""

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch

from isobit.models.config import ModelConfig
from isobit.models.families import FAMILIES
from isobit.models.master_values import MasterValues, master_of

_READERS = {
    "input_norm": (
        "qkv_proj",
        "qkv_proj.lora_A",
        "in_proj",
        "in_proj.lora_A",
        "gates",
        "gates.lora_A",
    ),
    "post_attention_norm": (
        "gate_up_proj",
        "gate_up_proj.lora_A",
        "router",
        "experts.gate_up_proj",
        "shared_expert_gate",
        "shared_expert_gate.lora_A",
        "shared_expert.gate_up_proj",
        "shared_expert.gate_up_proj.lora_A",
    ),
}
"""The matrices that read a layer's norms."""
_OUTSTANDING = 2.0


def outstanding(norm: torch.Tensor) -> torch.Tensor:
    """A norm's weight [C] -> the power of two, FP32 [C], by which each channel stands out: 1 for
    weights of up to ``_OUTSTANDING`` times the median's size, else the smallest that brings them to
    the median or below.  What moves lowers the median, so it is looked for again until nothing
    stands out: a norm that was divided by its factors has none, when it is saved and loaded again.

    ``benchmarks.outliers`` compares the flows; with 8 or 4 times, ``int8`` was further from
    ``fp32`` wherever a norm had outliers.
    """
    size, factor = norm.abs().float(), torch.ones_like(norm, dtype=torch.float32)
    while True:
        left = size / factor
        times = left / left.median().clamp(min=torch.finfo(torch.float32).tiny)
        stand_out = (times > _OUTSTANDING) & times.isfinite()
        if not stand_out.any():
            return factor
        factor = torch.where(stand_out, factor * torch.exp2(torch.log2(times).ceil()), factor)


def norm_offset(config: ModelConfig) -> float:
    """What is added to the weights of a decoder's norms."""
    return FAMILIES[config.family].norm_offset


def fold_norms(
    masters: Iterable[tuple[str, MasterValues]],
    is_folded: Callable[[str], bool],
    note: Callable[[int], None],
    offset: float = 0.0,
) -> Iterator[tuple[str, MasterValues]]:
    """The masters of a decoder in which no channel of a norm stands out, where ``is_folded`` of the
    linear that reads it, by path: INT8 has one scale a token, in which such a channel would leave
    the others few steps.  The norm's weights are divided by ``outstanding`` and the columns of what
    reads it multiplied: the same function, and in BF16 the same numbers times powers of two.
    ``note`` gets the number of channels of each norm that is changed; ``offset`` is
    ``norm_offset``.
    """
    factors: dict[str, torch.Tensor] = {}
    for name, values in masters:
        path = name.removesuffix(".weight")
        layer, _, own = path.rpartition(".")
        readers = [f"{layer}.{reader}" for reader in _READERS.get(own, ())]
        if any(map(is_folded, readers)):
            assert isinstance(values, torch.Tensor), "a norm is not quantised"
            # A plan's norms are shapes without numbers.
            factor = None if values.is_meta else outstanding(values + offset)
            if factor is not None and (channels := int((factor > 1).sum())):
                note(channels)
                values = (values + offset) / factor - offset if offset else values / factor
                factors |= dict.fromkeys(readers, factor)
        elif path in factors:
            wide = values if isinstance(values, torch.Tensor) else master_of(values)
            values = wide * factors.pop(path)
        yield name, values


def about_folded(channels: Sequence[int]) -> str:
    """A line about the norms that were changed, from the counts that ``fold_norms`` has noted."""
    return (
        f"isobit: {sum(channels)} channels of {len(channels)} norms, whose weights are more than "
        f"{_OUTSTANDING:g} times the median, are moved into the matrices behind them for INT8: "
        "the same function"
    )
