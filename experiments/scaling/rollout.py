"""Samples on many engines: a queue of groups, handed out by free places, and then samples that move
from the loaded to the idle.

An engine with n samples of C tokens together takes ``decode_s(n) + C x kv_bytes / KV_READ`` for a
token of each.  Engines are followed from one finished sample to the next.  Once the queue is empty,
an engine that has less than half the samples of the one with most takes half of the difference;
their keys and values are computed again where they arrive, at the rate of a prompt.
"""

import math
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from heapq import heapify, heappop, heappush
from itertools import count

from experiments.scaling import costs
from experiments.scaling.costs import Model

PROMPT, MEAN, LONGEST, GROUP = 256, 2048, 8192, 8
SIGMA = 0.6
"""Of the logarithm of a response's length, half of its square by prompt and half by sample:
assumed.  The longest of 256 is then nearly always at the limit.
"""
Group = tuple[int, ...]
Sample = tuple[int, int, int]
"""Tokens still to draw, number of the sample, and response length."""


def draw_groups(prompts: int, seed: int) -> tuple[Group, ...]:
    """Response lengths by group: log-normal with a mean of ``MEAN``, cut at ``LONGEST``."""
    draw = random.Random(seed)  # noqa: S311 (a simulation)
    middle = math.log(MEAN) - SIGMA**2 / 2
    each = SIGMA / math.sqrt(2)
    groups: list[Group] = []
    for _ in range(prompts):
        prompt = draw.gauss(middle, each)
        lengths = [int(math.exp(draw.gauss(prompt, each))) for _ in range(GROUP)]
        groups.append(tuple(min(max(length, 1), LONGEST) for length in lengths))
    return tuple(groups)


@dataclass(frozen=True)
class Rolled:
    seconds: float
    """Seconds until the last sample ended."""
    busy: float
    """Share of the engines' time in which they had samples."""
    done: list[int]
    """Response lengths, as they finished."""
    moves: int
    most_tokens: int
    """The most tokens in the cache of an engine."""


@dataclass
class _Engine:
    model: Model
    now: float = 0.0
    steps: int = 0
    context: int = 0
    """Tokens in its cache."""
    running: list[tuple[int, int, int]] = field(default_factory=list)
    """(step at which it finishes, number, response length): a heap."""
    version: int = 0
    """The version of its entry among the events."""
    most: int = 0
    alone: float = 0.0
    """Seconds without a sample."""

    def seconds(self, steps: int) -> float:
        samples = len(self.running)
        read = self.context * steps + samples * steps * steps / 2
        return steps * self.model.decode_s(samples) + read * self.model.kv_bytes / costs.KV_READ

    def advance(self, steps: int) -> None:
        """Take steps, of which only the last may finish a sample."""
        self.now += self.seconds(steps)
        self.steps += steps
        self.context += steps * len(self.running)
        self.most = max(self.most, self.context)

    def advance_to(self, time: float) -> None:
        """Take as many steps as end by that time."""
        if self.running and time > self.now:
            a = len(self.running) * self.model.kv_bytes / costs.KV_READ / 2
            b = self.seconds(1) - a
            steps = int((math.sqrt(b * b + 4 * a * (time - self.now)) - b) / (2 * a))
            self.advance(min(steps, self.running[0][0] - self.steps))

    def admit(self, samples: Sequence[Sample], prefill: int) -> None:
        """Take on samples after computing ``prefill`` tokens."""
        self.now += prefill * self.model.prefill_s
        for left, number, length in samples:
            heappush(self.running, (self.steps + left, number, length))
            self.context += PROMPT + length - left

    def finish(self) -> list[int]:
        """Take out the samples that have ended."""
        done = []
        while self.running and self.running[0][0] == self.steps:
            _, _, length = heappop(self.running)
            self.context -= PROMPT + length
            done.append(length)
        return done

    def give(self, count: int) -> list[Sample]:
        """The samples with the fewest tokens leave, whatever is still to come of them."""
        self.running.sort(key=lambda one: (one[2] - one[0], one[1]))
        given, self.running = self.running[:count], self.running[count:]
        heapify(self.running)
        gone = [(finish - self.steps, number, length) for finish, number, length in given]
        self.context -= sum(PROMPT + length - left for left, _, length in gone)
        return gone


class _Rollout:
    def __init__(self, model: Model, groups: Sequence[Group], engines: int, places: int) -> None:
        self.queue = deque(groups)
        self.places = max(places, GROUP)
        self.engines = [_Engine(model) for _ in range(engines)]
        self.events: list[tuple[float, int, int]] = []
        self.loads: list[set[int]] = [set() for _ in range(self.places + 1)]
        self.top = 0
        self.done: list[int] = []
        self.moves = 0
        self.numbers = count()

    def run(self) -> Rolled:
        self._deal()
        for number in range(len(self.engines)):
            self._enter(number)
        for number in range(len(self.engines)):
            self._balance(number, 0.0)
        while self.events:
            time, number, version = heappop(self.events)
            engine = self.engines[number]
            if version != engine.version:
                continue
            self._leave(number)
            engine.advance(engine.running[0][0] - engine.steps)
            self.done += engine.finish()
            while self.queue and len(engine.running) + GROUP <= self.places:
                self._hand_out(engine)
            self._enter(number)
            self._balance(number, time)
        end = max(engine.now for engine in self.engines)
        spent = math.fsum(engine.now - engine.alone for engine in self.engines)
        return Rolled(
            end,
            spent / (end * len(self.engines)),
            self.done,
            self.moves,
            max(engine.most for engine in self.engines),
        )

    def _deal(self) -> None:
        """Give a group to each engine in turn."""
        while self.queue and len(self.engines[-1].running) + GROUP <= self.places:
            for engine in self.engines:
                if self.queue:
                    self._hand_out(engine)

    def _hand_out(self, engine: _Engine) -> None:
        group = self.queue.popleft()
        engine.admit([(length, next(self.numbers), length) for length in group], PROMPT)

    def _balance(self, number: int, time: float) -> None:
        """Take samples for an engine that has few, if the queue is empty."""
        while not self.loads[self.top] and self.top:
            self.top -= 1
        engine = self.engines[number]
        taken = (self.top - len(engine.running)) // 2
        if self.queue or 2 * len(engine.running) >= self.top or taken < 1:
            return
        other = min(self.loads[self.top])
        donor = self.engines[other]
        donor.advance_to(time)
        if donor.running[0][0] == donor.steps:
            return  # its own event comes at this moment
        self._leave(other)
        self._leave(number)
        given = donor.give(taken)
        if time > engine.now:
            engine.alone += time - engine.now
            engine.now = time
        engine.admit(given, sum(PROMPT + length - left for left, _, length in given))
        self.moves += taken
        self._enter(other)
        self._enter(number)

    def _leave(self, number: int) -> None:
        self.loads[len(self.engines[number].running)].discard(number)

    def _enter(self, number: int) -> None:
        """Enter an engine among the loads and the events."""
        engine = self.engines[number]
        load = len(engine.running)
        self.loads[load].add(number)
        self.top = max(self.top, load)
        engine.version += 1
        if load:
            next_in = engine.seconds(engine.running[0][0] - engine.steps)
            heappush(self.events, (engine.now + next_in, number, engine.version))


@lru_cache(maxsize=4)
def roll(model: Model, groups: tuple[Group, ...], engines: int, places: int) -> Rolled:
    """All samples of the groups, on so many engines of so many places each."""
    return _Rollout(model, groups, engines, places).run()
