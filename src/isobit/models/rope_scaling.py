"""How a checkpoint stretches its rotary positions beyond the context that it was pretrained with.

A rotary embedding turns pair i of a head of D elements by position * f_i, f_i = theta^(-2i/D).  The
kinds, by the ``rope_type`` of a config.json, with s the factor of the stretch:

    linear    f_i / s for all i
    llama3    f_i / s where a turn is longer than the original context, f_i where it is much
              shorter, a blend between (Llama 3.1)
    yarn      the same blend with its borders taken along i, and all cosines and sines times an
              attention factor (Peng et al., arXiv 2309.00071)

Each computes what transformers' ``modeling_rope_utils`` does, in FP64.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch

_LEAST_RAMP = 0.001
"""Pairs between the borders of YaRN's blend where both fall on one pair."""


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """All positions divided by a factor."""

    rope_type: ClassVar[str] = "linear"
    attention_scaling: ClassVar[float] = 1.0
    """What all cosines and sines are multiplied by."""

    factor: float

    def stretched(self, frequencies: torch.Tensor, theta: float) -> torch.Tensor:
        """FP64 [D/2] -> [D/2]."""
        return frequencies / self.factor


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Llama 3.1's stretch of the low frequencies.

    A pair turns r = original_max_position_embeddings f_i / 2 pi times within the original context:
    below ``low_freq_factor`` it is stretched, above ``high_freq_factor`` it is left as it is.
    """

    rope_type: ClassVar[str] = "llama3"
    attention_scaling: ClassVar[float] = 1.0
    """What all cosines and sines are multiplied by."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int

    def stretched(self, frequencies: torch.Tensor, theta: float) -> torch.Tensor:
        """FP64 [D/2] -> [D/2]."""
        turns = self.original_max_position_embeddings * frequencies / (2 * math.pi)
        width = self.high_freq_factor - self.low_freq_factor
        kept = ((turns - self.low_freq_factor) / width).clamp(0, 1)
        return frequencies * (kept + (1 - kept) / self.factor)


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """YaRN: pairs that turn more than ``beta_fast`` times within the original context are left as
    they are, those that turn less than ``beta_slow`` times are stretched.

    The fields are those of a config.json; what is None there is None here, and its default is
    computed.
    """

    rope_type: ClassVar[str] = "yarn"

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    """Whether the borders of the blend are moved outwards to whole pairs."""
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None

    @property
    def attention_scaling(self) -> float:
        """What all cosines and sines are multiplied by, and logits of attention so by its
        square.
        """
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self._temperature(self.mscale) / self._temperature(self.mscale_all_dim)
        return self._temperature(1.0)

    def stretched(self, frequencies: torch.Tensor, theta: float) -> torch.Tensor:
        """FP64 [D/2] -> [D/2]."""
        pairs = len(frequencies)
        low, high = (self._pair(turns, theta, pairs) for turns in (self.beta_fast, self.beta_slow))
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, 2 * pairs - 1)
        width = high - low if high != low else _LEAST_RAMP
        ramp = (torch.arange(pairs, dtype=torch.float64) - low) / width
        stretch = ramp.clamp(0, 1)
        return frequencies * (1 - stretch + stretch / self.factor)

    def _pair(self, turns: float, theta: float, pairs: int) -> float:
        """The pair, as a real number, that turns so often within the original context."""
        longest = self.original_max_position_embeddings / (2 * math.pi * turns)
        return pairs * math.log(longest) / math.log(theta)

    def _temperature(self, mscale: float) -> float:
        return 1.0 if self.factor <= 1 else 0.1 * mscale * math.log(self.factor) + 1.0


RopeScaling = LinearScaling | Llama3Scaling | YarnScaling
