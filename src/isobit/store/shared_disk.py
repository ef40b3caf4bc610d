"""The check that all hosts see the same output directory.

All ranks write a checkpoint into the same files.  If each host had its own disk, each would keep a
useless part.
"""

import secrets
from contextlib import suppress
from pathlib import Path
from time import monotonic, sleep

from isobit.parallel.world import World, broadcast, raised_on_all
from isobit.util.disk_space import disk_errors
from isobit.util.errors import ConfigError

PATIENCE_S = 5.0  # a network file system may show a new file this much later


def check_shared(world: World, root: Path) -> None:
    """Raise ConfigError on all ranks, naming those that do not see a file that rank 0 writes where
    the run's directory ``root`` is or will be.
    """
    if world.size == 1:
        return
    above = (root.absolute(), *root.absolute().parents)

    def leave() -> tuple[int, str]:
        level = next(level for level, place in enumerate(above) if place.is_dir())
        name = f".isobit-{secrets.token_hex(8)}"
        with disk_errors(above[level], "a file for the other ranks"):
            (above[level] / name).touch()
        return level, name

    level, name = broadcast(world, leave)
    place = above[level] if level < len(above) else above[-1]
    mine = f"rank {world.rank} on {world.host}: {place}"
    seen = world.all_gather([mine, _appears(place / name)])
    if world.rank == 0:
        with suppress(OSError):
            (place / name).unlink()
    blind = [where for where, sees in seen if not sees]
    if blind:
        raise raised_on_all(
            ConfigError(
                f"output is {str(root)!r}, and what rank 0 writes there is not seen by\n"
                + "".join(f"  {where}\n" for where in blind)
                + "put it on a file system that all hosts share, under the same path (--output "
                "PATH), or write no checkpoints (checkpoint.keep_last = 0)"
            )
        )


def _appears(path: Path) -> bool:
    """Whether a file exists within PATIENCE_S."""
    last = monotonic() + PATIENCE_S
    while True:
        with suppress(OSError):  # reading the folder is what makes a network file system look again
            if path.name in (other.name for other in path.parent.iterdir()):
                return True
        if monotonic() >= last:
            return False
        sleep(0.2)
