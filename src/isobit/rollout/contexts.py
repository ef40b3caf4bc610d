"""What came behind which tokens: the table in which guesses are looked up.

An entry stands in the slot of a context, the last 6 or 2 tokens of a sequence beside the name of
its prompt. It has the token that came next, by how many votes this one leads, and the slot of the
6 tokens that end with it. So a chain of guesses is a step from entry to entry, and a token that
comes as it was foretold is noted without a hash:

    .. the sum so far   ->   is (5 votes)   ->   120 (2 votes)   ->   . (7 votes)   ->   ..

Where a chain breaks, the contexts there are hashed, the longer one is believed if it is known, and
both learn what came; where the longer one is right, the shorter one learns nothing. Long stretches
of new tokens, those of prompts among them, are noted together in numpy, which hashes as Python
does; tokens of one such stretch do not see each other.

The table has a fixed size. What falls into a taken slot replaces it; links that have become wrong
lead to wrong guesses, which are rejected. Nothing in it depends on time or on the process, so that
ranks which share an engine guess alike.
"""

from array import array
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import chain
from operator import mul
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from isobit.rollout.sequence import CachedTokens

CONTEXTS = 6, 2
"""Tokens of a context, the longest that is known being believed."""
SLOTS = 1 << 22
"""The most of a table: 32 MiB."""
BEFORE = (1 << 24) - 1
"""Stands in contexts for what is before the first token."""
MOST_VOTES = 7
"""A token leads by no more, so that newer answers soon outvote older ones."""
TOKEN_AT, LINK_AT, SLOT_AT = 40, 18, 38
LINK, CHECK, VOTES = SLOTS - 1, 0x3FFF0, 0xF
"""An entry is token + 1 (24 bits), the slot of its link (22), bits of its own hash (14) and votes
(4). A hash has the slot in the bits from ``SLOT_AT`` on. The slot at a sequence's end may hold the
bits of the hash alone: nothing has come there yet.
"""
W1, W2, W3, W4, W5, W6, NAME, SHORT = (
    pow(0x9E3779B97F4A7C15, power, 1 << 60) for power in range(1, 9)
)
"""Weights of a context's tokens in its hash, the last token first, and of its prompt's name; and
what the hash of a short one has more.
"""


Seen = tuple[int, int, int]
"""How many new tokens a sequence has, for how many of them one was foretold, and for how many it
was the one that came.
"""


@lru_cache(maxsize=256)
def salt_of(prompt_id: str) -> int:
    """Parts the contexts of prompts; Python's own hash of a text differs between processes."""
    return crc32(prompt_id.encode()) * NAME & (1 << 64) - 1


