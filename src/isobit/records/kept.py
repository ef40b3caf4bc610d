"""Sequences as they are kept for later, and sent: what sampling recorded, in tensors.

    of L tokens, N of them responses:   4 L bytes of token ids, 8 N of log-probabilities (FP32) and
                                        versions, 8 N of experts' digests and 4 N of truncated
                                        log-probabilities where there are any

What was recorded comes back bit for bit; the columns that judgement fills are not kept.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Self

import torch

from isobit.records.sequence import GIVEN, TokenSequence

Spans = tuple[tuple[int, int], ...]
"""First token and number of tokens of each run of the response."""


@dataclass(frozen=True, slots=True)
class KeptSequence:
    """One sequence, compact."""

    token_ids: torch.Tensor  # int32 [L]
    spans: Spans
    log_probs: torch.Tensor  # float32 [N]
    versions: torch.Tensor  # int32 [N]
    temperature: float
    routings: torch.Tensor | None = None  # int64 [N]
    truncated_log_probs: torch.Tensor | None = None  # float32 [N]

    @classmethod
    def of(cls, sequence: TokenSequence) -> Self:
        """What sampling recorded of a sequence."""
        response, cut, routings = (
            sequence.of_response,
            sequence.truncated_log_probs,
            sequence.routings,
        )
        return cls(
            torch.tensor(sequence.token_ids, dtype=torch.int32),
            _spans(sequence.loss_mask),
            torch.tensor(response(sequence.log_probs), dtype=torch.float32),
            torch.tensor(response(sequence.weights_versions), dtype=torch.int32),
            sequence.temperature,
            None if routings is None else torch.tensor(response(routings), dtype=torch.int64),
            None if cut is None else torch.tensor(response(cut), dtype=torch.float32),
        )

    def sequence(self, fresh: bool) -> TokenSequence:
        """The sequence, not yet judged; ``fresh`` says whether the weights of now drew it."""
        mask = [False] * len(self.token_ids)
        for first, count in self.spans:
            mask[first : first + count] = [True] * count
        cut = self.truncated_log_probs
        return TokenSequence(
            token_ids=tuple(self.token_ids.tolist()),
            loss_mask=tuple(mask),
            log_probs=_spread(self.log_probs, mask, 0.0),
            weights_versions=_spread(self.versions, mask, GIVEN),
            advantages=(0.0,) * len(mask),
            temperature=self.temperature,
            truncated_log_probs=None if cut is None else _spread(cut, mask, 0.0),
            routings=None if self.routings is None else _spread(self.routings, mask, 0),
            fresh=fresh,
        )

    @property
    def num_bytes(self) -> int:
        """Of its tensors."""
        found = (
            self.token_ids,
            self.log_probs,
            self.versions,
            self.routings,
            self.truncated_log_probs,
        )
        return sum(tensor.nbytes for tensor in found if tensor is not None)


def joined(kept: Sequence[KeptSequence]) -> dict[str, torch.Tensor]:
    """Tensors of all sequences end to end.  A column that not all have stands beside the indices of
    those that do; one that none has is not there.
    """
    spans = [span for one in kept for span in one.spans]
    return {
        "lengths": torch.tensor([len(one.token_ids) for one in kept], dtype=torch.int64),
        "span_counts": torch.tensor([len(one.spans) for one in kept], dtype=torch.int64),
        "spans": torch.tensor(spans, dtype=torch.int64).view(-1, 2),
        "token_ids": _end_to_end([one.token_ids for one in kept], torch.int32),
        "log_probs": _end_to_end([one.log_probs for one in kept], torch.float32),
        "versions": _end_to_end([one.versions for one in kept], torch.int32),
        "temperatures": torch.tensor([one.temperature for one in kept], dtype=torch.float64),
        **_optional("routings", [one.routings for one in kept]),
        **_optional("truncated_log_probs", [one.truncated_log_probs for one in kept]),
    }


def parted(tensors: Mapping[str, torch.Tensor]) -> list[KeptSequence]:
    """The sequences that ``joined`` laid end to end."""
    spans = [
        tuple((int(first), int(count)) for first, count in part.tolist())
        for part in tensors["spans"].split(tensors["span_counts"].tolist())
    ]
    responses = [sum(count for _, count in one) for one in spans]

    def column(name: str) -> list[torch.Tensor]:
        return [part.clone() for part in tensors[name].split(responses)]

    def optional(name: str) -> list[torch.Tensor | None]:
        if name not in tensors:
            return [None] * len(spans)
        having = tensors[f"{name}_of"].tolist()
        parts = tensors[name].split([responses[index] for index in having])
        found = dict(zip(having, parts, strict=True))
        return [found[index].clone() if index in found else None for index in range(len(spans))]

    rows = zip(
        tensors["token_ids"].split(tensors["lengths"].tolist()),
        spans,
        column("log_probs"),
        column("versions"),
        tensors["temperatures"].tolist(),
        optional("routings"),
        optional("truncated_log_probs"),
        strict=True,
    )
    return [KeptSequence(token_ids.clone(), *others) for token_ids, *others in rows]


def _optional(name: str, column: Sequence[torch.Tensor | None]) -> dict[str, torch.Tensor]:
    given = {index: part for index, part in enumerate(column) if part is not None}
    if not given:
        return {}
    return {f"{name}_of": torch.tensor(list(given)), name: torch.cat(list(given.values()))}


def _end_to_end(parts: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    return torch.cat([torch.empty(0, dtype=dtype), *parts])


def _spans(mask: Sequence[bool]) -> Spans:
    """First index and length of every run of True."""
    runs = [(learnt, len(list(run))) for learnt, run in groupby(mask)]
    starts = [sum(count for _, count in runs[:place]) for place in range(len(runs))]
    return tuple(
        (first, count) for first, (learnt, count) in zip(starts, runs, strict=True) if learnt
    )


def _spread(column: torch.Tensor, mask: Sequence[bool], elsewhere: float | int) -> tuple:
    """A value for each token of the response -> an entry for each token."""
    following = iter(column.tolist())
    return tuple([next(following) if learnt else elsewhere for learnt in mask])
