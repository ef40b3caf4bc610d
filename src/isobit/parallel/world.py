"""The processes of a run, and what moves between them: the one file that imports torch.distributed.

Every process runs the same program on the same data and decides the same; a *rank* computes its
share, and the results are gathered.  All methods but ``board``'s are collective: every rank calls
them in the same order.  Nothing here adds numbers: NCCL's and gloo's sums depend on topology,
algorithm and the number of ranks.

    messages    a small value of every rank, on every rank
    gather      slices of a tensor, each written by one rank, complete on all
    exchange    slices from every rank to every other
    stack       equal tensors of all ranks, one upon the other
    board       notes that any rank leaves and any other finds, without waiting

A run alone is a world of one (``Alone``): the same calls, and nothing travels.
"""

import os
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from isobit.errors import IsobitError
from isobit.parallel.message import decode, encode
from isobit.parallel.pulse import Pulse

T = TypeVar("T")


class PeerError(IsobitError):
    """Another rank has failed, and this one stops with it."""

    def __init__(self, rank: int, reason: str) -> None:
        super().__init__(f"rank {rank} failed: {reason}")
        self.rank = rank


_FOR_EVER = timedelta(days=7)
"""Of a collective: a rank that is silent for too long is found by the watch, not by a limit."""


class Work(Protocol):
    """Something on its way."""

    def wait(self) -> Any:
        """Until it is there; on a GPU, until the stream may use it."""
        ...


class Board(Protocol):
    """Notes by name, shared by all ranks; no call waits for another rank."""

    def add(self, name: str, number: int) -> int:
        """Add to a counter that starts at 0, at once for everybody; -> its value then."""
        ...

    def post(self, name: str, note: bytes) -> None:
        """Leave a note, in the place of an older one."""
        ...

    def read(self, name: str) -> bytes | None:
        """A note, or None where nobody has left it yet."""
        ...

    def remove(self, name: str) -> None:
        """Take a note away, if it is there."""
        ...


class World(Protocol):
    """The processes of a run, seen from one of them."""

    rank: int
    """This one, from 0."""
    size: int
    host: str
    board: Board
    pulse: Pulse

    def messages(self, mine: Any) -> list[Any]:
        """The value of every rank, by rank (``isobit.parallel.message``)."""
        ...

    def gather(self, tensors: Sequence[torch.Tensor], cuts: Sequence[Sequence[int]]) -> None:
        """Complete tensors in place.  Rows ``cuts[i][r]`` to ``cuts[i][r + 1]`` of ``tensors[i]``,
        contiguous and on any device, are rank r's.
        """
        ...

    def exchange(
        self, send: Sequence[Sequence[torch.Tensor]], receive: Sequence[Sequence[torch.Tensor]]
    ) -> Work:
        """``send[r]`` goes to rank r, ``receive[r]`` comes from it: FP32, contiguous, of the same
        sizes on both ends; empty for nothing.  ``send[rank]`` and ``receive[rank]`` are not looked
        at.  Both are in use until the work is waited for.
        """
        ...

    def stack(self, mine: torch.Tensor) -> torch.Tensor:
        """The contiguous tensors of all ranks, of one shape and format, by rank: a new [size, ...].
        On a GPU nothing is waited for, and a CUDA graph can capture it.
        """
        ...

    def barrier(self, what: str) -> None:
        """Wait until all ranks are here."""
        ...


class _Notes:
    """The board of a process alone."""

    def __init__(self) -> None:
        self._counters: dict[str, int] = {}
        self._notes: dict[str, bytes] = {}

    def add(self, name: str, number: int) -> int:
        """See ``Board``."""
        self._counters[name] = self._counters.get(name, 0) + number
        return self._counters[name]

    def post(self, name: str, note: bytes) -> None:
        """See ``Board``."""
        self._notes[name] = note

    def read(self, name: str) -> bytes | None:
        """See ``Board``."""
        return self._notes.get(name)

    def remove(self, name: str) -> None:
        """See ``Board``."""
        self._notes.pop(name, None)


class _Done:
    def wait(self) -> None:
        """Nothing is on its way."""


class Alone:
    """One process."""

    rank, size = 0, 1

    def __init__(self) -> None:
        self.host = socket.gethostname()
        self.board: Board = _Notes()
        self.pulse = Pulse()

    def messages(self, mine: Any) -> list[Any]:
        """Its own, as it would arrive."""
        return [mine]

    def gather(self, tensors: Sequence[torch.Tensor], cuts: Sequence[Sequence[int]]) -> None:
        """They are complete."""

    def exchange(
        self, send: Sequence[Sequence[torch.Tensor]], receive: Sequence[Sequence[torch.Tensor]]
    ) -> Work:
        """Nobody to exchange with."""
        return _Done()

    def stack(self, mine: torch.Tensor) -> torch.Tensor:
        """Its own alone."""
        return mine[None]

    def barrier(self, what: str) -> None:
        """Nobody to wait for."""


ALONE = Alone()
"""For everything that is not told of a world."""


