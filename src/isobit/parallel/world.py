"""The processes of a run, and what they exchange.

Every process runs the same program on the same data and makes the same decisions; a *rank* computes
its share, and the results are gathered.  All methods of ``World`` but ``board``'s are collective:
every rank calls them in the same order.  Nothing here adds numbers, since the sums of NCCL and gloo
depend on topology, algorithm and the number of ranks.  A run alone is a world of one (``Alone``);
several processes are ``isobit.parallel.processes``.

``run_on_all``, ``run_and_gather`` and ``map_on_all`` raise an error of one rank on all, so that no
rank waits for another that has failed.  The function that they run must not call other ranks, which
may have failed already.

Values travel as bytes: 8 bytes with the length of the JSON, little-endian; the JSON, in which a
tensor is {"tensor": number}; and safetensors with the tensors by number.  So no code is sent.
Floats keep their bits (JSON's shortest decimals), NaN and infinities too; tuples arrive as lists.
"""

import json
import socket
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from time import perf_counter
from typing import Any, Protocol, TypeVar

import torch
from safetensors.torch import load, save

from isobit.parallel.exchanges import Exchanges, NoExchanges
from isobit.util.errors import (
    Interrupted,
    NoSpaceError,
    PeerError,
    StoppedAtOnce,
    StorageError,
)


class Pulse:
    """What a process is doing: written by the thread that works, read by the watch."""

    def __init__(self) -> None:
        self.phase = "starting"
        self.beats = 0
        self.waits_for: str | None = None  # the collective that it is in; None while it computes
        self._waited = 0.0
        self.on_phase: Callable[[str], None] | None = None  # called when another phase begins

    def beat(self, phase: str | None = None) -> None:
        """Record progress; with ``phase``, another part of the run begins."""
        if phase is not None and phase != self.phase:
            self.phase = phase
            if self.on_phase is not None:
                self.on_phase(phase)
        self.beats += 1

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """A block that ends when the other processes have reached it."""
        outer, self.waits_for = self.waits_for, self.waits_for or what
        began = perf_counter()
        try:
            yield
        finally:
            self.waits_for = outer
            self.beats += 1
            if outer is None:
                self._waited += perf_counter() - began

    def take_waited(self) -> float:
        """Seconds in such blocks since the last call."""
        waited, self._waited = self._waited, 0.0
        return waited


class Board(Protocol):
    """Notes by name, shared by all ranks; no call waits for another rank."""

    def add(self, name: str, number: int) -> int:
        """Add to a counter that starts at 0, atomically; -> its new value."""
        ...

    def post(self, name: str, note: bytes) -> None:
        """Write or replace a note."""
        ...

    def read(self, name: str) -> bytes | None:
        """A note, or None where there is none yet."""
        ...

    def remove(self, name: str) -> None:
        """Remove a note, if there is one."""
        ...


class World(Protocol):
    """The processes of a run, seen from one of them."""

    rank: int  # from 0
    size: int
    numbers: tuple[int, ...]  # the ranks of the run, by rank of this world
    host: str
    board: Board
    pulse: Pulse

    def all_gather(self, mine: Any) -> list[Any]:
        """The value of every rank, by rank."""
        ...

    def all_gather_rows(
        self,
        tensors: Sequence[torch.Tensor],
        cuts: Sequence[Sequence[int]],
        places: Sequence[int] | None = None,
    ) -> None:
        """Complete contiguous tensors in place, on any device.  Rows ``cuts[i][p]`` to ``cuts[i][p
        + 1]`` of ``tensors[i]`` come from the rank r whose place is p: ``places[r]``, or r.
        """
        ...

    def all_gather_stack(self, mine: torch.Tensor) -> torch.Tensor:
        """The contiguous tensors of all ranks, of one shape and format, as a new [size, ...].  On a
        GPU the host does not wait, and a CUDA graph can capture it.
        """
        ...

    def shared(self, size: int, device: torch.device) -> list[torch.Tensor]:
        """``size`` bytes of every rank, which all can read, kept as long as the world: uint8 [size]
        on ``device``, or of the host. The ranks are on one host. Raises ConfigError on all where
        they cannot read each other's memory.
        """
        ...

    def exchanges(self, numbers: int, device: torch.device, buffers: int = 2) -> Exchanges:
        """A series of exchanges of FP32 numbers on ``device``; a rank sends at most ``numbers`` to
        another, and ``buffers`` exchanges may be under way.  GPUs of one host use copy engines.
        """
        ...

    def barrier(self, what: str) -> None:
        """Wait until all ranks are here."""
        ...

    def own_device(self, device: torch.device) -> torch.device:
        """This rank's device of a type.  Raises ConfigError where another rank has the same."""
        ...

    def split(self, cuts: Sequence[int]) -> "World":
        """Make worlds of the ranks ``cuts[i]`` to ``cuts[i + 1]``; -> the one of this rank, which
        counts its ranks from 0.  The pulse stays that of the whole.
        """
        ...

    def split_groups(self, groups: Sequence[Sequence[int]]) -> "World":
        """``split`` into groups of ranks that need not be neighbours: each ascending, disjoint."""
        ...


