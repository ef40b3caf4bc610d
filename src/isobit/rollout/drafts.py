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

**How many.** Of a sample's j-th guess the chance of being accepted is a^j, where a is the rate at
which the table has foretold the sample's last tokens, whether these were guessed or not. In a step
stand those guesses, and as many, with which a token of a sample is expected to take the least time,
in the mean of all samples, since a rollout lasts until its slowest sample has ended; none where
that is no less than without any. Seconds are those of the device's steps (``StepTimes``). A step
with guesses has to be waited for. What that costs, what share of the guesses that were expected to
be accepted were, and what steps without guesses take are learnt from the engine's own steps, two of
them by a clock; so the number of guesses depends on it, and nothing else does. Only guesses that
stand in a plan count. Steps without guesses are timed first, and again after as much time as 400 of
them take, in which others had guesses; what guesses bring is forgotten while there are none.

Whatever is estimated and learnt, guesses have a budget of three steps and 1% of the time, from
which is taken by how much a step puts that sample behind which is furthest behind: by the steps
without guesses that would have taken as long, less its tokens. What it catches up is given back.
Where the budget is spent there are no guesses until time has passed. It can be overdrawn by a step
with guesses, and by the wait that was decided on before what this step took was known. Of a step
that takes more than twice what is known, the rest counts as a pause and is not taken from it. From
a time in which a step was captured or measured, which is done once for each size, nothing is taken
or learnt of what steps take.

The steps of a small model wait for the host, and what it does for guesses shows in them: looking
them up, noting tokens, estimates. So where the device takes less than ``shortest`` for a step of
one sample, nothing is done for guesses at all.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain, pairwise, repeat
from math import inf, log
from operator import mul, neg, sub
from typing import Protocol

from isobit.memory.cache_size import SPECULATED_ROWS
from isobit.rollout.contexts import SLOTS, ContextTable
from isobit.rollout.sequence import Sample

GUESSES = 7
"""The most guesses behind a sample, by default."""
NEW_SHARES = [1 - 0.85**count for count in range(100)]
"""The weight in a sample's rates of so many new tokens."""
SHORTEST_S = 5e-4
"""Seconds that the device takes for a step of one sample, below which there are no guesses by
default. Of two models on an H200, which take about 0.3 and 0.9 ms, steps of 64 samples of the first
wait for the host, and those of the second hardly do (docs/performance.md, "Guesses").
"""
LONGEST_REST = 31
"""Steps for which nothing is looked up, at most."""
LOOKED_UP = 0.25
"""A guess is looked up in the next step if its chance is at least this share of what the least one
that was worth it gained; where all were worth it, of the chance that was asked for.
"""
LENGTHS = 64
"""Tokens of a sequence in which the times of steps are taken to be equal."""
TOGETHER, TOGETHER_EACH = 64, 12
"""New tokens of several samples, and of each of these, from which on numpy notes them faster."""
LEARNT, FORGOTTEN = 0.2, 0.02
"""How far what guesses are taken to cost and to bring moves to what they have cost and brought in a
step, and back to the estimate where none are worth it that tokens are waited for.
"""
SLOWLY_FORGOTTEN = FORGOTTEN / (LONGEST_REST + 1)
"""The same of a step for which nobody had to wait, and which has none."""
TIMED, WITHHELD = 3, 8
"""Steps without guesses that are timed before there are any, of about as many samples, and steps
for which guesses are withheld for that, at most.
"""
TIMED_AGAIN, TIMED_SOON = 400.0, 100.0
"""The time in steps with guesses after which others are timed again, in such steps, and the same
where what they take was last a mean: guesses that are kept by what once was slow cost no more, and
where they are worth it this costs 1%.
"""
BUDGET, REFILL = 3.0, 0.01
"""Steps without guesses that guesses may cost a sample, and the share of the time that is added to
that; for each power of two of the samples.
"""
LEAST, MOST = 1 / 8, 2.0
"""Multiples of the estimate, from which guesses can become dear again, and how many times what is
known one step may count.
"""


class StepTimes(Protocol):
    """What a device's steps take, in any unit."""

    @property
    def wait_s(self) -> float:
        """What a step takes longer because the tokens of the one before are waited for first."""
        ...

    @property
    def host_s(self) -> float:
        """And, by sample, because the host meanwhile looks guesses up and plans with them; an
        estimate, which is corrected by what steps take.
        """
        ...

    def now(self) -> float:
        """Seconds of a clock; always 0 where costs are not learnt: a step takes no longer, or ranks
        have to guess alike.
        """
        ...

    @property
    def captures(self) -> int:
        """Steps that were captured or measured so far."""
        ...

    def step_seconds(self, rows: int, length: int) -> float:
        """A step of so many rows, at most ``SPECULATED_ROWS``, whose longest sequence has
        ``length`` tokens.
        """
        ...


