"""The first site at which rollout and training differ, from the rows that were observed of both
(``isobit.proof.observation``).

    Checksums          the rows of one side, by site
    first_difference   the first site at which the rows of a token are not all equal
    Extremes           the values at one site, to measure by how much they differ

A row without a partner on the other side is a difference too: rollout computed a token behind a
prefix that no sample has, because its pages hold other tokens, or it never computed one that it
should have.  The last token of a sample is computed in training alone, because rollout never needs
its K and V.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from isobit.kernels.observing import UNROUNDED
from isobit.precision.quant_tensor import BLOCK, DTYPES, E8M0_BIAS
from isobit.proof.observation import HEAD_SITES, NO_KEYS, keys_of_batch, row_checksums
from isobit.records.packing import pack
from isobit.records.sequence import TokenSequence

_FORMATS = {dtype: name.upper() for name, dtype in DTYPES.items()} | {torch.int32: "INT32"}


_SMALLEST, _LARGEST = torch.iinfo(torch.int64).min, torch.iinfo(torch.int64).max


@dataclass(slots=True)
class SiteRows:
    """Rows of one side at one site: the format, and a key and a checksum for each row, as
    many times as it was computed.
    """

    format: str
    keys: list[torch.Tensor] = field(default_factory=list)
    checksums: list[torch.Tensor] = field(default_factory=list)


class Checksums:
    """A ``Keep`` for one side; ``sites`` are in the order in which they were first seen, that of
    the forward pass.
    """

    def __init__(self) -> None:
        self.sites: dict[str, SiteRows] = {}

    def __call__(
        self, name: str, keys: torch.Tensor, values: torch.Tensor, scales: torch.Tensor | None
    ) -> None:
        rows = self.sites.setdefault(name, SiteRows(_FORMATS[values.dtype]))
        rows.keys.append(keys)
        rows.checksums.append(row_checksums(values, scales))


@dataclass(frozen=True, slots=True)
class SiteDifference:
    """A site where the sides differ."""

    site: str
    sites_before: int
    """Sites before it in the forward pass, which are all equal."""
    formats: Mapping[str, str]
    """Formats of the result, by side."""
    tokens_compared: int
    differing: torch.Tensor
    """Keys of the tokens that differ, int64, ascending."""
    unstable: Mapping[str, int]
    """Counts, by side, of tokens that it computed more than once with different bits."""
    alone: Mapping[str, torch.Tensor]
    """Keys, by side, of the tokens that the other side should have rows of and lacks."""

    @property
    def lacks_rows(self) -> bool:
        return any(keys.numel() for keys in self.alone.values())


def first_difference(
    rollout: Checksums, training: Checksums, last_tokens: torch.Tensor
) -> SiteDifference | None:
    """The first site in the order of the forward pass at which a token's rows are not all equal, or
    at which a side lacks rows, if any is; ``last_tokens`` are keys of those that rollout need not
    compute.
    """
    for index, (site, rows) in enumerate(training.sites.items()):
        theirs = rollout.sites.get(site, SiteRows(rows.format, [NO_KEYS], [NO_KEYS]))
        difference = _difference(site, index, theirs, rows, last_tokens)
        if difference.differing.numel() or difference.lacks_rows:
            return difference
    return None


def _difference(
    site: str, sites_before: int, rollout: SiteRows, training: SiteRows, last_tokens: torch.Tensor
) -> SiteDifference:
    on_rollout, on_training = torch.cat(rollout.keys), torch.cat(training.keys)
    checksums = {"rollout": torch.cat(rollout.checksums), "training": torch.cat(training.checksums)}
    tokens, index = torch.unique(torch.cat([on_rollout, on_training]), return_inverse=True)
    parts = dict(
        zip(checksums, index.split([on_rollout.numel(), on_training.numel()]), strict=True)
    )
    has = {
        side: torch.zeros(tokens.numel(), dtype=torch.bool).index_fill_(0, part, True)
        for side, part in parts.items()
    }
    shared = has["rollout"] & has["training"]
    differing = shared & _disagree(index, torch.cat(list(checksums.values())), tokens.numel())
    if rollout.format != training.format:
        differing = shared
    unstable = {
        side: int(_disagree(parts[side], checksums[side], tokens.numel()).sum())
        for side in checksums
    }
    formats = {"rollout": rollout.format, "training": training.format}
    without_rollout = tokens[~has["rollout"]]
    alone = {
        "rollout": tokens[~has["training"]],
        "training": without_rollout[~torch.isin(without_rollout, last_tokens)],
    }
    if site in HEAD_SITES:  # its rows are known by bits, which two tokens may share
        alone = dict.fromkeys(alone, NO_KEYS)
    return SiteDifference(
        site, sites_before, formats, int(shared.sum()), tokens[differing], unstable, alone
    )


def _disagree(index: torch.Tensor, checksums: torch.Tensor, count: int) -> torch.Tensor:
    """bool [count]: whether the checksums of an index are not all the same."""
    low = torch.full((count,), _LARGEST).scatter_reduce_(0, index, checksums, "amin")
    high = torch.full((count,), _SMALLEST).scatter_reduce_(0, index, checksums, "amax")
    return low < high


class Extremes:
    """A ``Keep`` for both sides: the smallest and the largest value at each place of one site's
    rows, for some tokens.
    """

    def __init__(self, site: str, tokens: torch.Tensor) -> None:
        self._site, self._tokens = site, tokens
        self._low: torch.Tensor | None = None
        self._high: torch.Tensor | None = None

    def __call__(
        self, name: str, keys: torch.Tensor, values: torch.Tensor, scales: torch.Tensor | None
    ) -> None:
        wanted = torch.isin(keys, self._tokens)
        if name != self._site or not bool(wanted.any()):
            return
        rows = dequantise(values, scales).cpu()[wanted]
        at = torch.searchsorted(self._tokens, keys[wanted])[:, None].expand_as(rows)
        if self._low is None or self._high is None:
            self._low = torch.full((self._tokens.numel(), rows.shape[1]), torch.inf)
            self._high = -self._low
        self._low.scatter_reduce_(0, at, rows, "amin")
        self._high.scatter_reduce_(0, at, rows, "amax")

    @property
    def max_abs_diff(self) -> float | None:
        """The largest difference between two rows of a token; None if no two rows differ in a
        finite number.
        """
        if self._low is None or self._high is None:
            return None
        spread = self._high - self._low
        finite = spread[torch.isfinite(spread)]
        return float(finite.max()) if finite.numel() and float(finite.max()) > 0 else None


def dequantise(values: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
    """FP32 [T, K]: what the rows stand for, of INT8 before the product with the Hadamard matrix is
    undone.
    """
    if scales is None:
        return values.float().unsqueeze(-1).flatten(1)
    if scales.dtype == torch.uint8:
        scales = torch.ldexp(torch.ones(scales.shape), scales.int() - E8M0_BIAS)
    if scales.ndim == values.ndim - 1:  # one a row, or one a token and head
        return (values.float() * scales[..., None]).flatten(1)
    of_columns = scales.repeat_interleave(BLOCK, -1)[:, : values.shape[1]]
    return values.float() * of_columns


@dataclass(frozen=True, slots=True)
class Operations:
    """The operations of one scenario that were compared."""

    sites: int
    """Results of operations; one before its rounding counts separately."""
    rows: int
    """Checksums compared, of both sides."""
    difference: SiteDifference | None
    """The first site that differs, in the order of the forward pass."""

    def as_json(self) -> dict[str, Any]:
        """The counts, and the name of the first site that differs."""
        difference = self.difference
        return {
            "sites": self.sites,
            "rows": self.rows,
            "first_difference": None if difference is None else difference.site,
        }


def compared_operations(
    rollout: Checksums, training: Checksums, samples: Sequence[TokenSequence]
) -> Operations:
    """Compare both sides of the scenario that generated ``samples``."""
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
    return torch.tensor(
        [int(keys_of_batch(batch)[-1]) for sample in samples for batch in pack([sample], 1)]
    )