class ContextTable:
    """What came behind the contexts that it has seen.

    Args:
        slots: a power of two, at most ``SLOTS``.
    """

    def __init__(self, slots: int = SLOTS) -> None:
        assert slots <= SLOTS
        self.entries = array("Q", bytes(8 * slots))
        self._mask = slots - 1

    def begin(self, sequence: CachedTokens, prompt_id: str) -> None:
        """What is to be done once, before a sequence of this prompt is noted."""
        sequence.salt = salt_of(prompt_id)
        end = _with_context(sequence.tokens[: sequence.noted], sequence.noted)
        weighed = map(mul, reversed(end), (W1, W2, W3, W4, W5, W6))
        sequence.slot = self._reserve(sequence.salt + sum(weighed))

    def learn(self, sequences: Iterable[CachedTokens]) -> list[Seen]:
        """Note the tokens of sequences that have come since the last time, one by one."""
        entries, mask, seen = self.entries, self._mask, list[Seen]()
        for sequence in sequences:
            tokens, slot, salt = sequence.tokens, sequence.slot, sequence.salt
            known = right = 0
            for place in range(sequence.noted, len(tokens)):
                token, entry = tokens[place] + 1, entries[slot]
                foretold = entry >> TOKEN_AT
                if foretold == token:
                    if entry & VOTES < MOST_VOTES:
                        entries[slot] = entry + 1
                    slot = entry >> LINK_AT & LINK
                    known += 1
                    right += 1
                    continue
                f, e, d, c, b, a = (
                    tokens[place - 5 : place + 1] if place > 4 else _first(tokens, place)
                )
                key = salt + a * W1 + b * W2 + c * W3 + d * W4 + e * W5 + f * W6
                behind, check = key >> SLOT_AT & mask, key & CHECK
                if entries[behind] & CHECK != check:
                    entries[behind] = check  # what another context had there is gone
                new = token << TOKEN_AT | behind << LINK_AT | 1
                entries[slot] = entry - 1 if entry & VOTES > 1 else new | entry & CHECK
                key = salt + SHORT + b * W1 + c * W2
                slot, check = key >> SLOT_AT & mask, key & CHECK
                entry = entries[slot]
                if entry & CHECK != check:
                    entries[slot] = new | check
                elif entry >> TOKEN_AT == token:
                    entries[slot] = (new | check) + min(entry & VOTES, MOST_VOTES - 1)
                    foretold = foretold or token
                else:
                    entries[slot] = entry - 1 if entry & VOTES > 1 else new | check
                    foretold = foretold or entry >> TOKEN_AT
                known += foretold > 0
                right += foretold == token
                slot = behind
            seen.append((len(tokens) - sequence.noted, known, right))
            sequence.noted, sequence.slot = len(tokens), slot
        return seen

    def learn_together(self, sequences: Sequence[CachedTokens]) -> list[Seen]:
        """What ``learn`` does, side by side; all of them have new tokens."""
        size = CONTEXTS[0]
        pieces = [_with_context(sequence.tokens, sequence.noted) for sequence in sequences]
        lengths = np.array([len(piece) for piece in pieces])
        ends = lengths.cumsum()
        row = np.array(list(chain.from_iterable(pieces)), dtype=np.uint64)
        salts = np.array([sequence.salt for sequence in sequences], dtype=np.uint64)
        hashes = np.repeat(salts, lengths)
        short = hashes + np.uint64(SHORT)
        for back, weight in enumerate((W1, W2, W3, W4, W5, W6)):
            weighed = row[: len(row) - back] * np.uint64(weight)
            hashes[back:] += weighed
            if back < CONTEXTS[1]:
                short[back:] += weighed
        is_new = np.ones(len(row), dtype=np.bool_)
        is_new[(ends - lengths)[:, None] + np.arange(size)] = False
        places = np.flatnonzero(is_new)
        is_known = is_right = np.zeros(len(places), dtype=np.bool_)
        slots = self._slots(hashes[places])
        token, link = row[places] + np.uint64(1), slots << np.uint64(LINK_AT)
        table = np.frombuffer(self.entries, dtype=np.uint64)
        for its in (hashes, short):
            keys = its[places - 1]
            own, check = self._slots(keys), keys & np.uint64(CHECK)
            entries = table[own]
            votes, agrees = entries & np.uint64(VOTES), entries >> np.uint64(TOKEN_AT) == token
            is_own = (votes > 0) & (entries & np.uint64(CHECK) == check)
            new = token << np.uint64(TOKEN_AT) | link | check
            more = new + np.minimum(votes + np.uint64(1), np.uint64(MOST_VOTES))
            fewer = np.where(votes > 1, entries - np.uint64(1), new + np.uint64(1))
            noted = np.where(is_own, np.where(agrees, more, fewer), new + np.uint64(1))
            table[own[~is_right]] = noted[~is_right]
            is_right = np.where(is_known, is_right, is_own & agrees)
            is_known = is_known | is_own
        for sequence, key in zip(sequences, hashes[ends - 1].tolist(), strict=True):
            sequence.noted, sequence.slot = len(sequence.tokens), self._reserve(key)
        starts = ends - lengths - size * np.arange(len(ends))
        known, right = (np.add.reduceat(its, starts).tolist() for its in (is_known, is_right))
        return list(zip((lengths - size).tolist(), known, right, strict=True))

    def guesses(self, sequence: CachedTokens, most: int) -> list[int]:
        """Up to so many tokens that may come behind a sequence whose tokens have been noted."""
        entries, slot, draft = self.entries, sequence.slot, list[int]()
        while len(draft) < most:
            entry = entries[slot]
            if not entry & VOTES:
                b, a = [BEFORE, *sequence.tokens[-2:], *draft][-2:]
                key = sequence.salt + SHORT + a * W1 + b * W2
                entry = entries[key >> SLOT_AT & self._mask]
                if not entry & VOTES or entry & CHECK != key & CHECK:
                    break
            draft.append((entry >> TOKEN_AT) - 1)
            slot = entry >> LINK_AT & LINK
        return draft

    def _reserve(self, key: int) -> int:
        """The slot of a long context, which no other has from now on."""
        slot, check = key >> SLOT_AT & self._mask, key & CHECK
        if self.entries[slot] & CHECK != check:
            self.entries[slot] = check
        return slot

    def _slots(self, keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
        return keys >> np.uint64(SLOT_AT) & np.uint64(self._mask)


def _with_context(tokens: Sequence[int], place: int) -> Sequence[int]:
    """The tokens from a place on, behind the longest context there."""
    start = place - CONTEXTS[0]
    return tokens[start:] if start >= 0 else [*[BEFORE] * -start, *tokens]


def _first(tokens: Sequence[int], place: int) -> Sequence[int]:
    """The longest context that ends with the token at one of a sequence's first places."""
    return _with_context(tokens[: place + 1], place + 1)
