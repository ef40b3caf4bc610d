"""The processes of a run, and what moves between them, as those see it who compute.

Every process runs the same program on the same data and decides the same; a *rank* computes its
share, and the results are gathered.  All methods but ``board``'s are collective: every rank calls
them in the same order.  Nothing here adds numbers: NCCL's and gloo's sums depend on topology,
algorithm and the number of ranks.

    messages    a small value of every rank, on every rank
    gather      slices of a tensor, each written by one rank, complete on all
    exchanges   a series of slices from every rank to every other, through buffers made once
    stack       equal tensors of all ranks, one upon the other
    board       notes that any rank leaves and any other finds, without waiting

A run alone is a world of one (``Alone``): the same calls, and nothing travels.  Several are
``isobit.parallel.processes``.
"""

import socket
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from isobit.parallel.exchanges import Exchanges, NoExchanges
from isobit.parallel.pulse import Pulse


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
    numbers: tuple[int, ...]
    """By rank, the ranks of the run."""
    host: str
    board: Board
    pulse: Pulse

    def messages(self, mine: Any) -> list[Any]:
        """The value of every rank, by rank (``isobit.parallel.message``)."""
        ...

    def gather(
        self,
        tensors: Sequence[torch.Tensor],
        cuts: Sequence[Sequence[int]],
        places: Sequence[int] | None = None,
    ) -> None:
        """Complete tensors in place.  Rows ``cuts[i][p]`` to ``cuts[i][p + 1]`` of ``tensors[i]``,
        contiguous and on any device, are of the rank r whose place is p: ``places[r]``, or r.
        """
        ...

    def stack(self, mine: torch.Tensor) -> torch.Tensor:
        """The contiguous tensors of all ranks, of one shape and format, by rank: a new [size, ...].
        On a GPU nothing is waited for, and a CUDA graph can capture it.
        """
        ...

    def exchanges(self, numbers: int, device: torch.device, buffers: int = 2) -> Exchanges:
        """A series of exchanges of FP32 numbers on ``device``, of which one rank sends at most
        ``numbers`` to one other, and as many as there are ``buffers`` may be on their way.  Between
        the GPUs of one host they go by copy engines.
        """
        ...

    def barrier(self, what: str) -> None:
        """Wait until all ranks are here."""
        ...

    def own_device(self, device: torch.device) -> torch.device:
        """Of the devices of a type, this rank's.  Raises ConfigError where it is another's too."""
        ...

    def part(self, cuts: Sequence[int]) -> "World":
        """The ranks ``cuts[i]`` to ``cuts[i + 1]`` become a world of their own, each of them in
        one; -> that of this rank, which counts its ranks from 0.  Signs of life stay those of the
        whole.
        """
        ...

    def among(self, groups: Sequence[Sequence[int]]) -> "World":
        """``part`` with ranks that need not be neighbours: each ascending, and in one group."""
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


class Alone:
    """One process."""

    rank, size = 0, 1

    def __init__(self) -> None:
        self.numbers: tuple[int, ...] = (0,)
        self.host = socket.gethostname()
        self.board: Board = _Notes()
        self.pulse = Pulse()

    def messages(self, mine: Any) -> list[Any]:
        """Its own, as it would arrive."""
        return [mine]

    def gather(
        self,
        tensors: Sequence[torch.Tensor],
        cuts: Sequence[Sequence[int]],
        places: Sequence[int] | None = None,
    ) -> None:
        """They are complete."""

    def stack(self, mine: torch.Tensor) -> torch.Tensor:
        """Its own alone."""
        return mine[None]

    def exchanges(self, numbers: int, device: torch.device, buffers: int = 2) -> Exchanges:
        """See ``World``."""
        return NoExchanges()

    def barrier(self, what: str) -> None:
        """Nobody to wait for."""

    def own_device(self, device: torch.device) -> torch.device:
        """The one that is chosen where there are several."""
        return device

    def part(self, cuts: Sequence[int]) -> World:
        """It has none but itself."""
        return self

    def among(self, groups: Sequence[Sequence[int]]) -> World:
        """It has none but itself."""
        return self


ALONE = Alone()
"""For everything that is not told of a world."""