@dataclass(slots=True)
class _Learnt:
    """What steps with about as many decoding samples were like, in multiples of the estimates."""

    cost: float = 1.0  # what guesses cost
    accepted: float = 1.0  # guesses that were accepted
    plain: float = 1.0  # what steps without guesses take
    budget: float = BUDGET  # of such steps, that guesses may still cost
    timed: int = 0  # of these, since they are timed again
    withheld: int = WITHHELD  # steps that may still be without guesses so that these are timed
    spent: float = 0.0  # by steps with guesses meanwhile, in steps without

    def forget(self, share: float) -> None:
        """Move what guesses cost and bring to the estimates."""
        self.cost += share * (1 - self.cost)
        self.accepted += share * (1 - self.accepted)

    def withholds(self) -> bool:
        """Whether the next step goes without guesses, because they have cost too much, or so that
        such steps are timed.
        """
        if self.budget <= 0:
            return True
        if self.timed >= TIMED or not self.withheld:
            return False
        self.withheld -= 1
        return True

    def time(self, one: float) -> None:
        """A step without guesses has taken so long.  Of the first ones the least counts: what slows
        a step down is often over soon.
        """
        one = min(one, MOST * self.plain)
        if self.timed < TIMED:
            self.plain = min(one, self.plain) if self.timed else one
        else:
            self.plain += LEARNT * (one - self.plain)
            self.spent = TIMED_AGAIN - TIMED_SOON
        self.timed += 1

    def spend(self, steps: float) -> None:
        """A step with guesses has taken as long as so many without, by the estimates."""
        self.spent += steps / self.plain
        if self.spent >= TIMED_AGAIN:
            self.timed, self.withheld, self.spent = 0, WITHHELD, 0.0


@dataclass(frozen=True, slots=True)
class _Planned:
    """A step of decoding samples alone."""

    samples: Sequence[Sample]
    drawn: Sequence[int]  # their tokens so far, where any has guesses or was waited for
    plain_s: float  # without guesses, by estimate
    device_s: float  # by estimate
    expected: float  # guesses to be accepted; 0 where it has none
    was_waited_for: bool  # the step before, so that this one could have guesses


