"""A series of exchanges between the same ranks, through receive buffers that are made once.

    exchange n      start     slices go to every other rank, into its buffer n % B
                    wait      what came is there, and what was sent may be written again

What exchange n - B brought must have been read, by work that the current stream has been given,
before exchange n starts: it comes into the same memory.  A buffer has a region for every other
rank, where its slices lie one behind the other.

Exchanges between the GPUs of one host by their copy engines, beside kernels that keep all their
multiprocessors: NCCL moves slices by kernels of its own, which a persistent GEMM has to make room
for.

Every rank has receive buffers that the others' GPUs can write to, with two counters for each other
rank behind them:

    free        written by the receiver: so many exchanges it has room for
    arrived     written by the sender: so many exchanges' slices are there

Exchange n from rank s to rank d, on their GPUs and not on their hosts:

    d, current stream     free[d] of s := n             (exchange n - B has been read)
    s, stream to d        wait for the current stream, and until free[d] >= n
                          copy the slices into buffer n % B of d
                          arrived[s] of d := n
    d, current stream     wait until arrived[s] >= n    (``Arrival.wait``)

The counters are written and awaited by the streams themselves: no kernel spins and no host waits.
Ranks start exchanges in one order, and each of these steps waits for earlier ones only, so streams
cannot block each other for ever, even where they share a queue of the hardware.
"""

import ctypes
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, Protocol

import torch

Slices = Sequence[Sequence[torch.Tensor]]
"""By rank."""


class Work(Protocol):
    """Something on its way."""

    def wait(self) -> Any:
        """Until it is there; on a GPU, until the stream may use it."""
        ...


class Arrival(Protocol):
    """One exchange on its way."""

    def wait(self) -> list[list[torch.Tensor]]:
        """The slices by the rank that sent them, flat; nothing from this one."""
        ...


class Exchanges(Protocol):
    """A series; every rank starts and awaits the same exchanges in the same order."""

    def start(self, send: Slices, sizes: Sequence[Sequence[int]]) -> Arrival:
        """``send[r]`` goes to rank r: FP32, contiguous.  ``sizes[r]`` are the numbers of each slice
        that comes from it.  Those of this rank are not looked at.
        """
        ...


def buffer_bytes(size: int, numbers: int, buffers: int) -> int:
    """What the receive buffers of a rank take, for exchanges that bring at most ``numbers`` FP32
    numbers from each of ``size`` ranks but itself.
    """
    return buffers * (size - 1) * numbers * torch.float32.itemsize


def slices_of(region: torch.Tensor, sizes: Sequence[int]) -> list[torch.Tensor]:
    """Slices that lie one behind the other from the start of a region.  Raises AssertionError where
    they do not fit it.
    """
    ends = [0]
    for size in sizes:
        ends.append(ends[-1] + size)
    assert ends[-1] <= region.numel(), (
        f"an exchange of {ends[-1]:,} numbers in a buffer for {region.numel():,}"
    )
    return [region[first:end] for first, end in pairwise(ends)]


class NoExchanges:
    """Of a rank alone."""

    def start(self, send: Slices, sizes: Sequence[Sequence[int]]) -> Arrival:
        """Nothing goes."""
        return self

    def wait(self) -> list[list[torch.Tensor]]:
        """Nothing comes."""
        return [[]]


class PostedExchanges:
    """By what moves slices between any two ranks: NCCL's or gloo's point to point."""

    def __init__(
        self,
        exchange: Callable[
            [Sequence[Sequence[torch.Tensor]], Sequence[Sequence[torch.Tensor]]], Work
        ],
        rank: int,
        size: int,
        numbers: int,
        device: torch.device,
        buffers: int,
    ) -> None:
        """``exchange`` is a world's; ``numbers`` what one rank sends to one other at most."""
        self._exchange = exchange
        self._regions = [
            [torch.empty(0 if source == rank else numbers, device=device) for source in range(size)]
            for _ in range(buffers)
        ]
        self._rank, self._started = rank, 0

    def start(self, send: Slices, sizes: Sequence[Sequence[int]]) -> Arrival:
        regions = self._regions[self._started % len(self._regions)]
        self._started += 1
        receive = [
            [] if source == self._rank else slices_of(region, sizes[source])
            for source, region in enumerate(regions)
        ]
        return _Posted(self._exchange(send, receive), receive)


class _Posted:
    def __init__(self, work: Work, receive: list[list[torch.Tensor]]) -> None:
        self._work, self._receive = work, receive

    def wait(self) -> list[list[torch.Tensor]]:
        self._work.wait()
        return self._receive


