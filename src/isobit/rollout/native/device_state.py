"""What the device itself knows of each running sample: its newest token, its length, its pages, its
noise key and its temperature.

A decode step reads and writes these rows without the host, so the next step can be launched before
this one's tokens are known.  A sample has a slot for as long as it runs.  The last slot is
nobody's: a batch is padded with it up to a captured size; its length stays 0 and its K and V go to
a page of its own.
"""

from collections.abc import Iterable, Sequence

import numpy as np
import torch

from isobit.kernels.backend import Backend
from isobit.kernels.operands import DecodeBatch
from isobit.rollout.native.sequence import Sample


class DeviceState:
    """The rows of all slots, and which sample has which."""

    def __init__(
        self,
        num_slots: int,
        max_pages: int,
        page_tokens: int,
        padding_page: int,
        backend: Backend,
    ) -> None:
        def zeros(dtype: torch.dtype, *more: int) -> torch.Tensor:
            return torch.zeros(num_slots + 1, *more, dtype=dtype, device=backend.device)

        self.padding = num_slots
        self.tokens = zeros(torch.int64)
        """The newest token, whose K and V are not in the cache yet."""
        self.lengths = zeros(torch.int64)
        """Tokens in the cache."""
        self.keys = zeros(torch.int64)
        self.temperatures = zeros(torch.float32)
        self._table = zeros(torch.int32, max_pages)
        self._table[self.padding] = padding_page
        self._grows = torch.ones_like(self.lengths)
        self._grows[self.padding] = 0
        self._page_tokens, self._to_device = page_tokens, backend.to_device
        self._slots: dict[Sample, int] = {}
        self._free = list(range(num_slots - 1, -1, -1))
        # entries of the slot's row of the table that are up to date
        self._pages_known = [0] * num_slots

    def slots(self, samples: Sequence[Sample]) -> list[int]:
        """The slots of samples that have one, after bringing their pages up to date."""
        slots = [self._slots[sample] for sample in samples]
        stale = [
            (slot, sample)
            for slot, sample in zip(slots, samples, strict=True)
            if self._pages_known[slot] != len(sample.pages)
        ]
        if stale:
            rows = torch.from_numpy(
                np.stack([sample.block_row for _, sample in stale]).astype(np.int32)
            )
            index = torch.tensor([slot for slot, _ in stale])
            self._table[:, : rows.shape[1]].index_copy_(
                0, self._to_device(index), self._to_device(rows)
            )
            for slot, sample in stale:
                self._pages_known[slot] = len(sample.pages)
        return slots

    def admit(self, samples: Sequence[Sample], tokens: torch.Tensor) -> None:
        """Give each sample a slot and its first state: ``tokens`` int64 [N] were just drawn, all
        before them are in the cache.
        """
        for sample in samples:
            slot = self._slots[sample] if sample in self._slots else self._free.pop()
            self._slots[sample], self._pages_known[slot] = slot, 0
        index = self._to_device(torch.tensor(self.slots(samples)))
        lengths, keys = (
            torch.tensor(values)
            for values in zip(*((len(s.tokens), s.key) for s in samples), strict=True)
        )
        temperatures = torch.tensor(
            [sample.prompt.request.sampling.temperature for sample in samples], dtype=torch.float32
        )
        self.tokens.index_copy_(0, index, tokens)
        for row, values in (
            (self.lengths, lengths),
            (self.keys, keys),
            (self.temperatures, temperatures),
        ):
            row.index_copy_(0, index, self._to_device(values))

    def forget(self, samples: Iterable[Sample]) -> None:
        """The slots of these samples are free; what was launched for them may still run."""
        for sample in samples:
            slot = self._slots.pop(sample, None)
            if slot is not None:
                self._free.append(slot)

    def clear(self) -> None:
        """Forget all samples."""
        self.forget(list(self._slots))

    def batch(self, rows: torch.Tensor, max_length: int) -> tuple[torch.Tensor, DecodeBatch]:
        """The newest tokens int64 [B] of the slots ``rows`` int64 [B], and where their K and V
        go.
        """
        positions, table = self.lengths[rows], self._table[rows]
        pages = table.gather(1, (positions // self._page_tokens)[:, None])[:, 0].long()
        slots = pages * self._page_tokens + positions % self._page_tokens
        return self.tokens[rows], DecodeBatch(
            positions, slots, table, (positions + 1).int(), max_length
        )

    def append(self, rows: torch.Tensor, tokens: torch.Tensor) -> None:
        """``tokens`` int64 [B] were drawn for the slots ``rows``: their predecessors are in the
        cache now.
        """
        self.tokens.index_copy_(0, rows, tokens)
        self.lengths.index_add_(0, rows, self._grows[rows])
