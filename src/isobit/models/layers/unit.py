"""What the units share: descriptions of masters, access to gradients, and bytes."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch

Gradient = Callable[[str], torch.Tensor]
"""A master's FP32 gradient by name, to be added to; zeros where it has none yet."""


@dataclass(frozen=True, slots=True)
class Master:
    """One FP32 tensor that the optimiser moves."""

    shape: tuple[int, ...]
    parts: Mapping[str, int]
    """The checkpoint's tensors that it puts together along its rows, with the rows of each."""
    kind: Literal["matrix", "bias", "plain"] = "plain"
    """A linear's matrix [N, K], quantised as its site says; its bias [N]; or a tensor that is
    published in the format between operators.
    """


Masters = Mapping[str, Master]
"""By name, in the order of the forward pass."""


@dataclass(frozen=True, slots=True)
class UnitBytes:
    """Bytes of a unit in a pass with a backward; a token each, but for the last."""

    saved: int
    """What its backward reads."""
    input: int
    """Of ``saved``, the residual stream: all that stays where the unit is computed again."""
    read: int
    """The norm as the first linear reads it, while the unit is computed."""
    kept: int
    """What else the forward makes beside what it saves."""
    made: int
    """What the forward makes where nothing is saved."""
    gradients: int
    """What the backward makes beside what was saved, and beside the residual stream's gradient."""
    once: int
    """The largest matrix that the backward makes for itself, whatever the tokens."""


def norm_master(width: int, name: str) -> Master:
    """The weight [width] of an RMSNorm, which the checkpoint calls ``name``."""
    return Master((width,), {name: width})