_LINE = 64
"""Numbers, 256 bytes, at whose multiples a buffer's regions and the counters begin."""
_TRIALS = 5
_PATIENCE_S = 20.0

Stream = Any
"""What a device's work is queued on."""


class Queues(Protocol):
    """The streams of a device, and what they do one after the other."""

    def current(self) -> Stream:
        """The one that the caller's work goes to."""
        ...

    def new(self) -> Stream:
        """Another one."""
        ...

    def mark(self, stream: Stream) -> Any:
        """The point that a stream's work has come to."""
        ...

    def after(self, stream: Stream, mark: Any) -> None:
        """Hold a stream until another one has come to a mark."""
        ...

    def copy(self, stream: Stream, to: torch.Tensor, source: torch.Tensor) -> None:
        """Copy contiguous numbers of one format."""
        ...

    def write(self, stream: Stream, counter: torch.Tensor, value: int) -> None:
        """Set a counter, once all that the stream did before can be seen."""
        ...

    def until(self, stream: Stream, counter: torch.Tensor, value: int) -> None:
        """Hold a stream until a counter is at least ``value``."""
        ...


class GpuQueues:
    """CUDA's, whose driver writes and awaits words of memory (cuStreamWriteValue32, which fences
    what was written before it, and cuStreamWaitValue32).

    Raises OSError or AttributeError where the driver has no such calls.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        driver = ctypes.CDLL("libcuda.so.1")
        self._write, self._wait = driver.cuStreamWriteValue32_v2, driver.cuStreamWaitValue32_v2
        for call in (self._write, self._wait):
            call.argtypes = (ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint)
            call.restype = ctypes.c_int

    def current(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self._device)

    def new(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(self._device)

    def mark(self, stream: torch.cuda.Stream) -> Any:
        return stream.record_event()

    def after(self, stream: torch.cuda.Stream, mark: torch.cuda.Event) -> None:
        stream.wait_event(mark)

    def copy(self, stream: torch.cuda.Stream, to: torch.Tensor, source: torch.Tensor) -> None:
        """A plain copy of memory, which copy engines do."""
        with torch.cuda.stream(stream):
            to.copy_(source, non_blocking=True)

    def write(self, stream: torch.cuda.Stream, counter: torch.Tensor, value: int) -> None:
        _check(self._write(stream.cuda_stream, counter.data_ptr(), value, 0))

    def until(self, stream: torch.cuda.Stream, counter: torch.Tensor, value: int) -> None:
        at_least = 0  # CU_STREAM_WAIT_VALUE_GEQ
        _check(self._wait(stream.cuda_stream, counter.data_ptr(), value, at_least))


def _check(result: int) -> None:
    if result:
        raise RuntimeError(f"CUDA's driver refuses a stream's wait or write: error {result}")


def shared_numbers(size: int, numbers: int, buffers: int) -> int:
    """FP32 numbers that every rank shares with the others: its regions and counters."""
    return _regions_end(size, numbers, buffers) + _whole_lines(2 * size)


def _regions_end(size: int, numbers: int, buffers: int) -> int:
    return buffers * (size - 1) * _whole_lines(numbers)


def _whole_lines(numbers: int) -> int:
    return -(-numbers // _LINE) * _LINE


class PeerCopies:
    """The series of one rank."""

    def __init__(
        self, memory: Sequence[torch.Tensor], rank: int, numbers: int, buffers: int, queues: Queues
    ) -> None:
        """``memory[r]`` is rank r's, ``shared_numbers`` zeros that this rank can write to;
        ``numbers`` are the most that one rank sends to one other in an exchange.
        """
        self._memory, self._rank, self._size = memory, rank, len(memory)
        self._numbers, self._buffers, self._queues = numbers, buffers, queues
        self._others = [(rank + step) % self._size for step in range(1, self._size)]
        self._streams = {other: queues.new() for other in self._others}
        self._started = 0

    def start(
        self, send: Sequence[Sequence[torch.Tensor]], sizes: Sequence[Sequence[int]]
    ) -> Arrival:
        self._started += 1
        current, receive = self._queues.current(), [list[torch.Tensor]() for _ in sizes]
        for other in self._others:
            self._queues.write(current, self._counter(other, "free", self._rank), self._started)
        ready = self._queues.mark(current)
        sent = [self._send(ready, other, send[other]) for other in self._others]
        for source in self._others:
            region = self._region(self._rank, source, self._started)
            receive[source] = slices_of(region, sizes[source])
        return _Copies(self, self._started, send, sent, receive)

    def _send(self, ready: Any, to: int, slices: Sequence[torch.Tensor]) -> Any:
        """Copy to one rank on the stream that leads there; -> the mark of its end."""
        region = self._region(to, self._rank, self._started)
        places = slices_of(region, [one.numel() for one in slices])
        stream, queues = self._streams[to], self._queues
        queues.after(stream, ready)
        queues.until(stream, self._counter(self._rank, "free", to), self._started)
        for place, one in zip(places, slices, strict=True):
            assert one.is_contiguous(), "copy engines copy what is contiguous"
            queues.copy(stream, place, one.view(-1))
        queues.write(stream, self._counter(to, "arrived", self._rank), self._started)
        return queues.mark(stream)

    def hold_until(self, number: int, sent: Sequence[Any]) -> None:
        """Hold the current stream until an exchange is complete on both sides."""
        current = self._queues.current()
        for other in self._others:
            self._queues.until(current, self._counter(self._rank, "arrived", other), number)
        for mark in sent:
            self._queues.after(current, mark)

    def let_go(self) -> None:
        """End all that this rank's streams wait for, after a trial that has failed."""
        with torch.cuda.stream(self._queues.new()):
            self._counters(self._rank).fill_(1 << 30)

    def _region(self, owner: int, source: int, number: int) -> torch.Tensor:
        """Where ``source`` writes an exchange's slices to ``owner``, which has none for itself."""
        place = number % self._buffers * (self._size - 1) + (source - owner - 1) % self._size
        first = place * _whole_lines(self._numbers)
        return self._memory[owner][first : first + self._numbers]

    def _counter(self, owner: int, kind: str, other: int) -> torch.Tensor:
        """One that is read by ``owner`` and written by ``other``."""
        place = other if kind == "free" else self._size + other
        return self._counters(owner)[place : place + 1]

    def _counters(self, owner: int) -> torch.Tensor:
        first = _regions_end(self._size, self._numbers, self._buffers)
        return self._memory[owner][first:].view(torch.int32)


