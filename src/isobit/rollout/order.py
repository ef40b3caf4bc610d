"""The order in which samples start where more wait than can run: the longest first, by what is
known.

Nothing that is drawn depends on it, so it is free to serve the time that a batch takes.  That ends
with its longest answer: started last, it runs alone for as long as it is.  Nobody knows beforehand
which one that is, but the answers to one prompt are alike in length, so that one sample of each
group tells of the others.

    first     one sample of each group of which nothing is known
    then      groups of which nothing has ended yet, since their first samples outlast those that
              have; then the others, those with the longest known answer first

Known are the answers of the group that have ended and those of the prompt's visits before.  Ties
stand in the order of arrival, so that requests of one sample each, of which nothing is known, are
served first come, first served.

**Prompts that are held.**  A prompt keeps its pages and its carry from its first start until its
last sample has started.  Those of groups that have begun are held to ``HELD_SHARE`` of the cache:
beyond it a further group begins when no sample of the others is left in line.  A group of one
sample holds nothing, but goes behind the others where its prompt would not fit into that share.

After Seer (OSDI 26), which measures 96% of the throughput of an order that knows all lengths.
"""

from collections.abc import Iterable
from math import inf

from isobit.memory.cache_size import PageAllocator
from isobit.rollout.requests import Handle
from isobit.rollout.sequence import Sample, SharedPrompt

HELD_SHARE = 1 / 4
"""The share of pages, and of carries, for prompts whose groups have begun and have samples in line.
"""
MOST_PROMPTS = 1 << 16
"""Prompts whose lengths are remembered: some 20 MB."""
_FIRST = 0, (0, 0.0)


class AnswerLengths:
    """The longest answer to each prompt in its last two visits, for the last ``MOST_PROMPTS`` to
    have one.
    """

    def __init__(self) -> None:
        self._longest: dict[str, tuple[int, int, int]] = {}
        """By prompt: its last visit, the longest answer of that, and of the one before."""

    def note(self, handle: Handle, length: int) -> None:
        """A sample has ended, with an answer of so many tokens."""
        name = handle.prompt_id
        visit, longest, before = self._longest.pop(name, (handle.visit, 0, 0))
        if handle.visit > visit:
            visit, longest, before = handle.visit, 0, longest
        self._longest[name] = visit, max(longest, length), before
        if len(self._longest) > MOST_PROMPTS:
            del self._longest[next(iter(self._longest))]

    def longest(self, prompt_id: str) -> float:
        """Tokens of the longest known answer; infinite where none is known."""
        known = self._longest.get(prompt_id)
        return inf if known is None else max(known[1:])


def arranged(
    line: Iterable[Sample], lengths: AnswerLengths, allocator: PageAllocator
) -> list[Sample]:
    """The waiting samples in the order in which they are to start; those of a lower heat stay in
    front of the others, and those of heat 0 as they are.
    """
    line = list(line)
    groups = dict.fromkeys(sample.prompt for sample in line)
    wanted = _groups_to_begin(groups, allocator)
    # lines are long, so what depends on the prompt alone is looked up once
    longest = {prompt: lengths.longest(prompt.request.prompt.id) for prompt in groups}
    ranks = {prompt: (1 + (prompt not in wanted), -longest[prompt]) for prompt in groups}
    probes = {prompt for prompt in wanted if not prompt.has_begun and longest[prompt] == inf}

    def rank(sample: Sample) -> tuple[int, tuple[int, float]]:
        prompt = sample.prompt
        if sample.heat == 0:
            return _FIRST
        if prompt in probes:
            probes.remove(prompt)
            return sample.heat, (0, 0.0)
        return sample.heat, ranks[prompt]

    return sorted(line, key=rank)


def _groups_to_begin(groups: Iterable[SharedPrompt], allocator: PageAllocator) -> set[SharedPrompt]:
    """The groups that have begun, and those that may begin beside them, in their order."""
    wanted = {prompt for prompt in groups if prompt.has_begun}
    left = HELD_SHARE * allocator.num_pages
    left -= sum(allocator.pages_for(prompt.length) for prompt in wanted)
    carries = inf if allocator.carries.count == 0 else HELD_SHARE * allocator.carries.count
    carries -= len(wanted)
    for prompt in groups:
        needed = allocator.pages_for(prompt.length)
        if prompt not in wanted and ((needed <= left and carries >= 1) or not wanted):
            wanted.add(prompt)
            if prompt.waiting > 1:
                left, carries = left - needed, carries - 1
    return wanted
