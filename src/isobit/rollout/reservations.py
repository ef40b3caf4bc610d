"""Pages and carries for what the next forward writes, with copies of those that others hold as
well.
"""

from typing import Protocol

from isobit.kernels.operands import DELTA_CHUNK
from isobit.memory.cache_size import PageAllocator
from isobit.rollout.sequence import CachedTokens


class PageStore(Protocol):
    """What holds the pages and the carries of a cache."""

    def copy_pages(self, sources: list[int], targets: list[int]) -> None:
        """Copy the K and V of pages, in all layers, ``sources[i]`` to ``targets[i]``; all targets
        differ, and none is a source.
        """
        ...

    def copy_carries(self, sources: list[int], targets: list[int]) -> None:
        """The same of carries."""
        ...

    def clear_pages(self, pages: list[int]) -> None:
        """Set the K and V of pages to zero, in all layers."""
        ...


class Reservations:
    """What sequences are given, and the copies that are still to be made."""

    def __init__(self, allocator: PageAllocator, store: PageStore) -> None:
        self._allocator, self._store = allocator, store
        self._sources: list[int] = []  # of the copies that the samples need that start now
        self._targets: list[int] = []
        self._carry_sources: list[int] = []
        self._carry_targets: list[int] = []
        self.has_carries = allocator.carries.count > 0
        """Whether the model has delta rules."""

    @property
    def is_copying(self) -> bool:
        """Whether copies have been asked for."""
        return bool(self._sources or self._carry_sources)

    def reserve(self, sequence: CachedTokens) -> bool:
        """Make sure of pages for all tokens (at least one new one), held by nobody else where they
        will be written; and of a carry for the next of them.

        Takes nothing and returns False if there are not enough free pages or carries.
        """
        missing, copied = self.missing_pages(sequence), self._page_to_copy(sequence)
        copies_carry = self.has_carries and self._has_to_copy_carry(sequence)
        lacks_carry = self.has_carries and sequence.lacks_carry
        if missing > self._allocator.num_free:
            return False
        if copies_carry + lacks_carry > self._allocator.carries.num_free:
            return False
        if copied is not None:
            page, source = self._allocator.allocate(), sequence.pages[copied]
            self._sources.append(source)
            self._targets.append(page)
            self._allocator.release(source)
            sequence.replace_page(copied, page)
            missing -= 1
        for _ in range(missing):
            sequence.add_page(self._allocator.allocate())
        if copies_carry:
            carry = self._allocator.allocate_carry()
            self._carry_sources.append(sequence.carry)
            self._carry_targets.append(carry)
            self._allocator.carries.release(sequence.carry)
            sequence.carry = carry
        if lacks_carry:
            sequence.next_carry = self._allocator.allocate_carry()
        sequence.reserved = len(sequence.pages) * self._allocator.page_tokens
        return True

    def missing_pages(self, sequence: CachedTokens) -> int:
        """Free pages that ``reserve`` takes."""
        length = max(sequence.length, sequence.cached + 1)
        missing = self._allocator.pages_for(length) - len(sequence.pages)
        return missing + (self._page_to_copy(sequence) is not None)

    def _page_to_copy(self, sequence: CachedTokens) -> int | None:
        """The index of a page that others hold as well and that its next token is written to."""
        index = sequence.cached // self._allocator.page_tokens
        is_shared = (
            index < len(sequence.pages) and self._allocator.holders(sequence.pages[index]) > 1
        )
        return index if is_shared else None

    def _has_to_copy_carry(self, sequence: CachedTokens) -> bool:
        """Whether its next token is written to a carry that others hold as well."""
        if sequence.begins_chunk:
            return False
        return self._allocator.carries.holders(sequence.carry) > 1

    def with_carry(self, sequence: CachedTokens, count: int) -> int:
        """How many of its next ``count`` tokens have a carry to be written to: where a further
        chunk needs one it gets one that is free, and else they end with the chunk that it has.
        """
        within = (sequence.carry_chunk + 1) * DELTA_CHUNK - sequence.cached
        if count <= within or sequence.next_carry >= 0:
            return count
        if not self._allocator.carries.num_free:
            return within
        sequence.next_carry = self._allocator.allocate_carry()
        return count

    def guesses_with_carry(self, sample: CachedTokens, count: int) -> int:
        """The same of guesses. They end within a chunk of the first token, which stays, or within
        the next one: were they rejected behind that, nothing would hold what it carries.
        """
        last = ((sample.cached - 1) // DELTA_CHUNK + 2) * DELTA_CHUNK - 1
        return self.with_carry(sample, 1 + min(count, last - sample.cached)) - 1

    def clear(self) -> None:
        """Clear pages that may hold a NaN, before anything is written to them."""
        if pages := self._allocator.take_pages_to_clear():
            self._store.clear_pages(pages)

    def copy(self) -> int:
        """Make the copies asked for, all at once; the number of pages."""
        self.clear()
        copied = len(self._sources)
        if copied:
            self._store.copy_pages(self._sources, self._targets)
            self._sources, self._targets = [], []
        if self._carry_sources:
            self._store.copy_carries(self._carry_sources, self._carry_targets)
            self._carry_sources, self._carry_targets = [], []
        return copied
