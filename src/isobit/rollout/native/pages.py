"""Who holds which page of the KV cache: a free list and a count of holders for each page.  Pure
bookkeeping, no tensors.

A page is held by every sequence whose block table names it.  The samples of one prompt hold its
pages together; a page goes back to the free list when its last holder releases it.  The most
recently freed page is handed out first: it is the one still in the CPU's caches, and memory that no
run ever needed is never touched.
"""

from isobit.memory.cache_size import pages_for


class PageAllocator:
    """Hands out the pages ``0 .. num_pages - 1``, of ``page_tokens`` tokens each, and counts their
    holders.
    """

    def __init__(self, num_pages: int, page_tokens: int) -> None:
        self.page_tokens = page_tokens
        self._free = list(range(num_pages - 1, -1, -1))
        self._holders = [0] * num_pages

    @property
    def num_free(self) -> int:
        """Pages that nobody holds."""
        return len(self._free)

    @property
    def num_pages(self) -> int:
        """All pages, held or not."""
        return len(self._holders)

    def pages_for(self, num_tokens: int) -> int:
        """Pages that ``num_tokens`` tokens of one sequence occupy."""
        return pages_for(num_tokens, self.page_tokens)

    def holders(self, page: int) -> int:
        """How many sequences hold ``page``."""
        return self._holders[page]

    def allocate(self) -> int:
        """A free page, now held once.  The caller has checked ``num_free``."""
        page = self._free.pop()
        assert self._holders[page] == 0, f"page {page} was free and held"
        self._holders[page] = 1
        return page

    def share(self, page: int) -> None:
        """One more holder of a page that is held already."""
        assert self._holders[page] > 0, f"page {page} is shared but not held"
        self._holders[page] += 1

    def release(self, page: int) -> None:
        """One holder less; the last one frees the page."""
        assert self._holders[page] > 0, f"page {page} is released but not held"
        self._holders[page] -= 1
        if self._holders[page] == 0:
            self._free.append(page)
