"""A series of exchanges between the same ranks, through receive buffers that are made once.

Exchange n writes to buffer n % B of every other rank, which has a region for each sender.  The
current stream must have been given all work that reads exchange n - B before exchange n starts.

``PeerCopies`` moves slices between the GPUs of one host by their copy engines, beside kernels that
keep all multiprocessors; NCCL moves them by kernels of its own, for which a persistent GEMM has to
leave multiprocessors.  Behind its buffers every rank has two counters for each other rank:

    free        written by the receiver: how many exchanges it can take
    arrived     written by the sender: how many exchanges have arrived

Exchange n from rank s to rank d:

    d, current stream     free[d] of s := n             (exchange n - B has been read)
    s, stream to d        wait for the current stream, and until free[d] >= n
                          copy the slices into buffer n % B of d
                          arrived[s] of d := n
    d, current stream     wait until arrived[s] >= n    (``Arrival.wait``)

The streams write the counters and wait for them: no kernel spins and no host waits.  Ranks start
exchanges in one order and each step waits for earlier ones only, so streams cannot deadlock, even
where they share a hardware queue.
"""

import ctypes
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, Protocol

import torch

Slices = Sequence[Sequence[torch.Tensor]]  # by rank


class Work(Protocol):
    def wait(self) -> Any:
        """Wait until it is complete; on a GPU, until the stream may use it."""
        ...


class Arrival(Protocol):
    def wait(self) -> list[list[torch.Tensor]]:
        """The received slices, flat, by sender; none from this rank."""
        ...


class Exchanges(Protocol):
    """Every rank starts and awaits the same exchanges in the same order."""

    def start(self, send: Slices, sizes: Sequence[Sequence[int]]) -> Arrival:
        """Send ``send[r]``, FP32 and contiguous, to rank r, and receive slices of ``sizes[r]``
        numbers from it.  The entries of this rank are ignored.
        """
        ...


def buffer_bytes(size: int, numbers: int, buffers: int) -> int:
    """Bytes of a rank's buffers for at most ``numbers`` FP32 numbers from each other rank."""
    return buffers * (size - 1) * numbers * torch.float32.itemsize


def slices_of(region: torch.Tensor, sizes: Sequence[int]) -> list[torch.Tensor]:
    """Consecutive slices of a region.  Raises AssertionError where they do not fit."""
    ends = [0]
    for size in sizes:
        ends.append(ends[-1] + size)
    assert ends[-1] <= region.numel(), (
        f"an exchange of {ends[-1]:,} numbers in a buffer for {region.numel():,}"
    )
    return [region[first:end] for first, end in pairwise(ends)]


class NoExchanges:
    """The series of a world of one."""

    def start(self, send: Slices, sizes: Sequence[Sequence[int]]) -> Arrival:
        return self

    def wait(self) -> list[list[torch.Tensor]]:
        return [[]]