class _Notes:
    """The board of a process alone."""

    def __init__(self) -> None:
        self._counters: dict[str, int] = {}
        self._notes: dict[str, bytes] = {}

    def add(self, name: str, number: int) -> int:
        self._counters[name] = self._counters.get(name, 0) + number
        return self._counters[name]

    def post(self, name: str, note: bytes) -> None:
        self._notes[name] = note

    def read(self, name: str) -> bytes | None:
        return self._notes.get(name)

    def remove(self, name: str) -> None:
        self._notes.pop(name, None)


class Alone:
    """A world of one."""

    rank, size = 0, 1

    def __init__(self) -> None:
        self.numbers: tuple[int, ...] = (0,)
        self.host = socket.gethostname()
        self.board: Board = _Notes()
        self.pulse = Pulse()

    def all_gather(self, mine: Any) -> list[Any]:
        return [mine]

    def all_gather_rows(
        self,
        tensors: Sequence[torch.Tensor],
        cuts: Sequence[Sequence[int]],
        places: Sequence[int] | None = None,
    ) -> None:
        pass

    def all_gather_stack(self, mine: torch.Tensor) -> torch.Tensor:
        return mine[None]

    def shared(self, size: int, device: torch.device) -> list[torch.Tensor]:
        return [torch.empty(size, dtype=torch.uint8, device=device)]

    def exchanges(self, numbers: int, device: torch.device, buffers: int = 2) -> Exchanges:
        return NoExchanges()

    def barrier(self, what: str) -> None:
        pass

    def own_device(self, device: torch.device) -> torch.device:
        return device

    def split(self, cuts: Sequence[int]) -> World:
        return self

    def split_groups(self, groups: Sequence[Sequence[int]]) -> World:
        return self


ALONE = Alone()  # the default world


T = TypeVar("T")
E = TypeVar("E", bound=BaseException)
_AGREED, _ALONE = "isobit_agreed", "isobit_alone"


def is_raised_on_all(error: BaseException) -> bool:
    """Whether every rank is ending with an error, so that all can still do something together."""
    if isinstance(error, PeerError):
        return error.rank is not None  # one whose connection is lost has not agreed
    return getattr(error, _AGREED, False)


def raised_on_all(error: E) -> E:
    """Mark an error that every rank raises by itself, from what all know."""
    setattr(error, _AGREED, True)
    return error


def raised_alone(error: E) -> E:
    """Mark an error of one rank that others do not come to hear of together, since they wait for it
    in the middle of something else: the rank ends by itself.
    """
    setattr(error, _ALONE, True)
    return error


def run_on_all(world: World, attempt: Callable[[], T]) -> T:
    """``attempt`` on every rank.  Where it raised on any, each rank raises: its own error, or one
    that names the first rank with one (out of memory and a signal keep their type).
    """
    made: list[T] = []
    run_and_gather(world, lambda: made.append(attempt()))
    return made[0]


def run_and_gather(world: World, attempt: Callable[[], Any]) -> list[Any]:
    """``attempt`` on every rank, and the results by rank; raises as ``run_on_all`` does."""
    error: BaseException | None = None
    value = None
    try:
        value = attempt()
    except StoppedAtOnce:
        raise
    except BaseException as raised:  # no rank may wait for this one after any error
        if getattr(raised, _ALONE, False):
            raise
        error = raised
    if world.size == 1:
        if error is not None:
            raise error
        return [value]
    outcomes = world.all_gather({"failure": _described(error), "value": None if error else value})
    for rank, outcome in enumerate(outcomes):
        if outcome["failure"] is not None:
            raised = error or _of_peer(world.numbers[rank], outcome["failure"])
            setattr(raised, _AGREED, True)
            raise raised
    return [outcome["value"] for outcome in outcomes]


def map_on_all(world: World, items: Sequence[T], compute: Callable[[T], Any]) -> list[Any]:
    """``compute`` of every item, in order, rank r's being r, r + W, ..; raises as
    ``run_on_all``.
    """
    results = run_and_gather(
        world, lambda: [compute(item) for item in items[world.rank :: world.size]]
    )
    return interleaved(results)


