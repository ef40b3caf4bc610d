"""Guesses of the tokens that a sample draws next, without a model: what came behind the same tokens
before, in its own prompt and answer, in the answers of its siblings and in those of the prompt's
earlier visits.

    draft     the scheduler puts k guesses behind a decoding sample's last token
    forward   its k + 1 rows are those of a chunk, whose bits are those of decoding one by one
    draw      each row draws a token with the noise of its position; a guess is accepted while it is
              the token that the row before has drawn (``isobit.rollout.executor``)

So a token, its log-probability and its routing are those that decoding draws, whatever was guessed.
K and V of rejected rows stay in the sample's own pages, behind its end, until its next tokens
overwrite them.

**The table** has one slot for each hash of a prompt and of the last ``CONTEXTS`` tokens: which
token came next, and by how many votes it leads. It has a fixed size; what falls into a slot that is
taken replaces it, and guesses that are wrong for it are rejected. Nothing in it depends on time or
on the process, so that ranks which share an engine guess alike.

**How many.** As many as are each likelier to be drawn than ``WORTH``, at the rate at which the
sample's last guesses were accepted, while the step has few rows (``most_drafted``).
"""

from array import array
from collections.abc import Sequence
from math import log
from zlib import crc32

from isobit.memory.cache_size import SPECULATED_ROWS
from isobit.rollout.sequence import CachedTokens, Sample

CONTEXTS = 6, 4, 2
"""Tokens of a context, the longest that is known being believed."""
SLOTS = 1 << 22
"""Of the table: 32 MiB."""
MOST_VOTES = 7
"""A token leads by no more, so that newer answers soon outvote older ones."""
WORTH = 0.3
"""The chance of being accepted below which a row is not worth its time."""
NEW_SHARE, RECOVERY = 0.15, 0.004
"""The weight of a new guess in the rate of its sample, and what the rate gains in a step without
any, so that about every 12th tries again."""


class Drafter:
    """What was drawn so far, and guesses of what comes.

    Args:
        most: guesses behind one sample.
        slots: of the table, a power of two.
    """

    def __init__(self, most: int, slots: int = SLOTS) -> None:
        self._most = most
        self._table = array("Q", bytes(8 * slots))
        """A token (32 bits), bits of its context's hash (24) and the votes (8); 0 is empty."""

    def draft(self, sample: Sample, most: int) -> Sequence[int]:
        """Up to ``most`` guesses of the tokens behind those of a decoding sample."""
        self.note(sample)
        most = min(most, depth(sample.acceptance))
        salt, context = _salt(sample), sample.tokens[-CONTEXTS[0] :]
        draft: list[int] = []
        while len(draft) < most and (token := self._next(salt, context)) is not None:
            draft.append(token)
            context.append(token)
        if not draft:
            sample.acceptance += RECOVERY
        return draft

    def most_drafted(self, decoding: int) -> int:
        """Guesses behind each of so many decoding samples: together they have ``SPECULATED_ROWS``
        rows. A table of the times of a device's steps would stand here.
        """
        return min(self._most, max(0, SPECULATED_ROWS // decoding - 1)) if decoding else 0

    def note(self, sample: Sample) -> None:
        """Learn from the tokens that have come since the last time, of a sample and its prompt."""
        salt = _salt(sample)
        for sequence in (sample.prompt, sample):
            self._learn(salt, sequence)

    def _learn(self, salt: int, sequence: CachedTokens) -> None:
        tokens, table = sequence.tokens, self._table
        mask = len(table) - 1
        for place in range(sequence.noted, len(tokens)):
            token = tokens[place]
            for size in CONTEXTS:
                if size > place:
                    continue
                key = hash((salt, *tokens[place - size : place]))
                slot, check = key & mask, key >> 40 & 0xFFFFFF
                entry = table[slot]
                votes = entry & 0xFF
                if entry >> 8 & 0xFFFFFF != check or votes == 0:
                    table[slot] = token << 32 | check << 8 | 1
                elif entry >> 32 == token:
                    table[slot] = entry + (votes < MOST_VOTES)
                else:
                    table[slot] = entry - 1 if votes > 1 else token << 32 | check << 8 | 1
        sequence.noted = len(tokens)

    def _next(self, salt: int, context: Sequence[int]) -> int | None:
        """The token that came behind the longest known end of ``context``."""
        mask = len(self._table) - 1
        for size in CONTEXTS:
            if size > len(context):
                continue
            key = hash((salt, *context[-size:]))
            entry = self._table[key & mask]
            if entry & 0xFF and entry >> 8 & 0xFFFFFF == key >> 40 & 0xFFFFFF:
                return int(entry >> 32)
        return None


def _salt(sample: Sample) -> int:
    """The same for all answers to a prompt; Python's own hash of a text differs between
    processes.
    """
    return crc32(sample.handle.prompt_id.encode())


def depth(acceptance: float) -> int:
    """Guesses that are each accepted with a chance of at least ``WORTH``, where a guess is at this
    rate once those before it are.
    """
    return int(log(WORTH) / log(min(acceptance, 0.99))) if acceptance >= WORTH else 0


def rate_after(acceptance: float, drafted: int, accepted: int) -> float:
    """The rate after so many of the guesses of a step were accepted; those behind the first that
    was not say nothing.
    """
    for is_accepted in (True,) * accepted + (False,) * (drafted > accepted):
        acceptance += NEW_SHARE * (is_accepted - acceptance)
    return acceptance