class Drafter:
    """What was drawn so far, and guesses of what comes.

    Args:
        most: guesses behind one sample.
        times: of the device.
        slots: of the table, a power of two.
        shortest: what a step of one sample must take on the device at least, in the unit of
            ``times``, so that there are guesses.
    """

    def __init__(
        self, most: int, times: StepTimes, slots: int = SLOTS, shortest: float = 0.0
    ) -> None:
        self.most, self._times, self._shortest = most, times, shortest
        self._table = ContextTable(slots)
        self._rest = self._last_rest = 0
        """Steps for which nothing is looked up: those that are left, and in all."""
        self._least = 0.0
        """The chance that a guess must have to be looked up."""
        self._length, self._seconds = 0, list[float]()
        """Of steps whose longest sequence is about so long, by rows; 0 where not asked yet."""
        self._learnt = [_Learnt() for _ in range(SPECULATED_ROWS.bit_length() + 1)]
        """By the bits of the number of samples."""
        self._began = 0.0
        """When the last step was planned."""
        self._captures = times.captures
        """As many as there were then."""
        self._planned: _Planned | None = None
        self._waits = self._has_waited = False
        """Whether the tokens in flight are waited for, and those in front of this plan were."""
        self._flowing = 0
        """Steps without guesses in a row, each planned while the one before was computed."""
        self.has_guessed = False
        """Whether the step that was planned last may have guesses."""
        self._ended = list[Sample]()
        """Samples that have ended and are not noted yet."""

    @cached_property
    def is_off(self) -> bool:
        """Whether the device's steps are too short for guesses; they are timed when it is first
        asked.
        """
        return bool(self._shortest) and self._times.step_seconds(1, LENGTHS) < self._shortest

    def is_worth_waiting(
        self,
        running: Sequence[Sample],
        rooms: Callable[[Sequence[Sample]], Sequence[int]],
    ) -> bool:
        """Whether guesses behind these samples, for as many as there is room, are expected to be
        worth it that the tokens in flight are waited for first.
        """
        self._note_ended()
        if self._rest:
            self._rest -= 1
            return False
        if not 0 < len(running) < SPECULATED_ROWS or self.is_off:
            return False
        self.note(*running)
        if self._withholds(running):
            return False
        is_worth = self._is_worth_waiting(running, rooms)
        self._last_rest = 0 if is_worth else min(LONGEST_REST, 2 * self._last_rest + 1)
        self._rest = self._last_rest
        self._waits = is_worth
        if not is_worth:
            self._of(running).forget(FORGOTTEN)
        return is_worth

    def begin_plan(self) -> None:
        """Learn from the last step, if it was of decoding samples alone.  One with guesses was
        waited for, and the time since it was planned is what the device took for it and what nobody
        would have waited for; where steps follow each other without that, it is what one takes.  A
        pause that has other reasons counts twice what is known at most.
        """
        began, self._began = self._began, self._times.now()
        captures, self._captures = self._captures, self._times.captures
        planned, self._planned = self._planned, None
        waits, self._waits, self.has_guessed = self._waits, False, False
        is_plain = planned is not None and not planned.expected and not waits
        if captures != self._captures:
            began, is_plain = 0.0, False
        self._flowing = self._flowing + 1 if is_plain else 0
        self._has_waited = waits or (planned is not None and planned.expected > 0)
        if planned is None:
            return
        seconds, learnt = self._began - began if began else 0.0, self._of(planned.samples)
        if self._learns:
            self._charge(learnt, planned, seconds)
        if planned.expected:
            self._learn(learnt, planned, seconds)
        elif seconds and self._flowing > 1:
            learnt.time(seconds / planned.device_s)

    def _charge(self, learnt: _Learnt, planned: _Planned, seconds: float) -> None:
        """Take from the budget by how much a step, which has taken so long, has put the sample
        behind that is furthest behind.
        """
        samples = planned.samples
        known_s = max(1.0, learnt.plain) * planned.device_s + self._wait_s(samples)
        steps = min(seconds, MOST * known_s) / (learnt.plain * planned.plain_s)
        learnt.budget += REFILL * steps
        if steps and (planned.expected or planned.was_waited_for):
            before = _furthest_behind(samples)
            for sample, drawn in zip(samples, planned.drawn, strict=True):
                sample.behind += steps - (sample.drawn - drawn)
            learnt.budget -= _furthest_behind(samples) - before
        learnt.budget = min(learnt.budget, BUDGET)

    def _learn(self, learnt: _Learnt, planned: _Planned, seconds: float) -> None:
        """What the guesses of a step, which has taken so long, have brought and cost."""
        samples = planned.samples
        come = sum([sample.drawn for sample in samples]) - sum(planned.drawn)
        brought = max(0, come - len(samples)) / planned.expected
        weight = LEARNT * planned.expected / (1 + planned.expected)  # one guess tells little
        learnt.accepted += weight * (min(brought, MOST * learnt.accepted) - learnt.accepted)
        learnt.accepted = max(learnt.accepted, LEAST)
        estimate = self._times.wait_s + self._times.host_s * len(samples)
        if seconds and estimate:
            cost = min((seconds - planned.device_s) / estimate, MOST * learnt.cost)
            learnt.cost = max(learnt.cost + LEARNT * (cost - learnt.cost), LEAST)
            learnt.spend((planned.device_s + learnt.cost * estimate) / planned.plain_s)

    def end_plan(self, decoding: Sequence[Sample]) -> None:
        """The step that is planned has these decoding samples with the guesses that stand behind
        them (``Sample.draft``), and nothing else.
        """
        drafts = [(sample.acceptance, len(sample.draft)) for sample in decoding if sample.draft]
        plain = len(decoding)
        rows = plain + sum(count for _, count in drafts)
        if 0 < rows <= SPECULATED_ROWS and not self.is_off:
            length = max([sample.length for sample in decoding])
            (plain_s,) = self._seconds_of(plain, plain, length)
            (device_s,) = self._seconds_of(rows, rows, length) if drafts else (plain_s,)
            is_told = bool(drafts) or self._has_waited
            drawn = [sample.drawn for sample in decoding] if is_told else ()
            expected = sum(sum(_chances(rate, count, 1.0)) for rate, count in drafts)
            self._planned = _Planned(decoding, drawn, plain_s, device_s, expected, self._has_waited)

    def over_device(self, samples: int) -> float:
        """How long steps of about so many samples without guesses were known to take, in multiples
        of the estimates.
        """
        return self._about(samples).plain

    @property
    def _learns(self) -> bool:
        return bool(self._began and (self._times.wait_s or self._times.host_s))

    def _withholds(self, decoding: Sequence[Sample]) -> bool:
        """Whether the next step goes without guesses, though they might be worth it."""
        return self._learns and self._of(decoding).withholds()

    def _of(self, samples: Sequence[Sample]) -> _Learnt:
        return self._about(len(samples))

    def _about(self, samples: int) -> _Learnt:
        return self._learnt[min(samples, SPECULATED_ROWS).bit_length()]

    def _is_worth_waiting(
        self,
        running: Sequence[Sample],
        rooms: Callable[[Sequence[Sample]], Sequence[int]],
    ) -> bool:
        rows, length = len(running), max([sample.length for sample in running])
        wait_s, learnt = self._wait_s(running), self._of(running)
        accepted = learnt.accepted * sum([_most_accepted(sample) for sample in running])
        now, later = self._seconds_of(rows, rows + 1, length)
        if (rows + accepted) * learnt.plain * now <= rows * (later + wait_s):
            return False  # not even if every guess cost as little as one
        rates, foretold = zip(*((one.acceptance, one.foretold) for one in running), strict=True)
        most = [min(room, self.most) for room in rooms(running)]
        return any(self._counts(rates, most, running, foretold, wait_s))

    def drafts(
        self, samples: Sequence[Sample], rooms: Sequence[int], decoding: Sequence[Sample]
    ) -> list[Sequence[int]]:
        """Guesses of the tokens behind those of ``samples``, at most as many as each has room for,
        in a step of all that are ``decoding``.
        """
        self._note_ended()
        if not 0 < len(decoding) < SPECULATED_ROWS or self.is_off:
            return [()] * len(samples)
        self.note(*samples)
        if self._withholds(decoding):
            return [()] * len(samples)
        found = [
            self.draft(sample, min(room, self._worth(sample)))
            for sample, room in zip(samples, rooms, strict=True)
        ]
        rates = [sample.acceptance for sample in samples]
        wait_s = self._wait_s(decoding)  # in front of the next step, if this one has guesses
        most = list(map(len, found))
        counts = self._counts(rates, most, decoding, wait_s=wait_s)
        self.has_guessed = any(counts)
        if not self.has_guessed:
            self._of(decoding).forget(SLOWLY_FORGOTTEN)
        return [draft[:count] for draft, count in zip(found, counts, strict=True)]

    def _wait_s(self, samples: Sequence[Sample]) -> float:
        """What a step with guesses behind these samples is taken to take longer."""
        estimate = self._times.wait_s + self._times.host_s * len(samples)
        return self._of(samples).cost * estimate

    def _worth(self, sample: Sample) -> int:
        """How many guesses behind a sample are likely enough to be looked up."""
        rate, least = sample.acceptance, self._least
        if rate <= least:
            return 0
        if rate >= 1 or not least:
            return self.most
        return min(self.most, int(log(least) / log(rate)))

    def draft(self, sample: Sample, most: int) -> Sequence[int]:
        """Up to ``most`` guesses of the tokens behind those of a decoding sample."""
        if sample.noted < len(sample.tokens):
            self.note(sample)
        return self._table.guesses(sample, most)

    def _counts(
        self,
        rates: Sequence[float],
        most: Sequence[int],
        decoding: Sequence[Sample],
        foretold: Sequence[float] = (),
        wait_s: float = 0.0,
    ) -> list[int]:
        """How many guesses of each sample to verify, in a step of all that are ``decoding``.

        Args:
            rates: at which each sample's guesses are accepted.
            most: guesses of each.
            foretold: the chances that they exist; by default they do.
            wait_s: what a step with guesses takes longer.
        """
        rows, foretold, learnt = len(decoding), foretold or [1.0] * len(rates), self._of(decoding)
        exist = [learnt.accepted * one for one in foretold]
        runs = list(map(_gains, rates, most, exist))
        gains = sorted(chain.from_iterable(runs), reverse=True)
        del gains[SPECULATED_ROWS - rows :]
        if not gains:
            self._least *= LOOKED_UP
            return [0] * len(most)
        length = max([sample.length for sample in decoding])
        seconds = self._seconds_of(rows, rows + len(gains), length)
        if wait_s:
            seconds[0] *= learnt.plain
            seconds[1:] = [one + wait_s for one in seconds[1:]]
        steps = accumulate(gains, sub, initial=float(rows))
        times = [one * step_s for one, step_s in zip(steps, seconds, strict=True)]
        best = times.index(min(times))
        if best == sum(most):
            self._least *= LOOKED_UP
            return list(most)
        least = gains[max(0, best - 1)]
        self._least = LOOKED_UP * least
        if not best:
            return [0] * len(most)
        equal = best - bisect_left(gains, -least, key=neg)
        """Of those that gain the least, how many to take."""
        counts = list[int]()
        for run in runs:
            count = bisect_left(run, -least, key=neg)
            if equal and count < len(run) and run[count] == least:
                count, equal = count + 1, equal - 1
            counts.append(count)
        return counts

    def _seconds_of(self, fewest: int, most: int, length: int) -> list[float]:
        """Seconds of steps with the fewest to the most rows; they are asked for once for all
        lengths up to a multiple of ``LENGTHS``.
        """
        length = -(-max(1, length) // LENGTHS) * LENGTHS
        if length != self._length:
            self._length, self._seconds = length, [0.0] * (SPECULATED_ROWS + 1)
        seconds = self._seconds[fewest : most + 1]
        if 0.0 in seconds:
            seconds = [self._times.step_seconds(rows, length) for rows in range(fewest, most + 1)]
            self._seconds[fewest : most + 1] = seconds
        return seconds

    def end(self, samples: Sequence[Sample]) -> None:
        """Note samples that have ended when the next step is computed, so that nothing waits for
        it: if no step follows, in the next rollout.
        """
        if not self.is_off:
            self._ended += samples

    def _note_ended(self) -> None:
        if self._ended:
            self.note(*self._ended)
            self._ended = []

    def note(self, *samples: Sample) -> None:
        """Learn from the tokens that have come since the last time, of samples and their prompts,
        and how well the table has foretold those of each sample.
        """
        late, num_tokens, table = list[Sample](), 0, self._table
        for sample in samples:
            if sample.slot < 0:
                self._begin(sample)
            if count := len(sample.tokens) - sample.noted:
                late.append(sample)
                num_tokens += count
        is_much = num_tokens >= TOGETHER and num_tokens >= TOGETHER_EACH * len(late)
        seen = table.learn_together(late) if is_much else table.learn(late)
        for sample, (count, known, right) in zip(late, seen, strict=True):
            sample.foretold += NEW_SHARES[min(count, 99)] * (known / count - sample.foretold)
            if known and sample.acceptance >= 0:
                sample.acceptance += NEW_SHARES[min(known, 99)] * (
                    right / known - sample.acceptance
                )

    def _begin(self, sample: Sample) -> None:
        name, prompt = sample.handle.prompt_id, sample.prompt
        if prompt.slot < 0:
            self._table.begin(prompt, name)
            self._table.learn_together([prompt])
        self._table.begin(sample, name)


def drafter_of(most: int | None, times: StepTimes) -> Drafter | None:
    """What guesses for an engine, at most so many behind a sample; None where nothing does.  By
    default there are some where what they cost is learnt, and steps are not too short for them.
    """
    if most is None:
        return Drafter(GUESSES, times, shortest=SHORTEST_S) if times.now() else None
    return Drafter(most, times) if most else None


def _furthest_behind(samples: Sequence[Sample]) -> float:
    """Steps by which the sample is behind that guesses have put furthest behind."""
    return max(0.0, *[sample.behind for sample in samples])


def _most_accepted(sample: Sample) -> float:
    """Guesses of a sample that are accepted, however many there are."""
    rate = sample.acceptance
    if rate <= 0:
        return 0.0
    return sample.foretold * rate / (1 - rate) if rate < 1 else inf


def _chances(rate: float, count: int, foretold: float) -> Iterable[float]:
    """The chances of ``count`` guesses that each is accepted with all before it, where the first
    exists with the chance ``foretold``; none for a sample that a guess has spoilt.
    """
    if rate <= 0 or not count:
        return ()
    return accumulate(repeat(rate, count - 1), mul, initial=foretold * rate)


def _gains(rate: float, count: int, foretold: float) -> list[float]:
    """The share of a step by which each of ``count`` guesses shortens a token of its sample: the
    difference that it makes to the reciprocal of the tokens that are expected of a step.
    """
    tokens = accumulate(_chances(rate, count, foretold), initial=1.0)
    return [1 / before - 1 / after for before, after in pairwise(tokens)]