class _StoreBoard:
    """The board on torch's store, which rank 0 (or the launcher) keeps."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def add(self, name: str, number: int) -> int:
        """See ``Board``."""
        return self._store.add(f"counter/{name}", number)

    def post(self, name: str, note: bytes) -> None:
        """See ``Board``."""
        self._store.set(f"note/{name}", note)  # pyright: ignore[reportArgumentType] (takes bytes)

    def read(self, name: str) -> bytes | None:
        """See ``Board``."""
        key = f"note/{name}"
        return self._store.get(key) if self._store.check([key]) else None

    def remove(self, name: str) -> None:
        """See ``Board``."""
        self._store.delete_key(f"note/{name}")


class Processes:
    """Processes joined by torch.distributed: gloo for tensors of the host, NCCL for those of
    GPUs.
    """

    def __init__(self, store: Store, rank: int, size: int, local_rank: int) -> None:
        self.rank, self.size, self.local_rank = rank, size, local_rank
        self.host = socket.gethostname()
        self.pulse = Pulse()
        self.board: Board = _StoreBoard(PrefixStore("isobit", store))
        backend = "gloo"
        if torch.cuda.is_available() and dist.is_nccl_available():
            torch.cuda.set_device(local_rank)
            backend = "cpu:gloo,cuda:nccl"
        dist.init_process_group(
            backend,
            store=PrefixStore("torch", store),
            rank=rank,
            world_size=size,
            timeout=_FOR_EVER,
        )

    def messages(self, mine: Any) -> list[Any]:
        """See ``World``."""
        with self.pulse.waiting("messages"):
            data = torch.frombuffer(bytearray(encode(mine)), dtype=torch.uint8)
            sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
            dist.all_gather(sizes, torch.tensor([data.numel()]))
            longest = max(int(size) for size in sizes)
            padded = torch.zeros(longest, dtype=torch.uint8)
            padded[: data.numel()] = data
            found = [torch.empty(longest, dtype=torch.uint8) for _ in range(self.size)]
            dist.all_gather(found, padded)
        return [
            decode(bytes(one[: int(size)].numpy())) for one, size in zip(found, sizes, strict=True)
        ]

    def gather(self, tensors: Sequence[torch.Tensor], cuts: Sequence[Sequence[int]]) -> None:
        """See ``World``."""
        with self.pulse.waiting("gather"):
            works = [
                dist.broadcast(_bytes(rows), source, async_op=True)
                for tensor, bounds in zip(tensors, cuts, strict=True)
                for source in range(self.size)
                if (rows := tensor[bounds[source] : bounds[source + 1]]).numel()
            ]
            for work in works:
                assert work is not None
                work.wait()

    def exchange(
        self, send: Sequence[Sequence[torch.Tensor]], receive: Sequence[Sequence[torch.Tensor]]
    ) -> Work:
        """See ``World``."""
        others = [(self.rank + step) % self.size for step in range(1, self.size)]
        operations = [
            dist.P2POp(call, tensor, other, tag=number)
            for call, side in ((dist.isend, send), (dist.irecv, receive))
            for other in others
            for number, tensor in enumerate(side[other])
            if tensor.numel()
        ]
        return _Joint(dist.batch_isend_irecv(operations) if operations else [], self.pulse)

    def stack(self, mine: torch.Tensor) -> torch.Tensor:
        """See ``World``."""
        made = torch.empty((self.size, *mine.shape), dtype=mine.dtype, device=mine.device)
        with self.pulse.waiting("stack"):
            dist.all_gather_into_tensor(_bytes(made), _bytes(mine))
        return made

    def barrier(self, what: str) -> None:
        """See ``World``."""
        with self.pulse.waiting(what):
            self.messages(None)

    def leave(self) -> None:
        """Nothing is asked of the others any more."""
        dist.destroy_process_group()


class _Joint:
    """Several works as one."""

    def __init__(self, works: Sequence[Work], pulse: Pulse) -> None:
        self._works, self._pulse = works, pulse

    def wait(self) -> None:
        """Until all are there."""
        with self._pulse.waiting("exchange"):
            for work in self._works:
                work.wait()


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory, in a format that every transport knows."""
    return tensor.reshape(-1).view(torch.uint8)


def is_launched() -> bool:
    """Whether a launcher (ours, torchrun, SLURM's) has started this process as one of several."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


@contextmanager
def joined() -> Iterator[World]:
    """The world that a launcher has made by ``RANK``, ``WORLD_SIZE``, ``MASTER_ADDR`` and
    ``MASTER_PORT``; one process alone without them.
    """
    if not is_launched():
        yield Alone()
        return
    store, rank, size = next(iter(rendezvous("env://")))
    world = Processes(store, rank, size, int(os.environ.get("LOCAL_RANK", "0")))
    try:
        yield world
    finally:
        world.leave()


def together(world: World, attempt: Callable[[], T]) -> T:
    """``attempt`` on every rank; where it raised on any, it raises on all: the rank's own error
    there, ``PeerError`` with its text elsewhere.
    """
    made: list[T] = []
    error: Exception | None = None
    try:
        made.append(attempt())
    except Exception as raised:  # whatever it is, the others must not wait for this rank
        error = raised
    failures = world.messages(None if error is None else f"{type(error).__name__}: {error}")
    if error is not None:
        raise error
    for rank, failure in enumerate(failures):
        if failure is not None:
            raise PeerError(rank, failure)
    return made[0]
