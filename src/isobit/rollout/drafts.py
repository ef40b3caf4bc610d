"""Guesses of the tokens that a sample draws next, without a model: what came behind the same tokens
before, in its own prompt and answer, in the answers of its siblings and in those of the prompt's
earlier visits.

    draft     the scheduler puts k guesses behind a decoding sample's last token
    forward   its k + 1 rows are those of a chunk, or of as many decoding samples in a captured
              step; both have the bits of decoding one by one
    draw      each row draws a token with the noise of its position; a guess is accepted while it is
              the token that the row before has drawn (``isobit.rollout.executor``)

So a token, its log-probability and its routing are those that decoding draws, whatever was guessed.
K and V of rejected rows stay in the sample's own pages, behind its end, until its next tokens
overwrite them. Until then they are keys beyond the length of every row that is computed, whose
weight is 0.

**The table** has one slot for each hash of a prompt and of the last ``CONTEXTS`` tokens: which
token came next, and by how many votes it leads. It has a fixed size; what falls into a slot that is
taken replaces it, and guesses that are wrong for it are rejected. Nothing in it depends on time or
on the process, so that ranks which share an engine guess alike.

**How many.** Of a sample's j-th guess the chance of being accepted is a^j, where a is the rate at
which the table has foretold the sample's last tokens, whether these were guessed or not. The
likeliest guesses of all samples stand in a step, as many as give the most expected tokens a second
by the device's times of steps (``StepTimes``); none where that is no more than without any.
"""

from array import array
from collections.abc import Sequence
from math import inf
from typing import Protocol
from zlib import crc32

from isobit.memory.cache_size import SPECULATED_ROWS
from isobit.rollout.sequence import CachedTokens, Sample

CONTEXTS = 6, 4, 2
"""Tokens of a context, the longest that is known being believed."""
SLOTS = 1 << 22
"""Of the table: 32 MiB."""
MOST_VOTES = 7
"""A token leads by no more, so that newer answers soon outvote older ones."""
NEW_SHARE = 0.15
"""The weight of a new token in the rates of its sample."""


class StepTimes(Protocol):
    """What a device's steps take, in any unit."""

    @property
    def wait_s(self) -> float:
        """What a step takes longer because the tokens of the one before are waited for first."""
        ...

    @property
    def host_s(self) -> float:
        """And, by sample, because the host meanwhile looks guesses up and plans with them."""
        ...

    def step_seconds(self, rows: int, length: int) -> float:
        """A step of so many rows, at most ``SPECULATED_ROWS``, whose longest sequence has
        ``length`` tokens.
        """
        ...


