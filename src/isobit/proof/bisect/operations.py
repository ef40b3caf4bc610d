"""One scenario with every operation observed on both sides: how many rows of how many operations
were laid side by side, and where they part.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from isobit.kernels.trace import UNROUNDED
from isobit.proof.bisect.difference import Checksums, SiteDifference, first_difference
from isobit.proof.bisect.observer import keys_of_batch
from isobit.records.sequence import TokenSequence
from isobit.training.packing import pack


@dataclass(frozen=True, slots=True)
class Operations:
    """What was compared in a scenario beside its log-probabilities."""

    sites: int
    """Results of an operation, those before a rounding counted for themselves."""
    rows: int
    """Checksums compared, of both sides."""
    difference: SiteDifference | None
    """The first in the order of the forward pass."""

    def as_json(self) -> dict[str, Any]:
        """The counts, and the name of the first site that differs."""
        found = self.difference
        return {
            "sites": self.sites,
            "rows": self.rows,
            "first_difference": None if found is None else found.site,
        }


def compared_operations(
    rollout: Checksums, training: Checksums, samples: Sequence[TokenSequence]
) -> Operations:
    """Of both sides of the scenario that made ``samples``."""
    rows = sum(
        checksums.numel()
        for side in (rollout, training)
        for site in side.sites.values()
        for checksums in site.checksums
    )
    found = first_difference(rollout, training, _last_tokens(samples))
    return Operations(len(training.sites), rows, found)


def describe_site(site: str) -> str:
    """``layers.0.o_proj.unrounded`` -> ``layers.0.o_proj, before its rounding``."""
    rounded = site.removesuffix(f".{UNROUNDED}")
    return site if rounded == site else f"{rounded}, before its rounding"


def _last_tokens(samples: Sequence[TokenSequence]) -> torch.Tensor:
    """Keys of the last token of each."""
    return torch.tensor(
        [int(keys_of_batch(batch)[-1]) for sample in samples for batch in pack([sample], 1)]
    )
