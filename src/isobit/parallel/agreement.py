"""What ranks do side by side and must then agree on: an error of one is an error of all, so that
nobody waits for a rank that has given up.

    together(world, attempt)               each rank's own result
    gathered(world, attempt)               the results of all ranks, by rank
    shared_out(world, items, compute)      each item computed by one rank, all results on all

``attempt`` asks nothing of other ranks: where it did, those that it asks might already have failed.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from isobit.errors import Interrupted, IsobitError, PeerError, StoppedAtOnce
from isobit.parallel.world import World

T = TypeVar("T")
_AGREED = "isobit_agreed"


def is_agreed(error: BaseException) -> bool:
    """Whether every rank of the world is ending with an error of its own, so that they may still do
    something together.
    """
    if isinstance(error, PeerError):
        return error.rank is not None  # one whose connection is lost has not agreed
    return getattr(error, _AGREED, False)


def agreed(error: IsobitError) -> IsobitError:
    """An error that every rank raises by itself, since all know what it follows from."""
    setattr(error, _AGREED, True)
    return error


def together(world: World, attempt: Callable[[], T]) -> T:
    """``attempt`` on every rank.  Where it raised on any, each rank raises: its own error, or one
    that names the first rank with one (out of memory and a signal keep their kind).
    """
    made: list[T] = []
    gathered(world, lambda: made.append(attempt()))
    return made[0]


def gathered(world: World, attempt: Callable[[], Any]) -> list[Any]:
    """``attempt`` on every rank, and what each made of it (``isobit.parallel.message``); raises as
    ``together`` does.
    """
    error: BaseException | None = None
    value = None
    try:
        value = attempt()
    except StoppedAtOnce:
        raise
    except BaseException as raised:  # whatever it is, nobody must wait for this rank
        error = raised
    if world.size == 1:
        if error is not None:
            raise error
        return [value]
    found = world.messages({"failure": _described(error), "value": None if error else value})
    for rank, one in enumerate(found):
        if one["failure"] is not None:
            raised = error or _of_peer(world.numbers[rank], one["failure"])
            setattr(raised, _AGREED, True)
            raise raised
    return [one["value"] for one in found]


def shared_out(world: World, items: Sequence[T], compute: Callable[[T], Any]) -> list[Any]:
    """``compute`` of every item, in their order: rank r takes the items r, r + W, ..; raises as
    ``together`` does.
    """
    made = gathered(world, lambda: [compute(item) for item in items[world.rank :: world.size]])
    return in_turn(made)


def in_turn(made: Sequence[Sequence[T]]) -> list[T]:
    """The results of all items in their order, from those that each rank made of its own: rank r of
    the items r, r + W, ..
    """
    count = sum(map(len, made))
    return [made[place % len(made)][place // len(made)] for place in range(count)]


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