def interleaved(results: Sequence[Sequence[T]]) -> list[T]:
    """The results in the order of the items, where rank r had the items r, r + W, .."""
    count = sum(map(len, results))
    return [results[place % len(results)][place // len(results)] for place in range(count)]


def _described(error: BaseException | None) -> dict[str, Any] | None:
    if error is None:
        return None
    if isinstance(error, Interrupted):
        return {"signal": error.signal_name, "number": error.exit_code - 128}
    if isinstance(error, PeerError) and error.rank is not None:
        return {"peer": error.rank, "text": error.reason}
    memory = isinstance(error, torch.OutOfMemoryError)
    return {"memory": memory, "text": f"{type(error).__name__}: {error}"}


def _of_peer(rank: int, failure: dict[str, Any]) -> BaseException:
    if "signal" in failure:
        return Interrupted(failure["signal"], failure["number"])
    if "peer" in failure:
        return PeerError(failure["peer"], failure["text"])
    if failure["memory"]:
        return torch.OutOfMemoryError(f"rank {rank}: {failure['text']}")
    return PeerError(rank, failure["text"])


_TENSOR = "tensor"


def encode(value: Any) -> bytes:
    """The bytes of None, bool, int, float, str, list, tuple, dict with string keys, or tensor."""
    tensors: dict[str, torch.Tensor] = {}
    text = json.dumps(_plain(value, tensors), separators=(",", ":")).encode()
    return struct.pack("<Q", len(text)) + text + save(tensors)


def decode(data: bytes) -> Any:
    """What ``encode`` was given, with tensors on the host."""
    (length,) = struct.unpack_from("<Q", data)
    tensors = load(data[8 + length :])
    return _whole(json.loads(data[8 : 8 + length]), tensors)


def _plain(value: Any, tensors: dict[str, torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        number = str(len(tensors))
        tensors[number] = value.detach().cpu().contiguous()
        return {_TENSOR: number}
    if isinstance(value, dict):
        assert value.keys() != {_TENSOR}, "this name stands for tensors"
        return {key: _plain(one, tensors) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(one, tensors) for one in value]
    return value


def _whole(value: Any, tensors: dict[str, torch.Tensor]) -> Any:
    if isinstance(value, dict):
        if value.keys() == {_TENSOR}:
            return tensors[value[_TENSOR]]
        return {key: _whole(one, tensors) for key, one in value.items()}
    if isinstance(value, list):
        return [_whole(one, tensors) for one in value]
    return value


def broadcast(world: World, make: Callable[[], T]) -> T:
    """What rank 0 makes, on every rank; ``make`` is not called elsewhere.  Raises on all as
    ``run_on_all`` does.  Unlike in ``all_gather``, each rank receives one value only.
    """
    return broadcast_from(
        world, 0, make if world.rank == 0 else None, partial(run_and_gather, world)
    )


def broadcast_from(
    world: World,
    source: int,
    make: Callable[[], Any] | None,
    agree: Callable[[Callable[[], int]], list[int]],
) -> Any:
    """What rank ``source`` makes, on every rank.  What others make is discarded; where a ``make``
    raises, every rank raises as ``agree`` does, which is ``run_and_gather`` in this world.
    """
    made: list[bytes] = []

    def attempt() -> int:
        if make is None:
            return 0
        made.append(encode(make()))
        return len(made[0])

    size = agree(attempt)[source]
    sent = torch.empty(size, dtype=torch.uint8)
    if world.rank == source:
        sent = torch.frombuffer(bytearray(made[0]), dtype=torch.uint8)
    world.all_gather_rows([sent], [[0] * (source + 1) + [size] * (world.size - source)])
    return decode(bytes(sent.numpy()))


def write_on_all(world: World, attempt: Callable[[], Any]) -> list[Any]:
    """``run_and_gather`` for writing files.  A StorageError on one rank is raised on all, with the
    rank and its host, as NoSpaceError where only space was missing.
    """

    def tried() -> dict[str, Any]:
        try:
            return {"made": attempt()}
        except StorageError as error:
            if world.size == 1:
                raise
            where = f"rank {world.rank} on {world.host}"
            return {"failed": f"{where}: {error}", "is_full": isinstance(error, NoSpaceError)}

    outcomes = run_and_gather(world, tried)
    failed = [outcome for outcome in outcomes if "failed" in outcome]
    if failed:
        kind = NoSpaceError if all(outcome["is_full"] for outcome in failed) else StorageError
        raise raised_on_all(kind(failed[0]["failed"]))
    return [outcome["made"] for outcome in outcomes]


def write_on_first(world: World, attempt: Callable[[], Any]) -> None:
    """``attempt`` on rank 0, while the others wait; raises as ``write_on_all`` does."""

    def first() -> None:
        if world.rank == 0:
            attempt()

    write_on_all(world, first)
