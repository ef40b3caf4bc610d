"""A micro-batch computed twice: forward and backward must give the same bits again.

They repeat for the same call on any device, so that a second pass that differs needs no threshold
to be a fault: of the processor, of the memory, or of a kernel that races.  What is compared are the
micro-batch's figures, its log-probabilities, and a digest of every master's gradient
(``isobit.models.safetensors``).

A fault that strikes alike in both passes (a wrong weight, a kernel that is wrong by rule) repeats,
and is not seen here.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from isobit.models.safetensors import checksum_of

FORWARD = "forward"
Pass = tuple[str, dict[str, str]]
"""The figures of one pass as text, and a digest of each gradient."""


@dataclass(frozen=True, slots=True)
class Repeat:
    """The result of computing one micro-batch twice."""

    gradients: int
    """Gradients that were compared."""
    differing: tuple[str, ...]
    """The masters whose gradients differ, and ``forward`` where the figures do."""


def compare_passes(compute: Callable[[], Pass]) -> Repeat:
    """Compute a pass twice, and compare the results."""
    (first, gradients), (second, again) = compute(), compute()
    parted = tuple(name for name, digest in gradients.items() if again[name] != digest)
    return Repeat(len(gradients), ((FORWARD,) if first != second else ()) + parted)


def figures_text(figures: Sequence[Mapping[str, Any]]) -> str:
    """The figures of micro-batches, equal only for equal bits."""
    return repr(
        [
            {
                name: digest_of(value) if isinstance(value, torch.Tensor) else value
                for name, value in of_batch.items()
            }
            for of_batch in figures
        ]
    )


def digest_of(x: torch.Tensor) -> str:
    """A checksum of a tensor's bytes, equal on every device."""
    return f"{checksum_of({'': x}):016x}"
