"""What our launcher and the ranks of a run with rollouters tell each other when it starts the
rollouters again: ``RestartPage``, a page of memory that all of a host share.  Needs no torch.

A launcher of ranks on several hosts has a page of its own, and each rank another: what one side
writes is copied to the other every few tenths of a second (``launch/ray_launcher.py``).

    starts      by the launcher: how often it has started them again
    over        by the launcher, 1: it does not start them again any more
    ready       by rank 0, 1: from now on the trainers can go on with others
    answered    by rank 0: the starts, the first one included, up to the last that has answered
    done        by rank 0, 1: the run is done, and rollouters that die now are no loss
"""

import os
import struct
from collections.abc import Iterable, Mapping, MutableMapping
from typing import Literal, Self

VARIABLE = "ISOBIT_ROLLOUTERS"
"""``descriptor:rollouters:start``: of the page as a rank inherits it; how many of the ranks, the
last ones, are rollouters; and of a rollouter, how many starts came before its own.
"""
Entry = Literal["starts", "over", "ready", "answered", "done"]
LAUNCHERS: tuple[Entry, ...] = ("starts", "over")
"""What the launcher writes; rank 0 writes the others."""
FIRST_RANKS: tuple[Entry, ...] = ("ready", "answered", "done")
_PLACES: dict[Entry, int] = {"starts": 0, "over": 8, "ready": 16, "answered": 24, "done": 32}
_NUMBER = struct.Struct("<q")


class RestartPage:
    """The page, as the launcher or a rank has it."""

    def __init__(self, descriptor: int, rollouters: int, start: int = 0) -> None:
        self.descriptor, self.rollouters, self.start = descriptor, rollouters, start

    @classmethod
    def made(cls, rollouters: int) -> Self:
        """A new page, made by the launcher."""
        page = cls(os.memfd_create("isobit-rollouters"), rollouters)
        for name in _PLACES:
            page.write(name, 0)
        return page

    @classmethod
    def inherited(cls, environment: MutableMapping[str, str] = os.environ) -> Self | None:
        """The page of this rank's launcher; None where it starts nothing again."""
        said = environment.pop(VARIABLE, None)  # what this process starts is no rank
        if said is None:
            return None
        descriptor, rollouters, start = map(int, said.split(":"))
        os.set_inheritable(descriptor, False)
        return cls(descriptor, rollouters, start)

    def enter(self, environment: MutableMapping[str, str], start: int) -> None:
        """Add what a rank of a start finds in its environment."""
        environment[VARIABLE] = f"{self.descriptor}:{self.rollouters}:{start}"
        # a lost rollouter must not end the trainers, and the launcher finds dead trainers
        environment.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")

    def read(self, name: Entry) -> int:
        return _NUMBER.unpack(os.pread(self.descriptor, _NUMBER.size, _PLACES[name]))[0]

    def write(self, name: Entry, number: int) -> None:
        os.pwrite(self.descriptor, _NUMBER.pack(number), _PLACES[name])

    def entries(self, names: Iterable[Entry]) -> dict[Entry, int]:
        """What was written under these names."""
        return {name: self.read(name) for name in names}

    def take(self, entries: Mapping[Entry, int]) -> None:
        """What another page has."""
        for name, number in entries.items():
            self.write(name, number)

    def close(self) -> None:
        os.close(self.descriptor)