class _Copies:
    """An exchange; what is sent is held until it has been."""

    def __init__(
        self,
        copies: PeerCopies,
        number: int,
        send: Sequence[Sequence[torch.Tensor]],
        sent: Sequence[Any],
        receive: list[list[torch.Tensor]],
    ) -> None:
        self._copies, self._number, self._send = copies, number, send
        self._sent, self._receive = sent, receive

    def wait(self) -> list[list[torch.Tensor]]:
        self._copies.hold_until(self._number, self._sent)
        return self._receive


def try_copies(
    memory: Sequence[torch.Tensor], rank: int, numbers: int, buffers: int
) -> tuple[PeerCopies | None, str]:
    """A series after a few exchanges with known numbers, to go through all buffers; or None and
    what is wrong.  Every rank of the host tries.
    """
    device = memory[rank].device
    try:
        copies = PeerCopies(memory, rank, numbers, buffers, GpuQueues(device))
        with torch.cuda.stream(torch.cuda.Stream(device)):
            wrong = _exchange_known(copies, rank, len(memory), min(numbers, 1024))
            done = torch.cuda.current_stream(device).record_event()
    except (OSError, AttributeError, RuntimeError) as error:
        return None, str(error).splitlines()[0]
    if not _comes_true(done.query, _PATIENCE_S):
        copies.let_go()
        return None, f"copies to peers did not arrive within {_PATIENCE_S:.0f} s"
    if int(wrong):
        return None, f"{int(wrong)} numbers arrived as others"
    return copies, ""


def _exchange_known(copies: PeerCopies, rank: int, size: int, count: int) -> torch.Tensor:
    """-> how many numbers arrived as others, on the device."""
    wrong = torch.zeros((), device="cuda")
    for trial in range(_TRIALS):
        send = [[torch.full((count,), _mark(trial, rank, to), device="cuda")] for to in range(size)]
        found = copies.start(send, [[count]] * size).wait()
        for source, slices in enumerate(found):
            for one in slices:
                wrong += (one != _mark(trial, source, rank)).sum()
    return wrong


def _mark(trial: int, source: int, to: int) -> float:
    return float(1 + trial * 10_000 + source * 100 + to)


def _comes_true(question: Callable[[], bool], seconds: float) -> bool:
    end = time.monotonic() + seconds
    while not question():
        if time.monotonic() > end:
            return False
        time.sleep(0.001)
    return True