class Drafter:
    """What was drawn so far, and guesses of what comes.

    Args:
        most: guesses behind one sample.
        times: of the device.
        slots: of the table, a power of two.
    """

    def __init__(self, most: int, times: StepTimes, slots: int = SLOTS) -> None:
        self._most, self._times = most, times
        self._table = array("Q", bytes(8 * slots))
        """A token (32 bits), bits of its context's hash (24) and the votes (8); 0 is empty."""

    def is_worth_waiting(self, running: Sequence[Sample]) -> bool:
        """Whether guesses behind these samples are expected to be worth it that the tokens in
        flight are waited for first.
        """
        if not 0 < len(running) < SPECULATED_ROWS:
            return False
        for sample in running:
            self.note(sample)
        rows, length = len(running), max(sample.length for sample in running)
        wait_s = self._times.wait_s + self._times.host_s * rows
        accepted = sum(_most_accepted(sample) for sample in running)
        now, later = (self._times.step_seconds(rows + more, length) for more in (0, 1))
        if (rows + accepted) * now <= rows * (later + wait_s):
            return False  # not even if every guess cost as little as one
        likely = [_chances(sample, self._most, sample.foretold) for sample in running]
        return any(self._counts(likely, running, wait_s))

    def drafts(
        self, samples: Sequence[Sample], rooms: Sequence[int], decoding: Sequence[Sample]
    ) -> list[Sequence[int]]:
        """Guesses of the tokens behind those of ``samples``, at most as many as each has room for,
        in a step of all that are ``decoding``.
        """
        if len(decoding) >= SPECULATED_ROWS:
            return [()] * len(samples)
        found = [
            self.draft(sample, min(self._most, room))
            for sample, room in zip(samples, rooms, strict=True)
        ]
        chances = [
            _chances(sample, len(draft)) for sample, draft in zip(samples, found, strict=True)
        ]
        counts = self._counts(chances, decoding)
        return [draft[:count] for draft, count in zip(found, counts, strict=True)]

    def draft(self, sample: Sample, most: int) -> Sequence[int]:
        """Up to ``most`` guesses of the tokens behind those of a decoding sample."""
        self.note(sample)
        salt, context = _salt(sample), sample.tokens[-CONTEXTS[0] :]
        draft: list[int] = []
        while len(draft) < most and (token := self._next(salt, context)) is not None:
            draft.append(token)
            context.append(token)
        return draft

    def _counts(
        self, chances: Sequence[Sequence[float]], decoding: Sequence[Sample], wait_s: float = 0.0
    ) -> list[int]:
        """How many guesses of each sample to verify, of those with such chances of being accepted,
        in a step of all that are ``decoding``; with a guess the step takes ``wait_s`` longer.
        """
        rows, length = len(decoding), max((sample.length for sample in decoding), default=0)
        likeliest = sorted(
            ((chance, place) for place, its in enumerate(chances) for chance in its),
            key=lambda one: -one[0],
        )[: SPECULATED_ROWS - rows]
        best, expected, counts = 0, float(rows), [0] * len(chances)
        rate = expected / self._times.step_seconds(rows, length) if likeliest else 0.0
        for guesses, (chance, _) in enumerate(likeliest, 1):
            expected += chance
            seconds = self._times.step_seconds(rows + guesses, length) + wait_s
            if expected / seconds > rate:
                best, rate = guesses, expected / seconds
        for _, place in likeliest[:best]:
            counts[place] += 1
        return counts

    def note(self, sample: Sample) -> None:
        """Learn from the tokens that have come since the last time, of a sample and its prompt, and
        how well the table has foretold those of the sample.
        """
        salt = _salt(sample)
        self._learn(salt, sample.prompt)
        for is_known, is_right in self._learn(salt, sample):
            sample.foretold += NEW_SHARE * (is_known - sample.foretold)
            if is_known and sample.acceptance >= 0:
                sample.acceptance += NEW_SHARE * (is_right - sample.acceptance)

    def _learn(self, salt: int, sequence: CachedTokens) -> list[tuple[bool, bool]]:
        """Of each new token, whether the table foretold one in its place, and this one."""
        tokens, table = sequence.tokens, self._table
        mask, seen = len(table) - 1, list[tuple[bool, bool]]()
        for place in range(sequence.noted, len(tokens)):
            token, foretold = tokens[place], -1
            for size in CONTEXTS:
                if size > place:
                    continue
                key = hash((salt, *tokens[place - size : place]))
                slot, check = key & mask, key >> 40 & 0xFFFFFF
                entry = table[slot]
                votes = entry & 0xFF
                if entry >> 8 & 0xFFFFFF != check or votes == 0:
                    table[slot] = token << 32 | check << 8 | 1
                    continue
                foretold = entry >> 32 if foretold < 0 else foretold
                if entry >> 32 == token:
                    table[slot] = entry + (votes < MOST_VOTES)
                else:
                    table[slot] = entry - 1 if votes > 1 else token << 32 | check << 8 | 1
            seen.append((foretold >= 0, foretold == token))
        sequence.noted = len(tokens)
        return seen

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


def _most_accepted(sample: Sample) -> float:
    """Guesses of a sample that are accepted, however many there are."""
    rate = sample.acceptance
    if rate <= 0:
        return 0.0
    return sample.foretold * rate / (1 - rate) if rate < 1 else inf


def _chances(sample: Sample, count: int, foretold: float = 1.0) -> list[float]:
    """Of so many guesses of a sample, that each and all before it are accepted, where the first
    exists with the chance ``foretold``; none of a sample that a guess has spoilt.
    """
    rate = sample.acceptance
    return [foretold * rate**place for place in range(1, count + 1)] if rate > 0 else []