class PostedExchanges:
    """A series by point-to-point messages of NCCL or gloo."""

    def __init__(
        self,
        exchange: Callable[[Slices, Slices], Work],
        rank: int,
        size: int,
        numbers: int,
        device: torch.device,
        buffers: int,
    ) -> None:
        """``exchange`` is ``World.exchange``; a rank sends another at most ``numbers``."""
        self._exchange = exchange
        self._regions = [
            [
                torch.empty(0 if source == rank else numbers, device=device, dtype=torch.float32)
                for source in range(size)
            ]
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
        return _Started(self._exchange(send, receive).wait, receive)


@dataclass(frozen=True, slots=True)
class _Started:
    finish: Callable[[], Any]
    receive: list[list[torch.Tensor]]
    held: Slices = ()  # what is kept alive until it has been sent

    def wait(self) -> list[list[torch.Tensor]]:
        self.finish()
        return self.receive


_LINE = 64  # numbers (256 bytes) that regions and counters are aligned to
_TRIALS = 5
_PATIENCE_S = 20.0

Stream = Any  # a queue of a device's work


class Queues(Protocol):
    """The streams of a device."""

    def current(self) -> Stream: ...

    def new(self) -> Stream: ...

    def mark(self, stream: Stream) -> Any:
        """The point that a stream's work has reached."""
        ...

    def after(self, stream: Stream, mark: Any) -> None:
        """Make a stream wait until another one has reached a mark."""
        ...

    def copy(self, stream: Stream, to: torch.Tensor, source: torch.Tensor) -> None:
        """Copy contiguous numbers of one format."""
        ...

    def write(self, stream: Stream, counter: torch.Tensor, value: int) -> None:
        """Set a counter once all earlier work of the stream is visible."""
        ...

    def until(self, stream: Stream, counter: torch.Tensor, value: int) -> None:
        """Make a stream wait until a counter is at least ``value``."""
        ...


class GpuQueues:
    """CUDA streams; cuStreamWriteValue32 (which fences earlier writes) and cuStreamWaitValue32
    write and await the counters.

    Raises OSError or AttributeError where the driver lacks these calls.
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
        """A plain copy of memory, which a copy engine does."""
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
    """FP32 numbers that every rank shares with the others: regions and counters."""
    return _regions_end(size, numbers, buffers) + _whole_lines(2 * size)


def _regions_end(size: int, numbers: int, buffers: int) -> int:
    return buffers * (size - 1) * _whole_lines(numbers)


def _whole_lines(numbers: int) -> int:
    return -(-numbers // _LINE) * _LINE


class PeerCopies:
    """The series of one rank by copy engines."""

    def __init__(
        self, memory: Sequence[torch.Tensor], rank: int, numbers: int, buffers: int, queues: Queues
    ) -> None:
        """``memory[r]`` is rank r's, ``shared_numbers`` zeros that this rank can write to;
        ``numbers`` is the most that a rank sends to another in an exchange.
        """
        self._memory, self._rank, self._size = memory, rank, len(memory)
        self._numbers, self._buffers, self._queues = numbers, buffers, queues
        self._others = [(rank + step) % self._size for step in range(1, self._size)]
        self._streams = {other: queues.new() for other in self._others}
        self._started = 0

    def start(self, send: Slices, sizes: Sequence[Sequence[int]]) -> Arrival:
        self._started += 1
        current, receive = self._queues.current(), [list[torch.Tensor]() for _ in sizes]
        for other in self._others:
            self._queues.write(current, self._counter(other, "free", self._rank), self._started)
        ready = self._queues.mark(current)
        sent = [self._send(ready, other, send[other]) for other in self._others]
        for source in self._others:
            region = self._region(self._rank, source, self._started)
            receive[source] = slices_of(region, sizes[source])
        return _Started(partial(self._hold_until, self._started, sent), receive, send)

    def _send(self, ready: Any, to: int, slices: Sequence[torch.Tensor]) -> Any:
        """Copy to one rank on its stream; -> the mark behind the copy."""
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

    def _hold_until(self, number: int, sent: Sequence[Any]) -> None:
        """Hold the current stream until an exchange is complete on both sides."""
        current = self._queues.current()
        for other in self._others:
            self._queues.until(current, self._counter(self._rank, "arrived", other), number)
        for mark in sent:
            self._queues.after(current, mark)

    def let_go(self) -> None:
        """Release all waits of this rank's streams, after a failed trial."""
        with torch.cuda.stream(self._queues.new()):
            self._counters(self._rank).fill_(1 << 30)

    def _region(self, owner: int, source: int, number: int) -> torch.Tensor:
        """The part of ``owner``'s buffer into which ``source`` writes an exchange's slices."""
        place = number % self._buffers * (self._size - 1) + (source - owner - 1) % self._size
        first = place * _whole_lines(self._numbers)
        return self._memory[owner][first : first + self._numbers]

    def _counter(self, owner: int, kind: str, other: int) -> torch.Tensor:
        """The counter that ``owner`` reads and ``other`` writes."""
        place = other if kind == "free" else self._size + other
        return self._counters(owner)[place : place + 1]

    def _counters(self, owner: int) -> torch.Tensor:
        first = _regions_end(self._size, self._numbers, self._buffers)
        return self._memory[owner][first:].view(torch.int32)


def try_copies(
    memory: Sequence[torch.Tensor], rank: int, numbers: int, buffers: int
) -> tuple[PeerCopies | None, str]:
    """A series that has passed a few exchanges of known numbers through all buffers, or None and
    the problem.  Every rank of the host calls this.
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
    """How many numbers arrived changed, as a number on the device."""
    wrong = torch.zeros((), device="cuda", dtype=torch.float32)
    for trial in range(_TRIALS):
        send = [
            [torch.full((count,), _mark(trial, rank, to), device="cuda", dtype=torch.float32)]
            for to in range(size)
        ]
        arrived = copies.start(send, [[count]] * size).wait()
        for source, slices in enumerate(arrived):
            for numbers in slices:
                wrong += (numbers != _mark(trial, source, rank)).sum()
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
