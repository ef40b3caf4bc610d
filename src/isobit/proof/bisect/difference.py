"""From checksums to the first site where the sides differ, and by how much.

A row of one side without a partner is a difference too: rollout computed a token behind a prefix
that no sample has, because its pages hold other tokens, or never computed one that it should have.
The last token of a sample is training's alone: its K and V are never needed.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from isobit.precision.formats import BLOCK, DTYPES, E8M0_BIAS
from isobit.proof.bisect.checksums import row_checksums
from isobit.proof.bisect.observer import HEAD

_FORMATS = {dtype: name.upper() for name, dtype in DTYPES.items()} | {torch.int32: "INT32"}
_NONE = torch.empty(0, dtype=torch.int64)
_SMALLEST, _LARGEST = torch.iinfo(torch.int64).min, torch.iinfo(torch.int64).max


@dataclass(slots=True)
class Rows:
    """What one side made at one site: its format, and a key and a checksum for each row, as often
    as it was computed.
    """

    format: str
    keys: list[torch.Tensor] = field(default_factory=list)
    checksums: list[torch.Tensor] = field(default_factory=list)


class Checksums:
    """A ``Keep`` for one side; ``sites`` are in the order in which they were first seen, that of
    the forward pass.
    """

    def __init__(self) -> None:
        self.sites: dict[str, Rows] = {}

    def __call__(
        self, name: str, keys: torch.Tensor, values: torch.Tensor, scales: torch.Tensor | None
    ) -> None:
        """Keep a checksum a row."""
        rows = self.sites.setdefault(name, Rows(_FORMATS[values.dtype]))
        rows.keys.append(keys)
        rows.checksums.append(row_checksums(values, scales))


@dataclass(frozen=True, slots=True)
class SiteDifference:
    """A site where the sides differ."""

    site: str
    sites_before: int
    """Sites before it in the forward pass: all equal."""
    formats: Mapping[str, str]
    """Of the result, by side."""
    tokens_compared: int
    differing: torch.Tensor
    """Keys of the tokens that differ, int64, ascending."""
    unstable: Mapping[str, int]
    """By side, the tokens that it computed more than once and not always to the same bits."""
    alone: Mapping[str, torch.Tensor]
    """By side, keys of the tokens that the other side should have rows of and lacks."""

    @property
    def lacks_rows(self) -> bool:
        """Whether either side lacks any."""
        return any(keys.numel() for keys in self.alone.values())


def first_difference(
    rollout: Checksums, training: Checksums, last_tokens: torch.Tensor
) -> SiteDifference | None:
    """The first site in the order of the forward pass at which a token's rows are not all equal, or
    at which a side lacks rows, if any is; ``last_tokens`` are keys of those that rollout need not
    compute.
    """
    for index, (site, rows) in enumerate(training.sites.items()):
        theirs = rollout.sites.get(site, Rows(rows.format, [_NONE], [_NONE]))
        found = _difference(site, index, theirs, rows, last_tokens)
        if found.differing.numel() or found.lacks_rows:
            return found
    return None


def _difference(
    site: str, sites_before: int, rollout: Rows, training: Rows, last_tokens: torch.Tensor
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
    if site == HEAD:  # its rows are known by bits, which two tokens may share
        alone = dict.fromkeys(alone, _NONE)
    return SiteDifference(
        site, sites_before, formats, int(shared.sum()), tokens[differing], unstable, alone
    )


def _disagree(index: torch.Tensor, checksums: torch.Tensor, count: int) -> torch.Tensor:
    """bool [count]: whether the checksums of one index, of those that have any, are not all the
    same.
    """
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
        """Take the values of the rows that belong to the tokens."""
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
    """FP32 [T, K]: what the rows stand for."""
    if scales is None:
        return values.float().unsqueeze(-1).flatten(1)
    if scales.dtype == torch.uint8:
        return (
            values.float()
            * torch.ldexp(torch.ones(scales.shape), scales.int() - E8M0_BIAS)[..., None]
        ).flatten(1)
    of_columns = scales.repeat_interleave(BLOCK, -1)[:, : values.shape[1]]
    return values.float() * of_columns
