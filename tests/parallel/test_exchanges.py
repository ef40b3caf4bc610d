"""The protocol of the copies, on streams that do their work in any order that a GPU might."""

from collections import deque
from random import Random
from typing import Any

import pytest
import torch

from isobit.parallel.exchanges import PeerCopies, shared_numbers

NUMBERS, EXCHANGES = 70, 12


class SimulatedQueues:
    """Streams whose work the test does; ``shared``: all in one hardware queue."""

    def __init__(self, shared: bool) -> None:
        self.shared = shared
        self.streams: list[deque[Any]] = []
        self.main = self.new()

    def current(self):
        return self.main

    def new(self):
        if self.shared and self.streams:
            return self.streams[0]
        self.streams.append(deque())
        return self.streams[-1]

    def mark(self, stream):
        reached: list[bool] = []
        stream.append(lambda: reached.append(True) is None)
        return reached

    def after(self, stream, mark):
        stream.append(lambda: bool(mark))

    def copy(self, stream, to, source):
        half = to.numel() // 2  # others may run between the halves
        stream.append(lambda: to[:half].copy_(source[:half]) is not None)
        stream.append(lambda: to[half:].copy_(source[half:]) is not None)

    def write(self, stream, counter, value):
        stream.append(lambda: counter.fill_(value) is not None)

    def until(self, stream, counter, value):
        stream.append(lambda: int(counter) >= value)

    def step(self, random: Random) -> bool:
        """One piece of work of any stream; False where none can be done."""
        for stream in random.sample(self.streams, len(self.streams)):
            if stream and stream[0]():
                stream.popleft()
                return True
        return False


def sizes_of(exchange: int, to: int) -> list[int]:
    """Slices for a rank: some exchanges have none for some ranks."""
    return [] if (exchange + to) % 5 == 0 else [3 + to, (exchange * 7) % 50 + 1]


def value_of(exchange: int, source: int, to: int) -> float:
    return float(exchange * 100 + source * 10 + to)


class Rank:
    """A trainer as far as exchanges go: two on their way, what came is read one exchange later."""

    def __init__(self, rank: int, memory: list[torch.Tensor], buffers: int, shared: bool):
        self.rank, self.size, self.buffers = rank, len(memory), buffers
        self.queues = SimulatedQueues(shared)
        self.copies = PeerCopies(memory, rank, NUMBERS, buffers, self.queues)
        self.read: list[tuple[int, int, list[torch.Tensor]]] = []
        self.scratch = [torch.zeros(self.size, 60) for _ in range(buffers)]
        self.pending: list[Any] = []

    def host(self):
        """The program, a piece of it between two yields."""
        for exchange in range(EXCHANGES):
            if len(self.pending) == self.buffers:
                self.take(*self.pending.pop(0))
                yield
            send = self.compute(exchange)
            yield
            sizes = [sizes_of(exchange, self.rank)] * self.size
            self.pending.append((exchange, self.copies.start(send, sizes)))
            yield
        for one in self.pending:
            self.take(*one)

    def compute(self, exchange: int) -> list[list[torch.Tensor]]:
        scratch, send = self.scratch[exchange % self.buffers], []
        for to in range(self.size):
            first, slices = 0, []
            for size in sizes_of(exchange, to):
                slices.append(scratch[to, first : first + size])
                first += size
            send.append(slices)
            value = value_of(exchange, self.rank, to)
            self.queues.main.append(lambda to=to, value=value: scratch[to].fill_(value) is not None)
        return send

    def take(self, exchange: int, arrival: Any) -> None:
        for source, slices in enumerate(arrival.wait()):
            self.queues.main.append(
                lambda source=source, slices=slices: (
                    self.read.append((exchange, source, [one.clone() for one in slices])) is None
                )
            )


@pytest.mark.few(40)
@pytest.mark.parametrize("shared", [False, True], ids=["streams", "one hardware queue"])
@pytest.mark.parametrize(("size", "buffers"), [(2, 1), (2, 2), (3, 2)])
@pytest.mark.parametrize("seed", range(8))
def test_every_slice_arrives_whatever_runs_first(size: int, buffers: int, seed: int, shared: bool):
    random = Random(seed)
    memory = [torch.zeros(shared_numbers(size, NUMBERS, buffers)) for _ in range(size)]
    ranks = [Rank(rank, memory, buffers, shared) for rank in range(size)]
    hosts = {rank.rank: rank.host() for rank in ranks}
    hurry = [random.choice([0.02, 0.5, 50]) for _ in ranks]  # some hosts run far ahead
    while hosts:
        place = random.choices(list(hosts), [hurry[rank] for rank in hosts])[0]
        if next(hosts[place], "ended") == "ended":
            del hosts[place]
        for rank in random.sample(ranks, size):
            if random.random() < 0.3:
                rank.queues.step(random)
    while any(rank.queues.step(random) for rank in random.sample(ranks, size)):
        pass
    for rank in ranks:
        assert not any(rank.queues.streams), "streams wait for each other for ever"
        assert len(rank.read) == EXCHANGES * size
        for exchange, source, slices in rank.read:
            sizes = [] if source == rank.rank else sizes_of(exchange, rank.rank)
            assert [one.numel() for one in slices] == sizes
            value = value_of(exchange, source, rank.rank)
            assert all(torch.equal(one, torch.full_like(one, value)) for one in slices)


def test_an_exchange_that_does_not_fit_is_named():
    memory = [torch.zeros(shared_numbers(2, 10, 2)) for _ in range(2)]
    copies = PeerCopies(memory, 0, 10, 2, SimulatedQueues(False))
    with pytest.raises(AssertionError, match="11 numbers in a buffer for 10"):
        copies.start([[], [torch.zeros(11)]], [[], []])
