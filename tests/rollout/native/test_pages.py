"""The allocator under random use: nothing leaks, nothing is handed out twice."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from isobit.rollout.native.pages import PageAllocator


class AllocatorUse(RuleBasedStateMachine):
    """Holders allocate, share and release at random; a dictionary counts along."""

    @initialize(num_pages=st.integers(1, 12))
    def make(self, num_pages: int) -> None:
        self.allocator = PageAllocator(num_pages, 64)
        self.expected = dict.fromkeys(range(num_pages), 0)

    def held(self) -> list[int]:
        return [page for page, holders in self.expected.items() if holders > 0]

    @precondition(lambda self: self.allocator.num_free > 0)
    @rule()
    def allocate(self) -> None:
        page = self.allocator.allocate()
        assert self.expected[page] == 0
        self.expected[page] = 1

    @precondition(lambda self: bool(self.held()))
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        page = data.draw(st.sampled_from(self.held()))
        self.allocator.share(page)
        self.expected[page] += 1

    @precondition(lambda self: bool(self.held()))
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        page = data.draw(st.sampled_from(self.held()))
        self.allocator.release(page)
        self.expected[page] -= 1

    @invariant()
    def counts_agree(self) -> None:
        assert {page: self.allocator.holders(page) for page in self.expected} == self.expected
        assert self.allocator.num_free == len(self.expected) - len(self.held())


AllocatorUse.TestCase.settings = settings(max_examples=50, deadline=None)
TestAllocatorUse = AllocatorUse.TestCase


def test_a_page_cannot_be_released_or_shared_when_nobody_holds_it():
    allocator = PageAllocator(2, 64)
    page = allocator.allocate()
    allocator.release(page)
    with pytest.raises(AssertionError, match="released but not held"):
        allocator.release(page)
    with pytest.raises(AssertionError, match="shared but not held"):
        allocator.share(page)


def test_the_last_freed_page_is_used_first():
    allocator = PageAllocator(5, 64)
    first, second = allocator.allocate(), allocator.allocate()
    allocator.release(first)
    assert (first, second, allocator.allocate()) == (0, 1, 0)


def test_pages_are_counted_up():
    assert [PageAllocator(1, 64).pages_for(n) for n in (0, 1, 63, 64, 65, 128)] == [
        0,
        1,
        1,
        1,
        2,
        2,
    ]
    assert [PageAllocator(1, 128).pages_for(n) for n in (0, 1, 64, 127, 128, 129)] == [
        0,
        1,
        1,
        1,
        1,
        2,
    ]
