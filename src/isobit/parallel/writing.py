"""Writing by several ranks: a disk that fails one of them fails all, with an error that names the
rank and its host.
"""

from collections.abc import Callable
from typing import Any

from isobit.errors import NoSpaceError, StorageError
from isobit.parallel.agreement import agreed, gathered
from isobit.parallel.world import World


def write_together(world: World, attempt: Callable[[], Any]) -> list[Any]:
    """``attempt`` on every rank, and what each made of it (``isobit.parallel.message``).  Raises
    StorageError on all where it did so on any, NoSpaceError where nothing but room was missing;
    whatever else it raises, all raise, too.
    """

    def tried() -> dict[str, Any]:
        try:
            return {"made": attempt()}
        except StorageError as error:
            if world.size == 1:
                raise
            where = f"rank {world.rank} on {world.host}"
            return {"failed": f"{where}: {error}", "is_full": isinstance(error, NoSpaceError)}

    found = gathered(world, tried)
    failed = [one for one in found if "failed" in one]
    if failed:
        kind = NoSpaceError if all(one["is_full"] for one in failed) else StorageError
        raise agreed(kind(failed[0]["failed"]))
    return [one["made"] for one in found]


def write_by_first(world: World, attempt: Callable[[], Any]) -> None:
    """``attempt`` on rank 0, while the others wait; raises as ``write_together`` does."""

    def first() -> None:
        if world.rank == 0:
            attempt()

    write_together(world, first)
